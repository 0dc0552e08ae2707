//! Logits processors, which change the scores of the next token before it is chosen.
//!
//! Formulas, order and conditions are those of transformers' `logits_process.py`. Removed tokens have the
//! score -inf.

mod allowed;
mod lengths;
mod repetition;
mod tokens;
mod warpers;
mod watermark;

pub(crate) use self::{
    lengths::in_vocabulary,
    warpers::{log_softmax, softmax},
};

use std::{fmt, sync::Arc};

use kiln_core::{Error, Result, model::TokenId};
use kiln_kernels::Sampling;

use crate::config::GenerationConfig;

pub use allowed::AllowedTokens;

/// A change to the scores of one row's next token.
pub trait Processor: fmt::Debug + Send + Sync {
    /// Changes `scores`, one for each token of the vocabulary.
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]);

    /// Changes the scores like [`apply`](Self::apply), for a processor that can fail. An error ends the
    /// generation.
    ///
    /// # Errors
    /// The errors of the processor. By default there are none.
    fn try_apply(&self, row: &RowState<'_>, scores: &mut [f32]) -> Result<()> {
        self.apply(row, scores);
        Ok(())
    }

    /// Delegates the change to the kernel `sample`, by setting its part of `sampling`; `false` if the kernel
    /// does not support it.
    fn on_device(&self, _sampling: &mut Sampling) -> bool {
        false
    }

    /// Checks that the processor can act on a vocabulary of this many tokens.
    ///
    /// # Errors
    /// [`Error::Setting`] for tokens that are not in the vocabulary.
    fn check(&self, _vocab: usize) -> Result<()> {
        Ok(())
    }
}

/// A row whose next token is being chosen.
#[derive(Clone, Copy, Debug)]
pub struct RowState<'a> {
    /// Index of the row in the batch.
    pub index: usize,
    /// The prompt and the tokens so far, without padding. If a `ModelCache` is continued, its earlier tokens
    /// are not included; a `Sequence` knows them.
    pub ids: &'a [TokenId],
    /// Number of generated tokens among them.
    pub generated: usize,
    /// Number of padding tokens before them.
    pub padding: usize,
    /// Length of the row in tokens, including padding, as `max_length` and `min_length` count it.
    pub len: usize,
    /// Maximum number of tokens that may still be generated, including the next one; `None`: no limit.
    pub remaining: Option<usize>,
}

impl<'a> RowState<'a> {
    /// The tokens that were not generated.
    pub fn prompt(&self) -> &'a [TokenId] {
        &self.ids[..self.ids.len().saturating_sub(self.generated)]
    }

    /// The row `n` tokens later, when its tokens are `ids`.
    pub(crate) fn ahead<'b>(&self, ids: &'b [TokenId], n: usize) -> RowState<'b> {
        RowState {
            index: self.index,
            ids,
            generated: self.generated + n,
            padding: self.padding,
            len: self.len + n,
            remaining: self.remaining.map(|remaining| remaining.saturating_sub(n)),
        }
    }
}

/// Creates the processor for a setting; `None` if the setting is absent or neutral.
type Make = fn(&GenerationConfig) -> Result<Option<Arc<dyn Processor>>>;

/// A setting that has a processor.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    /// Whether it acts only on sampling.
    sampling: bool,
    make: Make,
}

macro_rules! kinds {
    ($($name:ident: $when:ident $make:path,)*) => {
        /// All kinds in the order in which they act. Custom processors come before those that act only on
        /// sampling.
        const KINDS: &[Kind] = &[$(Kind {
            name: stringify!($name),
            sampling: kinds!($when),
            make: |config| Ok($make(config)?.map(|processor| Arc::new(processor) as Arc<dyn Processor>)),
        }),*];
    };
    (always) => { false };
    (sampling) => { true };
}

/// The name of custom processors.
const OWN: &str = "processors";

kinds! {
    sequence_bias: always tokens::SequenceBias::new,
    encoder_repetition_penalty: always repetition::EncoderRepetitionPenalty::new,
    repetition_penalty: always repetition::RepetitionPenalty::new,
    no_repeat_ngram_size: always repetition::NoRepeatNgram::new,
    encoder_no_repeat_ngram_size: always repetition::EncoderNoRepeatNgram::new,
    bad_words_ids: always tokens::SequenceBias::of_bad_words,
    min_length: always lengths::MinLength::new,
    min_new_tokens: always lengths::MinNewTokens::new,
    forced_bos_token_id: always lengths::ForcedBos::new,
    forced_eos_token_id: always lengths::ForcedEos::new,
    remove_invalid_values: always tokens::RemoveInvalid::new,
    exponential_decay_length_penalty: always lengths::ExponentialDecay::new,
    suppress_tokens: always tokens::Suppress::new,
    begin_suppress_tokens: always tokens::SuppressAtBegin::new,
    temperature: sampling warpers::Temperature::new,
    top_h: sampling warpers::TopH::new,
    top_k: sampling warpers::TopK::new,
    top_p: sampling warpers::TopP::new,
    min_p: sampling warpers::MinP::new,
    typical_p: sampling warpers::Typical::new,
    epsilon_cutoff: sampling warpers::Epsilon::new,
    eta_cutoff: sampling warpers::Eta::new,
    watermarking_config: always watermark::Watermark::new,
    renormalize_logits: always warpers::Renormalize::new,
}

/// The settings that have a processor, in the order in which they act.
pub fn names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name)
}

/// The processors of a generation, in the order in which they act. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct Processors {
    list: Vec<(&'static str, Arc<dyn Processor>)>,
}

impl Processors {
    /// Creates the processors for `config`. Settings at their neutral value have none.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first invalid value.
    pub fn of(config: &GenerationConfig, do_sample: bool) -> Result<Self> {
        let mut list = Vec::new();
        for kind in KINDS {
            // A setting without effect is checked, too.
            let made = (kind.make)(config)?;
            list.extend(made.filter(|_| do_sample || !kind.sampling).map(|processor| (kind.name, processor)));
        }
        Ok(Self { list })
    }

    /// Adds a custom processor after those that do not depend on sampling, as transformers does.
    pub(crate) fn add(&mut self, processor: Arc<dyn Processor>) {
        self.insert(OWN, processor, KINDS.iter().position(|kind| kind.sampling));
    }

    /// Adds the tokens that a program allows, before those that are forced, as transformers does.
    pub(crate) fn add_allowed_tokens(&mut self, allowed: AllowedTokens) {
        let forced = KINDS.iter().position(|kind| kind.name == "forced_bos_token_id");
        self.insert(AllowedTokens::NAME, Arc::new(allowed), forced);
    }

    /// Inserts a processor before those of `KINDS[first..]`, and before custom ones unless it is one.
    fn insert(&mut self, name: &'static str, processor: Arc<dyn Processor>, first: Option<usize>) {
        let kinds = &KINDS[first.unwrap_or(KINDS.len())..];
        let behind = |(other, _): &(&str, _)| {
            kinds.iter().any(|kind| kind.name == *other) || *other == OWN && name != OWN
        };
        let at = self.list.iter().position(behind).unwrap_or(self.list.len());
        self.list.insert(at, (name, processor));
    }

    /// The names of their settings.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.list.iter().map(|(name, _)| *name)
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Changes the scores of the next token of `row`.
    ///
    /// # Errors
    /// The errors of a custom processor, and [`Error::Setting`] if a program allows no token.
    pub fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) -> Result<()> {
        self.list.iter().try_for_each(|(_, processor)| processor.try_apply(row, scores))
    }

    /// The processors that do not only shape the distribution for sampling.
    fn lasting(&self) -> impl Iterator<Item = &Arc<dyn Processor>> {
        let shapes = |name: &str| KINDS.iter().any(|kind| kind.sampling && kind.name == name);
        self.list.iter().filter(move |(name, _)| !shapes(name)).map(|(_, processor)| processor)
    }

    /// Whether [`forbids`](Self::forbids) may ever return true.
    pub(crate) fn may_forbid(&self) -> bool {
        self.lasting().next().is_some()
    }

    /// Whether they remove a token from a row whatever the scores are.
    pub(crate) fn forbids(&self, row: &RowState<'_>, token: TokenId, vocab: usize) -> bool {
        let mut scores = vec![1.0; vocab];
        let applied = self.lasting().try_for_each(|processor| processor.try_apply(row, &mut scores));
        applied.is_err() || scores.get(token as usize).is_none_or(|score| *score == f32::NEG_INFINITY)
    }

    /// The error for the processor that leaves no token of these logits; `None` if it is not one of them.
    pub(crate) fn emptied(&self, row: &RowState<'_>, logits: &[f32]) -> Option<Error> {
        let possible = |scores: &[f32]| scores.iter().any(|score| *score > f32::NEG_INFINITY);
        let mut scores = logits.to_vec();
        let is_one = possible(&scores) && !scores.iter().any(|score| score.is_nan());
        let empties = |(_, processor): &&(&str, Arc<dyn Processor>)| {
            processor.apply(row, &mut scores);
            !possible(&scores)
        };
        let (name, _) = is_one.then(|| self.list.iter().find(empties)).flatten()?;
        let why = format!("leaves no token to choose after {} tokens of a row", row.ids.len());
        Some(Error::Setting { name, why })
    }

    /// The parameters with which the kernel `sample` does their work; `draws`: whether it then samples the
    /// token.
    ///
    /// # Errors
    /// The settings that the kernel does not support. The scores are read back for them.
    pub fn on_device(&self, draws: bool) -> Result<Sampling, Vec<&'static str>> {
        let mut sampling = Sampling { draws, ..Sampling::NEUTRAL };
        let others = self.list.iter().filter(|(_, processor)| !processor.on_device(&mut sampling));
        let others: Vec<&str> = others.map(|(name, _)| *name).collect();
        if others.is_empty() { Ok(sampling) } else { Err(others) }
    }

    /// Checks that all can act on a vocabulary of this many tokens.
    ///
    /// # Errors
    /// [`Error::Setting`] for tokens that are not in the vocabulary.
    pub(crate) fn check(&self, vocab: usize) -> Result<()> {
        self.list.iter().try_for_each(|(_, processor)| processor.check(vocab))
    }
}

fn remove(scores: &mut [f32], condition: impl Fn(f32) -> bool) {
    for score in scores {
        if condition(*score) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// Removes these tokens. Ids outside the vocabulary are ignored.
fn remove_tokens(scores: &mut [f32], tokens: &[TokenId]) {
    for &id in tokens {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// The float64 that Python has for the digits of a float32: `1 - 0.9` is 0.1 there, `1 - 0.9f32` is not.
pub(crate) fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

#[cfg(test)]
mod tests;
