//! Processors that make repetitions less likely, or impossible.

use std::{borrow::Cow, collections::HashSet, ops::RangeInclusive};

use kiln_core::{Result, model::TokenId};
use kiln_kernels::Sampling;

use super::{Processor, RowState, as_written, remove_tokens};
use crate::{
    config::GenerationConfig,
    settings::{positive, setting},
};

/// `s < 0 ? s * penalty : s / penalty` for every token that occurred, once however often it did.
///
/// As in transformers 5, but not 4, padding before the row is not an occurrence.
/// (`RepetitionPenaltyLogitsProcessor`)
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

/// The opposite of a repetition penalty, for tokens of the prompt, which become more likely. Padding counts,
/// as in transformers. (`EncoderRepetitionPenaltyLogitsProcessor`)
#[derive(Debug)]
pub(super) struct EncoderRepetitionPenalty {
    penalty: f32,
    pad: Option<TokenId>,
}

impl EncoderRepetitionPenalty {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let value = penalty("encoder_repetition_penalty", config.encoder_repetition_penalty)?;
        let pad = padding(config);
        Ok(value.map(|value| Self { penalty: (1.0 / as_written(value)) as f32, pad }))
    }
}

impl Processor for EncoderRepetitionPenalty {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        penalize(&padded(row.prompt(), row, self.pad), self.penalty, scores);
    }
}

/// Allowed penalties. Scores up to 3e8, far more than any model gives, stay finite when divided or multiplied
/// by these.
const POSSIBLE: RangeInclusive<f32> = 1e-30..=1e30;

fn penalty(name: &'static str, value: Option<f32>) -> Result<Option<f32>> {
    let Some(value) = value.filter(|&value| value != 1.0) else { return Ok(None) };
    positive(name, value)?;
    if !POSSIBLE.contains(&value) {
        return Err(setting(name, format!("is {value:e}, must be from 1e-30 to 1e30, or scores overflow")));
    }
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

/// Removes tokens that would complete a sequence of `n` tokens that occurred before. Padding counts, as in
/// transformers. (`NoRepeatNGramLogitsProcessor`)
#[derive(Debug)]
pub(super) struct NoRepeatNgram {
    n: usize,
    pad: Option<TokenId>,
}

impl NoRepeatNgram {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let pad = padding(config);
        Ok(config.no_repeat_ngram_size.filter(|&n| n > 0).map(|n| Self { n, pad }))
    }
}

impl Processor for NoRepeatNgram {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let ids = padded(row.ids, row, self.pad);
        remove_tokens(scores, &continuations(&ids, &ids, self.n));
    }
}

/// Removes tokens that would complete a sequence of `n` tokens of the prompt. Padding counts, as in
/// transformers. (`EncoderNoRepeatNGramLogitsProcessor`)
#[derive(Debug)]
pub(super) struct EncoderNoRepeatNgram {
    n: usize,
    pad: Option<TokenId>,
}

impl EncoderNoRepeatNgram {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let pad = padding(config);
        Ok(config.encoder_no_repeat_ngram_size.filter(|&n| n > 0).map(|n| Self { n, pad }))
    }
}

impl Processor for EncoderNoRepeatNgram {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let (prompt, ids) = (padded(row.prompt(), row, self.pad), padded(row.ids, row, self.pad));
        remove_tokens(scores, &continuations(&prompt, &ids, self.n));
    }
}

/// Prepends the padding of `row` to `ids`, if there is a padding token.
pub(super) fn padded<'a>(ids: &'a [TokenId], row: &RowState<'_>, pad: Option<TokenId>) -> Cow<'a, [TokenId]> {
    match pad.filter(|_| row.padding > 0) {
        Some(pad) => std::iter::repeat_n(pad, row.padding).chain(ids.iter().copied()).collect(),
        None => Cow::Borrowed(ids),
    }
}

/// The padding token: as in transformers, the first token that ends a row if no other is named.
pub(super) fn padding(config: &GenerationConfig) -> Option<TokenId> {
    config.pad_token_id.or_else(|| config.eos_token_id.as_ref()?.first().copied())
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
