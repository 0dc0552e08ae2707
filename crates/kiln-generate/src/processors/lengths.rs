//! Processors that depend on the length of a row.

use kiln_core::{Result, model::TokenId};

use super::{Processor, RowState, as_written, remove_tokens};
use crate::{
    config::GenerationConfig,
    settings::{positive, setting},
};

/// Removes the tokens that end a row while it has fewer than `min` tokens, prompt and padding included.
/// (`MinLengthLogitsProcessor`)
#[derive(Debug)]
pub(super) struct MinLength {
    min: usize,
    eos: Vec<TokenId>,
}

impl MinLength {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        // `min_new_tokens` overrides `min_length`.
        let min = config.min_length.filter(|_| config.min_new_tokens.is_none());
        Ok(until(min, config).map(|(min, eos)| Self { min, eos }))
    }
}

impl Processor for MinLength {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        if row.len < self.min {
            remove_tokens(scores, &self.eos);
        }
    }
}

/// Removes the tokens that end a row while fewer than `min` were generated.
/// (`MinNewTokensLengthLogitsProcessor`)
#[derive(Debug)]
pub(super) struct MinNewTokens {
    min: usize,
    eos: Vec<TokenId>,
}

impl MinNewTokens {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(until(config.min_new_tokens, config).map(|(min, eos)| Self { min, eos }))
    }
}

impl Processor for MinNewTokens {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        if row.generated < self.min {
            remove_tokens(scores, &self.eos);
        }
    }
}

/// A length, and the tokens that end a row; `None` if either is missing.
fn until(min: Option<usize>, config: &GenerationConfig) -> Option<(usize, Vec<TokenId>)> {
    let eos = config.eos_token_id.clone().filter(|eos| !eos.is_empty());
    min.filter(|&min| min > 0).zip(eos)
}

/// Forces this token after a prompt of one token. (`ForcedBOSTokenLogitsProcessor`)
#[derive(Debug)]
pub(super) struct ForcedBos(TokenId);

impl ForcedBos {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(config.forced_bos_token_id.map(Self))
    }
}

impl Processor for ForcedBos {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        if row.len == 1 {
            force(scores, &[self.0]);
        }
    }

    fn check(&self, vocab: usize) -> Result<()> {
        in_vocabulary("forced_bos_token_id", &[self.0], vocab)
    }
}

/// Forces one of these tokens as the last that may be generated. (`ForcedEOSTokenLogitsProcessor`)
#[derive(Debug)]
pub(super) struct ForcedEos(Vec<TokenId>);

impl ForcedEos {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok(config.forced_eos_token_id.clone().filter(|ids| !ids.is_empty()).map(Self))
    }
}

impl Processor for ForcedEos {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        if row.remaining == Some(1) {
            force(scores, &self.0);
        }
    }

    fn check(&self, vocab: usize) -> Result<()> {
        in_vocabulary("forced_eos_token_id", &self.0, vocab)
    }
}

/// Removes all but these tokens, which become equally likely.
fn force(scores: &mut [f32], tokens: &[TokenId]) {
    scores.fill(f32::NEG_INFINITY);
    for &id in tokens {
        if let Some(score) = scores.get_mut(id as usize) {
            *score = 0.0;
        }
    }
}

pub(crate) fn in_vocabulary(name: &'static str, tokens: &[TokenId], vocab: usize) -> Result<()> {
    match tokens.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => {
            Err(setting(name, format!("token {id} is not in the model's vocabulary of {vocab} tokens")))
        }
        None => Ok(()),
    }
}

/// Raises the scores of the tokens that end a row by `(factor ^ steps - 1) * |score|`, where `steps` counts
/// the tokens generated beyond `start`. (`ExponentialDecayLengthPenalty`)
#[derive(Debug)]
pub(super) struct ExponentialDecay {
    start: usize,
    factor: f64,
    eos: Vec<TokenId>,
}

impl ExponentialDecay {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some((start, factor)) = config.exponential_decay_length_penalty else { return Ok(None) };
        positive("exponential_decay_length_penalty", factor)?;
        let eos = config.eos_token_id.clone().filter(|eos| !eos.is_empty());
        Ok(eos.map(|eos| Self { start, factor: as_written(factor), eos }))
    }
}

impl Processor for ExponentialDecay {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let Some(steps @ 1..) = row.generated.checked_sub(self.start) else { return };
        let factor = (self.factor.powf(steps as f64) - 1.0) as f32;
        for &id in &self.eos {
            // A removed token stays removed.
            if let Some(score) =
                scores.get_mut(id as usize).filter(|score| score.is_finite() && **score != 0.0)
            {
                // A score that overflows becomes the largest finite number.
                *score = (*score + score.abs() * factor).clamp(f32::MIN, f32::MAX);
            }
        }
    }
}
