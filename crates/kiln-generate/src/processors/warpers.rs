//! Processors that shape the distribution for sampling.

use kiln_core::Result;
use kiln_kernels::Sampling;

use super::{Processor, RowState, as_written, remove};
use crate::{
    config::GenerationConfig,
    settings::{fraction, setting},
};

/// Divides the scores. (`TemperatureLogitsWarper`)
#[derive(Debug)]
pub(super) struct Temperature(f32);

/// Minimum temperature. Scores up to 3e8, far more than any model gives, stay finite when divided by it.
const LOWEST_TEMPERATURE: f32 = 1e-30;

impl Temperature {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some(value) = config.temperature.filter(|&value| value != 0.0) else { return Ok(None) };
        if !(value.is_finite() && value > 0.0) {
            return Err(setting("temperature", format!("is {value}, must be 0 (greedy) or above")));
        }
        if value < LOWEST_TEMPERATURE {
            let why = format!("is {value:e}, too small to divide scores by; 0 takes the likeliest token");
            return Err(setting("temperature", why));
        }
        Ok((value != 1.0).then_some(Self(value)))
    }
}

impl Processor for Temperature {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        scores.iter_mut().for_each(|score| *score /= self.0);
    }

    fn on_device(&self, sampling: &mut Sampling) -> bool {
        sampling.temperature = self.0;
        true
    }
}

/// Among the 100 largest scores, keeps those whose share of the entropy, summed from the likeliest on, is at
/// most `h` times the whole. The likeliest stays. (`TopHLogitsWarper`)
#[derive(Debug)]
pub(super) struct TopH(f32);

impl TopH {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some(value) = config.top_h else { return Ok(None) };
        fraction("top_h", value)?;
        if value == 0.0 {
            return Err(setting("top_h", "is 0, which leaves no token; it must be above 0 and at most 1"));
        }
        Ok(Some(Self(value)))
    }
}

impl Processor for TopH {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        const TOP: usize = 100;

        // The sampler reports NaN.
        if scores.iter().any(|score| score.is_nan()) {
            return;
        }
        let mut order: Vec<usize> = (0..scores.len()).collect();
        let first = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
        if order.len() > TOP {
            order.select_nth_unstable_by(TOP - 1, first);
            order.truncate(TOP);
        }
        order.sort_unstable_by(first);
        let top: Vec<f32> = order.iter().map(|&i| scores[i]).collect();
        let logp = log_softmax(&top);
        let term = |logp: f32| if logp == f32::NEG_INFINITY { 0.0 } else { -logp.exp() * logp };
        let limit = logp.iter().map(|&logp| f64::from(term(logp))).sum::<f64>() as f32 * self.0;
        let mut sum = 0.0f64;
        let kept = logp.iter().enumerate().take_while(|(i, logp)| {
            sum += f64::from(term(**logp));
            *i == 0 || sum as f32 <= limit
        });
        let kept = kept.count();
        let kept: Vec<(usize, f32)> = order[..kept].iter().map(|&i| (i, scores[i])).collect();
        scores.fill(f32::NEG_INFINITY);
        kept.into_iter().for_each(|(i, score)| scores[i] = score);
    }
}

/// Removes scores below the k-th largest; all that equal it stay. (`TopKLogitsWarper`)
#[derive(Debug)]
pub(super) struct TopK(usize);

impl TopK {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let k = config.top_k.unwrap_or(50);
        Ok((k != 0).then(|| Self(k.max(fewest(config)))))
    }
}

impl Processor for TopK {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        if self.0 >= scores.len() {
            return;
        }
        let threshold = largest(scores, self.0);
        remove(scores, |score| score < threshold);
    }

    fn on_device(&self, sampling: &mut Sampling) -> bool {
        sampling.top_k = self.0;
        true
    }
}

/// Keeps the likeliest tokens that together reach the probability. (`TopPLogitsWarper`)
///
/// In ascending order, a token is removed if the cumulative probability up to and including it is at most
/// `1 - p`; the last is never removed. Of equal scores, the lower index comes first and is removed first.
#[derive(Debug)]
pub(super) struct TopP {
    p: f32,
    fewest: usize,
}

impl TopP {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some(value) = config.top_p else { return Ok(None) };
        fraction("top_p", value)?;
        if value == 0.0 {
            return Err(setting("top_p", "is 0, which leaves no token; it must be above 0 and at most 1"));
        }
        Ok((value < 1.0).then(|| Self { p: value, fewest: fewest(config) }))
    }

    /// The probability that removed tokens may have together.
    fn tail(&self) -> f32 {
        (1.0 - as_written(self.p)) as f32
    }
}

impl Processor for TopP {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        // The sampler reports NaN.
        if scores.iter().any(|score| score.is_nan()) {
            return;
        }
        let probabilities = softmax(scores);
        let limit = self.tail();
        // A removed token adds nothing and stays removed.
        let mut order: Vec<usize> = (0..scores.len()).filter(|&i| scores[i] != f32::NEG_INFINITY).collect();
        // torch on the CPU sums float32 in float64 and rounds every partial sum.
        let mut cumulative = 0.0f64;
        // Tokens that have less than an even share of the limit stay below it together, in any order. They
        // are most tokens of a large vocabulary, and need not be sorted.
        let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut before = usize::MAX;
        while self.fewest == 1 && order.len() < before {
            before = order.len();
            let share = (f64::from(limit) - cumulative) / before as f64;
            order.retain(|&i| {
                let probability = f64::from(probabilities[i]);
                let is_sure = probability < share && scores[i] < most;
                if is_sure {
                    cumulative += probability;
                    scores[i] = f32::NEG_INFINITY;
                }
                !is_sure
            });
        }
        order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        order.truncate(order.len().saturating_sub(self.fewest));
        for i in order {
            cumulative += f64::from(probabilities[i]);
            if cumulative as f32 > limit {
                break;
            }
            scores[i] = f32::NEG_INFINITY;
        }
    }

    fn on_device(&self, sampling: &mut Sampling) -> bool {
        sampling.tail = self.tail();
        self.fewest == 1
    }
}

/// Removes tokens less likely than `p` times the likeliest token. (`MinPLogitsWarper`)
#[derive(Debug)]
pub(super) struct MinP {
    p: f32,
    fewest: usize,
}

impl MinP {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some(value) = config.min_p else { return Ok(None) };
        fraction("min_p", value)?;
        Ok(Some(Self { p: value, fewest: fewest(config) }))
    }
}

impl Processor for MinP {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        let (max, total) = max_and_sum(scores);
        let limit = self.p * (1.0 / total);
        remove_but(scores, self.fewest, |score| (score - max).exp() / total < limit);
    }

    fn on_device(&self, sampling: &mut Sampling) -> bool {
        sampling.min_p = self.p;
        self.fewest == 1
    }
}

/// Keeps the tokens whose information is closest to the entropy, until they reach the probability; the
/// closest always stays. (`TypicalLogitsWarper`)
#[derive(Debug)]
pub(super) struct Typical {
    p: f32,
    fewest: usize,
}

impl Typical {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let Some(value) = config.typical_p else { return Ok(None) };
        fraction("typical_p", value)?;
        if value == 0.0 {
            return Err(setting(
                "typical_p",
                "is 0, which leaves no token; it must be above 0 and at most 1",
            ));
        }
        Ok((value < 1.0).then(|| Self { p: value, fewest: fewest(config) }))
    }
}

impl Processor for Typical {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        let logp = log_softmax(scores);
        let entropy = entropy(&logp);
        let distance: Vec<f32> = logp.iter().map(|logp| (-logp - entropy).abs()).collect();
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| distance[a].total_cmp(&distance[b]));
        let (max, total) = max_and_sum(scores);
        let mut cumulative = 0.0f64;
        let below = order.iter().take_while(|&&i| {
            cumulative += f64::from((scores[i] - max).exp() / total);
            (cumulative as f32) < self.p
        });
        let last = below.count().min(scores.len().saturating_sub(1));
        let Some(limit) = order.get(last).map(|&i| distance[i]) else { return };
        for &i in order.iter().skip(self.fewest).filter(|&&i| distance[i] > limit) {
            scores[i] = f32::NEG_INFINITY;
        }
    }
}

/// Removes tokens that are less likely than `epsilon`; the likeliest stay. (`EpsilonLogitsWarper`)
#[derive(Debug)]
pub(super) struct Epsilon {
    epsilon: f32,
    fewest: usize,
}

impl Epsilon {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let made = |epsilon| Self { epsilon, fewest: fewest(config) };
        Ok(cutoff("epsilon_cutoff", config.epsilon_cutoff)?.map(made))
    }
}

impl Processor for Epsilon {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        remove_unlikely(scores, self.epsilon, self.fewest);
    }
}

/// Removes tokens that are less likely than `min(eta, sqrt(eta) * exp(-entropy))`; the likeliest stay.
/// (`EtaLogitsWarper`)
#[derive(Debug)]
pub(super) struct Eta {
    eta: f32,
    fewest: usize,
}

impl Eta {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        let made = |eta| Self { eta, fewest: fewest(config) };
        Ok(cutoff("eta_cutoff", config.eta_cutoff)?.map(made))
    }
}

impl Processor for Eta {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        let entropy = entropy(&log_softmax(scores));
        remove_unlikely(scores, self.eta.min(self.eta.sqrt() * (-entropy).exp()), self.fewest);
    }
}

/// A minimum probability of tokens; 0 is off.
fn cutoff(name: &'static str, value: Option<f32>) -> Result<Option<f32>> {
    match value.filter(|&value| value != 0.0) {
        Some(value) if value > 0.0 && value < 1.0 => Ok(Some(value)),
        Some(value) => Err(setting(name, format!("is {value}, must be at least 0 and below 1"))),
        None => Ok(None),
    }
}

/// Turns scores into log-probabilities, which changes no choice. (`LogitNormalization`)
#[derive(Debug)]
pub(super) struct Renormalize;

impl Renormalize {
    pub(super) fn new(config: &GenerationConfig) -> Result<Option<Self>> {
        Ok((config.renormalize_logits == Some(true)).then_some(Self))
    }
}

impl Processor for Renormalize {
    fn apply(&self, _row: &RowState<'_>, scores: &mut [f32]) {
        let logp = log_softmax(scores);
        scores.copy_from_slice(&logp);
    }

    /// Normalization does not affect sampling.
    fn on_device(&self, _sampling: &mut Sampling) -> bool {
        true
    }
}

/// Minimum number of likeliest tokens to keep: with beams, one that continues in addition to those that end a
/// row. (`min_tokens_to_keep`)
fn fewest(config: &GenerationConfig) -> usize {
    let ends = config.eos_token_id.as_ref().map_or(0, Vec::len).max(1);
    if config.num_beams.is_some_and(|beams| beams > 1) { ends + 1 } else { 1 }
}

/// Removes tokens less likely than `limit`, except the `fewest` largest scores.
fn remove_unlikely(scores: &mut [f32], limit: f32, fewest: usize) {
    let (max, total) = max_and_sum(scores);
    // Scores that equal the smallest kept score are kept, too.
    let kept = if fewest < scores.len() { largest(scores, fewest) } else { f32::NEG_INFINITY };
    remove(scores, |score| (score - max).exp() / total < limit && score < kept);
}

/// Removes scores that meet the condition, except the `fewest` largest, of equal ones the first.
fn remove_but(scores: &mut [f32], fewest: usize, condition: impl Fn(f32) -> bool) {
    if fewest == 1 {
        return remove(scores, condition);
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    for i in order.into_iter().skip(fewest) {
        if condition(scores[i]) {
            scores[i] = f32::NEG_INFINITY;
        }
    }
}

/// The n-th largest score, counted from 1.
fn largest(scores: &[f32], n: usize) -> f32 {
    let mut sorted = scores.to_vec();
    *sorted.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a)).1
}

/// Probabilities; removed tokens have 0.
pub(crate) fn softmax(scores: &[f32]) -> Vec<f32> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let total = weights.iter().map(|weight| f64::from(*weight)).sum::<f64>() as f32;
    weights.iter_mut().for_each(|weight| *weight /= total);
    weights
}

/// Log-probabilities; removed tokens stay removed.
pub(crate) fn log_softmax(scores: &[f32]) -> Vec<f32> {
    let (max, total) = max_and_sum(scores);
    let log = total.ln();
    scores.iter().map(|score| score - max - log).collect()
}

/// The entropy of a distribution in nats; removed tokens do not count.
fn entropy(logp: &[f32]) -> f32 {
    let kept = logp.iter().filter(|logp| logp.is_finite());
    -kept.map(|logp| f64::from(logp.exp() * logp)).sum::<f64>() as f32
}

fn max_and_sum(scores: &[f32]) -> (f32, f32) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (max, sum_of_exp(scores, max))
}

/// The denominator of the softmax over `scores`, whose largest is `max`.
fn sum_of_exp(scores: &[f32], max: f32) -> f32 {
    scores.iter().map(|score| f64::from((score - max).exp())).sum::<f64>() as f32
}
