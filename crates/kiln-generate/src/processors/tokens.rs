//! Processors that make given tokens more or less likely.

use kiln_core::{Result, model::TokenId};

use super::{Processor, RowState, lengths::in_vocabulary, remove_tokens};
use crate::{config::GenerationConfig, settings::setting};

/// Adds to the score of the last token of each sequence, if the row ends with the others. Every sequence of
/// bad words has a bias of -inf. (`SequenceBiasLogitsProcessor`, `NoBadWordsLogitsProcessor`)
#[derive(Debug)]
pub(super) struct SequenceBias {
    setting: &'static str,
    sequences: Vec<(Vec<TokenId>, f32)>,
}

impl SequenceBias {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let sequences = config.sequence_bias.clone().unwrap_or_default();
        if let Some((_, bias)) = sequences.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            return Err(setting("sequence_bias", format!("a bias is {bias}, must be a number or -inf")));
        }
        Self::of("sequence_bias", sequences)
    }

    /// Creates the processor for bad words. A bad word that is a single end token is ignored.
    pub(super) fn of_bad_words(config: &GenerationConfig) -> Result<Option<Self>> {
        let ends = |words: &[TokenId]| match (words, &config.eos_token_id) {
            ([id], Some(eos)) => eos.contains(id),
            _ => false,
        };
        let words = config.bad_words_ids.iter().flatten().filter(|words| !ends(words));
        Self::of("bad_words_ids", words.map(|words| (words.clone(), f32::NEG_INFINITY)).collect())
    }

    fn of(name: &'static str, sequences: Vec<(Vec<TokenId>, f32)>) -> Result<Option<Self>> {
        if sequences.iter().any(|(sequence, _)| sequence.is_empty()) {
            return Err(setting(name, "a sequence is empty; give at least one token"));
        }
        Ok((!sequences.is_empty()).then_some(Self { setting: name, sequences }))
    }
}

impl Processor for SequenceBias {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        for (sequence, bias) in &self.sequences {
            let Some((last, before)) = sequence.split_last() else { continue };
            if row.ids.ends_with(before)
                && let Some(score) = scores.get_mut(*last as usize)
            {
                *score += bias;
            }
        }
    }

    fn check(&self, vocab: usize) -> Result<()> {
        self.sequences.iter().try_for_each(|(sequence, _)| in_vocabulary(self.setting, sequence, vocab))
    }
}

/// Removes these tokens. (`SuppressTokensLogitsProcessor`)
#[derive(Debug)]
pub(super) struct Suppress(Vec<TokenId>);

impl Suppress {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(config.suppress_tokens.clone().filter(|tokens| !tokens.is_empty()).map(Self))
    }
}

impl Processor for Suppress {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        remove_tokens(scores, &self.0);
    }
}

/// Removes these tokens from the first step. (`SuppressTokensAtBeginLogitsProcessor`)
#[derive(Debug)]
pub(super) struct SuppressAtBegin {
    tokens: Vec<TokenId>,
    /// Whether the first token after a prompt of one token is forced, so that the second counts as the first.
    forced: bool,
}

impl SuppressAtBegin {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let tokens = config.begin_suppress_tokens.clone().filter(|tokens| !tokens.is_empty());
        let forced = config.forced_bos_token_id.is_some();
        Ok(tokens.map(|tokens| Self { tokens, forced }))
    }
}

impl Processor for SuppressAtBegin {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let begin = usize::from(self.forced && row.len == row.generated + 1);
        if row.generated == begin {
            remove_tokens(scores, &self.tokens);
        }
    }
}

/// Replaces invalid numbers: NaN becomes 0, and infinities become the largest finite numbers.
/// (`InfNanRemoveLogitsProcessor`)
#[derive(Debug)]
pub(super) struct RemoveInvalid;

impl RemoveInvalid {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok((config.remove_invalid_values == Some(true)).then_some(Self))
    }
}

impl Processor for RemoveInvalid {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        for score in scores {
            *score = if score.is_nan() { 0.0 } else { score.clamp(f32::MIN, f32::MAX) };
        }
    }
}
