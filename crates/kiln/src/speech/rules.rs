//! The tokens that may follow in a transcript with timestamps (transformers'
//! `WhisperTimeStampLogitsProcessor`).

use kiln_core::model::TokenId;
use kiln_generate::{Processor, RowState};

use super::config::SpecialTokens;

/// Rules for timestamps. They come in pairs, the end of a segment and the beginning of the next, except for
/// the first and the last. They do not decrease. If all timestamps together are likelier than any text token,
/// the next token is a timestamp.
#[derive(Clone, Debug)]
pub(super) struct TimestampRules {
    pub(super) tokens: SpecialTokens,
}

impl Processor for TimestampRules {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let (first, eos) = (self.tokens.first_timestamp() as usize, self.tokens.eos as usize);
        let vocab = scores.len();
        let remove = |scores: &mut [f32], range: std::ops::Range<usize>| {
            let range = range.start.min(vocab)..range.end.min(vocab);
            scores[range].fill(f32::NEG_INFINITY);
        };
        remove(scores, self.tokens.no_timestamps as usize..first);
        let generated = &row.ids[row.prompt().len()..];
        let is_timestamp = |&id: &TokenId| id as usize >= first;
        let last_is = generated.last().is_some_and(is_timestamp);
        let one_before_is = generated.len() < 2 || is_timestamp(&generated[generated.len() - 2]);
        match (last_is, one_before_is) {
            // A pair is complete, or the first timestamp stands alone: text follows.
            (true, true) => remove(scores, first..vocab),
            // The other half of the pair follows, or the end.
            (true, false) => remove(scores, 0..eos),
            (false, _) => {}
        }
        if let Some(&latest) = generated.iter().rev().find(|id| is_timestamp(id)) {
            // Only the other half of a pair may repeat the time.
            let next = latest as usize + usize::from(!last_is || one_before_is);
            remove(scores, first..next);
        }
        if generated.is_empty() {
            remove(scores, 0..first);
            if let Some(latest) = self.tokens.max_initial_timestamp {
                remove(scores, first.saturating_add(latest).saturating_add(1)..vocab);
            }
        }
        // The comparison does not depend on the log-sum-exp of all scores, which both sides would subtract.
        let (text, times) = scores.split_at(first.min(vocab));
        let likeliest = text.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if log_sum_exp(times) > likeliest {
            remove(scores, 0..first);
        }
    }
}

/// `ln Σ exp(x)`
fn log_sum_exp(scores: &[f32]) -> f32 {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if largest == f32::NEG_INFINITY {
        return largest;
    }
    largest + scores.iter().map(|score| (score - largest).exp()).sum::<f32>().ln()
}
