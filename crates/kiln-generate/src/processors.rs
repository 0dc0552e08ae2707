//! Logits processors: what is done to the scores of the next token before it is chosen.
//!
//! Formulas, order and conditions are those of transformers' `logits_process.py` with `min_tokens_to_keep` 1, which
//! is what it takes without beams. Removed tokens have the score -inf.

use std::fmt;

use kiln_core::{Error, Result, model::TokenId};
use serde_json::Value;

use crate::settings::{Settings, fraction, positive};

/// Changes the scores of one row's next token.
pub trait Processor: fmt::Debug + Send {
    /// The setting it acts on.
    fn name(&self) -> &'static str;

    /// `ids`: the row so far, prompt included, padding not. `scores`: one for each token of the vocabulary.
    fn apply(&self, ids: &[TokenId], scores: &mut [f32]);
}

/// The settings that have a processor, in the order in which they act.
pub const KNOWN: &[&str] = &["repetition_penalty", "temperature", "top_k", "top_p", "min_p"];

/// The processors that `settings` ask for, in order; those at their neutral value do not appear.
pub fn build(settings: &Settings) -> Vec<Box<dyn Processor>> {
    let mut list: Vec<Box<dyn Processor>> = Vec::new();
    if settings.repetition_penalty != 1.0 {
        list.push(Box::new(RepetitionPenalty(settings.repetition_penalty)));
    }
    if !settings.do_sample {
        return list;
    }
    if settings.temperature != 1.0 {
        list.push(Box::new(Temperature(settings.temperature)));
    }
    if settings.top_k != 0 {
        list.push(Box::new(TopK(settings.top_k)));
    }
    if settings.top_p < 1.0 {
        list.push(Box::new(TopP(settings.top_p)));
    }
    if let Some(min_p) = settings.min_p {
        list.push(Box::new(MinP(min_p)));
    }
    list
}

/// The processor of one setting alone, as `{"top_p": 0.8}` names it; `None` if the setting has none.
///
/// # Errors
/// [`Error::Setting`] for a value that is impossible.
pub fn by_name(name: &str, value: &Value) -> Option<Result<Box<dyn Processor>>> {
    fn boxed<P: Processor + 'static>(processor: P) -> Box<dyn Processor> {
        Box::new(processor)
    }
    Some(match name {
        "repetition_penalty" => {
            number("repetition_penalty", value, positive).map(|penalty| boxed(RepetitionPenalty(penalty)))
        }
        "temperature" => number("temperature", value, positive).map(|t| boxed(Temperature(t))),
        "top_k" => match value.as_u64() {
            Some(k @ 1..) => Ok(boxed(TopK(usize::try_from(k).unwrap_or(usize::MAX)))),
            _ => Err(Error::Setting {
                name: "top_k",
                why: format!("is {value}, must be an integer of at least 1"),
            }),
        },
        "top_p" => number("top_p", value, fraction).map(|p| boxed(TopP(p))),
        "min_p" => number("min_p", value, fraction).map(|p| boxed(MinP(p))),
        _ => return None,
    })
}

fn number(name: &'static str, value: &Value, check: fn(&'static str, f32) -> Result<()>) -> Result<f32> {
    let why = || Error::Setting { name, why: format!("is {value}, must be a number") };
    let number = value.as_f64().ok_or_else(why)? as f32;
    check(name, number).map(|()| number)
}

/// `s < 0 ? s * penalty : s / penalty` for every token that occurred, once however often it did.
///
/// As transformers 5 does, and 4 did not, padding in front of the row is no occurrence. (`RepetitionPenaltyLogitsProcessor`)
#[derive(Debug)]
struct RepetitionPenalty(f32);

impl Processor for RepetitionPenalty {
    fn name(&self) -> &'static str {
        "repetition_penalty"
    }

    fn apply(&self, ids: &[TokenId], scores: &mut [f32]) {
        let mut done = vec![false; scores.len()];
        for &id in ids {
            if let (Some(score), Some(done)) = (scores.get_mut(id as usize), done.get_mut(id as usize))
                && !std::mem::replace(done, true)
            {
                *score = if *score < 0.0 { *score * self.0 } else { *score / self.0 };
            }
        }
    }
}

/// `s / temperature`. (`TemperatureLogitsWarper`)
#[derive(Debug)]
struct Temperature(f32);

impl Processor for Temperature {
    fn name(&self) -> &'static str {
        "temperature"
    }

    fn apply(&self, _ids: &[TokenId], scores: &mut [f32]) {
        scores.iter_mut().for_each(|score| *score /= self.0);
    }
}

/// Removes what is below the k-th largest score; all that equal it stay. (`TopKLogitsWarper`)
#[derive(Debug)]
struct TopK(usize);

impl Processor for TopK {
    fn name(&self) -> &'static str {
        "top_k"
    }

    fn apply(&self, _ids: &[TokenId], scores: &mut [f32]) {
        if self.0 >= scores.len() {
            return;
        }
        let mut sorted = scores.to_vec();
        let (_, threshold, _) = sorted.select_nth_unstable_by(self.0 - 1, |a, b| b.total_cmp(a));
        remove(scores, |score| score < *threshold);
    }
}

/// Keeps the likeliest tokens that together reach the probability. (`TopPLogitsWarper`)
///
/// Sorted ascending, a token is removed where the cumulative probability up to and including it is at most `1 - p`;
/// the last is never removed. Of equal scores, the lower index comes first and so goes first.
#[derive(Debug)]
struct TopP(f32);

impl Processor for TopP {
    fn name(&self) -> &'static str {
        "top_p"
    }

    fn apply(&self, _ids: &[TokenId], scores: &mut [f32]) {
        // A removed token adds nothing and stays removed; leaving it out spares most of the sort after `top_k`.
        let mut order: Vec<usize> = (0..scores.len()).filter(|&i| scores[i] != f32::NEG_INFINITY).collect();
        order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        let Some(max) = order.pop().map(|last| scores[last]) else { return };
        let total = sum_of_exp(scores, max);
        let limit = tail(self.0);
        // torch on the CPU sums float32 in float64 and rounds every partial sum.
        let mut cumulative = 0.0f64;
        for i in order {
            cumulative += f64::from((scores[i] - max).exp() / total);
            if cumulative as f32 > limit {
                break;
            }
            scores[i] = f32::NEG_INFINITY;
        }
    }
}

/// Removes what is less likely than `p` times the likeliest token. (`MinPLogitsWarper`)
#[derive(Debug)]
struct MinP(f32);

impl Processor for MinP {
    fn name(&self) -> &'static str {
        "min_p"
    }

    fn apply(&self, _ids: &[TokenId], scores: &mut [f32]) {
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = sum_of_exp(scores, max);
        let limit = self.0 * (1.0 / total);
        remove(scores, |score| (score - max).exp() / total < limit);
    }
}

fn remove(scores: &mut [f32], condition: impl Fn(f32) -> bool) {
    for score in scores {
        if condition(*score) {
            *score = f32::NEG_INFINITY;
        }
    }
}

/// The denominator of the softmax over `scores`, whose largest is `max`.
fn sum_of_exp(scores: &[f32], max: f32) -> f32 {
    scores.iter().map(|score| f64::from((score - max).exp())).sum::<f64>() as f32
}

/// The probability that may be missing of what top_p keeps.
pub(crate) fn tail(top_p: f32) -> f32 {
    (1.0 - as_written(top_p)) as f32
}

/// The float64 that Python has for the digits of a float32: `1 - 0.9` is 0.1 there, `1 - 0.9f32` is not.
fn as_written(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

#[cfg(test)]
mod tests;
