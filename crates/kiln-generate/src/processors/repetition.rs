//! What occurred before becomes less likely, or impossible.

use std::collections::HashSet;

use kiln_core::{Result, model::TokenId};
use kiln_kernels::Sampling;

use super::{Processor, RowState, as_written, remove_tokens};
use crate::{config::GenerationConfig, settings::positive};

/// `s < 0 ? s * penalty : s / penalty` for every token that occurred, once however often it did.
///
/// As transformers 5 does, and 4 did not, padding in front of the row is no occurrence. (`RepetitionPenaltyLogitsProcessor`)
#[derive(Debug)]
pub(super) struct RepetitionPenalty(f32);

impl RepetitionPenalty {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        penalty("repetition_penalty", config.repetition_penalty).map(|penalty| penalty.map(Self))
    }
}

impl Processor for RepetitionPenalty {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        penalize(row.ids, self.0, scores);
    }

    fn on_device(&self, sampling: &mut Sampling) -> bool {
        sampling.repetition_penalty = self.0;
        true
    }
}

/// The opposite of a repetition penalty, for tokens of the prompt: what occurs there becomes more likely.
/// (`EncoderRepetitionPenaltyLogitsProcessor`)
#[derive(Debug)]
pub(super) struct EncoderRepetitionPenalty(f32);

impl EncoderRepetitionPenalty {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let value = penalty("encoder_repetition_penalty", config.encoder_repetition_penalty)?;
        Ok(value.map(|value| Self((1.0 / as_written(value)) as f32)))
    }
}

impl Processor for EncoderRepetitionPenalty {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        penalize(row.prompt(), self.0, scores);
    }
}

fn penalty(name: &'static str, value: Option<f32>) -> Result<Option<f32>> {
    let Some(value) = value.filter(|&value| value != 1.0) else { return Ok(None) };
    positive(name, value)?;
    Ok(Some(value))
}

fn penalize(ids: &[TokenId], penalty: f32, scores: &mut [f32]) {
    let mut done = vec![false; scores.len()];
    for &id in ids {
        if let (Some(score), Some(done)) = (scores.get_mut(id as usize), done.get_mut(id as usize))
            && !std::mem::replace(done, true)
        {
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
    }
}

/// Removes what would complete a sequence of `n` tokens that occurred before. (`NoRepeatNGramLogitsProcessor`)
#[derive(Debug)]
pub(super) struct NoRepeatNgram(usize);

impl NoRepeatNgram {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(config.no_repeat_ngram_size.filter(|&n| n > 0).map(Self))
    }
}

impl Processor for NoRepeatNgram {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        remove_tokens(scores, &continuations(row.ids, row.ids, self.0));
    }
}

/// Removes what would complete a sequence of `n` tokens of the prompt. (`EncoderNoRepeatNGramLogitsProcessor`)
#[derive(Debug)]
pub(super) struct EncoderNoRepeatNgram(usize);

impl EncoderNoRepeatNgram {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(config.encoder_no_repeat_ngram_size.filter(|&n| n > 0).map(Self))
    }
}

impl Processor for EncoderNoRepeatNgram {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        remove_tokens(scores, &continuations(row.prompt(), row.ids, self.0));
    }
}

/// The tokens that follow the last `n - 1` of `ids` anywhere in `text`.
fn continuations(text: &[TokenId], ids: &[TokenId], n: usize) -> Vec<TokenId> {
    let Some(start) = (ids.len() + 1).checked_sub(n) else { return Vec::new() };
    let last = &ids[start..];
    let follows =
        |window: &[TokenId]| window.split_last().filter(|(_, before)| *before == last).map(|(id, _)| *id);
    let found: HashSet<TokenId> = text.windows(n).filter_map(follows).collect();
    found.into_iter().collect()
}
