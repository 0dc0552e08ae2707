//! What a lossy cache costs on a model: text is fed token by token through it and through a dense cache, and what the
//! model says next is compared.

use std::time::{Duration, Instant};

use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{Logits, TokenId},
    model_cache::ModelCache,
    read_back,
};
use kiln_generate::{
    GenerationConfig,
    sampler::{greedy, no_distribution},
};

use crate::Model;

/// The caches that are probed unasked: each format at each width, keys and values apart where that pays.
pub const PROBED: &[&str] = &[
    "quantized:nbits=8",
    "quantized:nbits=4",
    "quantized:k=4,v=2",
    "quantized:nbits=2",
    "quantized:nbits=2,group=32",
    "quantized:nbits=2,rotate=on",
    "quantized:format=quanto,nbits=4",
    "quantized:format=quanto,nbits=4,rotate=on",
    "quantized:format=quanto,nbits=2",
    "quantized:format=quanto,nbits=2,rotate=on",
    "quantized:format=hqq,nbits=4,axis_key=1,axis_value=1",
    "quantized:format=hqq,nbits=3,axis_key=1,axis_value=1",
    "quantized:format=hqq,nbits=2,axis_key=1,axis_value=1",
];

/// What was measured of a cache.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probed {
    /// The strategy and its settings, as [`Plan::named`] reads them.
    pub cache: String,
    /// Of a window of text, everything that the cache holds on the device, a token.
    pub bytes_per_token: f64,
    /// Mean Kullback-Leibler divergence of the next token's distribution from that of the dense cache, in nats.
    pub divergence: f64,
    /// The largest of it, over all tokens.
    pub largest_divergence: f64,
    /// How often both caches find the same token likeliest.
    pub agreement: f64,
    /// Of the text: `exp` of the mean negative logarithm of each token's probability.
    pub perplexity: f64,
    /// Median time of a token, in the second half of windows.
    pub step: Duration,
}

/// What [`probe`] measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probe {
    /// Tokens of text that were fed to each cache.
    pub tokens: usize,
    /// Tokens from one empty cache to the next.
    pub window: usize,
    /// The dense cache first, then the others as they were asked for.
    pub caches: Vec<Probed>,
}

/// Mean divergence up to which a loss is not seen: distributions differ less than those of a model in 8 bits and in 16.
pub const UNSEEN: f64 = 0.01;

/// Share of tokens at which both caches must find the same token likeliest, for a loss that is not seen.
pub const UNSEEN_AGREEMENT: f64 = 0.99;

/// Mean divergence from which on a cache breaks the model.
pub const BROKEN: f64 = 0.5;

/// Caches whose sizes differ by less than this are of one size.
const SAME_SIZE: f64 = 1.01;

/// What a loss means for the text that a model writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Within [`UNSEEN`] and [`UNSEEN_AGREEMENT`].
    Unseen,
    /// Between the bounds: some tokens change, and the text is another of the same kind.
    Seen,
    /// Beyond [`BROKEN`].
    Broken,
}

impl Probed {
    /// What the measured loss means.
    pub fn loss(&self) -> Loss {
        if self.divergence <= UNSEEN && self.agreement >= UNSEEN_AGREEMENT {
            Loss::Unseen
        } else if self.divergence <= BROKEN {
            Loss::Seen
        } else {
            Loss::Broken
        }
    }
}

impl Probe {
    /// The dense cache.
    pub fn dense(&self) -> &Probed {
        &self.caches[0]
    }

    /// The others, those that lose least first.
    pub fn ranked(&self) -> Vec<&Probed> {
        let mut others: Vec<&Probed> = self.caches[1..].iter().collect();
        others.sort_by(|a, b| a.divergence.total_cmp(&b.divergence));
        others
    }

    /// Of the caches whose loss is not seen the smallest, and of one size the one that loses least; `None` where there is
    /// none that is smaller than the dense cache.
    pub fn recommended(&self) -> Option<&Probed> {
        let smaller = |probed: &&&Probed| {
            probed.loss() == Loss::Unseen && probed.bytes_per_token < self.dense().bytes_per_token
        };
        let ranked = self.ranked();
        let smallest =
            ranked.iter().filter(smaller).map(|probed| probed.bytes_per_token).min_by(f64::total_cmp)?;
        ranked.iter().filter(smaller).find(|probed| probed.bytes_per_token <= SAME_SIZE * smallest).copied()
    }

    /// Those that break the model.
    pub fn broken(&self) -> impl Iterator<Item = &Probed> {
        self.caches[1..].iter().filter(|probed| probed.loss() == Loss::Broken)
    }
}

/// Measures what caches lose: feeds `text` in windows of `window` tokens, each from an empty cache, through a `dynamic` cache
/// and through each of `caches`; `on_progress` is told how many tokens were fed.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Model, Plan, probe::probe};
///
/// let model = Model::load(folder)?;
/// let text = model.encode("Friends, Romans, countrymen, lend me your ears; I come to bury Caesar.")?;
/// let caches = [Plan::named("quantized:nbits=8")?, Plan::named("quantized:nbits=2")?];
/// let probe = probe(&model, &text, 16, &caches, &mut |_| ())?;
/// for probed in probe.ranked() {
///     println!("{}: {:.4} nats lost, {:?}", probed.cache, probed.divergence, probed.loss());
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// # Errors
/// A text of fewer than two tokens, a window that the model has no positions for, caches that cannot serve the model or
/// remember nothing, a model whose own scores are not finite numbers.
pub fn probe(
    model: &Model,
    text: &[TokenId],
    window: usize,
    caches: &[Plan],
    on_progress: &mut dyn FnMut(usize),
) -> Result<Probe> {
    let positions = model.sizes().positions;
    if text.len() < 2 {
        return Err(Error::Prompt { why: "a text of two tokens at least is needed to probe".to_owned() });
    }
    if !(2..=positions).contains(&window) {
        let why = format!("{window} is not between 2 and the model's {positions} positions");
        return Err(Error::Setting { name: "window", why });
    }
    let needs = model.causal().needs();
    for plan in caches {
        plan.check(&needs)?;
        if !plan.remembers(&needs) {
            let why = format!("`{}` remembers nothing, so it has no loss to measure", plan.global);
            return Err(Error::Setting { name: "cache", why });
        }
    }
    let plans: Vec<Plan> = std::iter::once(Plan::dynamic()).chain(caches.iter().cloned()).collect();
    let mut counts: Vec<Counts> = plans.iter().map(|_| Counts::default()).collect();
    let mut fed = 0;
    for part in text.chunks(window).filter(|part| part.len() > 1) {
        let mut caches = plans.iter().map(|plan| model.cache(plan)).collect::<Result<Vec<ModelCache>>>()?;
        for cache in &mut caches {
            cache.reserve(part.len());
        }
        for (at, pair) in part.windows(2).enumerate() {
            let late = 2 * at >= part.len();
            let mut dense: Option<Distribution> = None;
            for (cache, counts) in caches.iter_mut().zip(&mut counts) {
                let (logits, took) = step(model, cache, pair[0])?;
                if late {
                    counts.steps.push(took);
                }
                if dense.is_none() && greedy(&logits).is_none() {
                    return Err(no_distribution());
                }
                let said = Distribution::of(&logits);
                counts.add(&said, dense.as_ref().unwrap_or(&said), pair[1]);
                dense.get_or_insert(said);
            }
            fed += 1;
            on_progress(fed);
        }
        for (cache, counts) in caches.iter().zip(&mut counts) {
            counts.bytes += cache.device_bytes();
            counts.tokens += cache.seq_len();
        }
    }
    let described = plans.iter().map(|plan| plan.describe(&needs));
    let caches = described.zip(counts).map(|(cache, counts)| counts.finish(cache)).collect();
    Ok(Probe { tokens: fed, window, caches })
}

/// Text of `tokens` tokens that the model makes itself, at temperature 1, in windows: it is what the model knows best.
///
/// # Errors
/// Those of [`Model::generate`].
pub fn own_text(model: &Model, tokens: usize, window: usize, seed: u64) -> Result<Vec<TokenId>> {
    let config = model.generation_config();
    let ends = config.eos_token_id.as_deref().and_then(|ids| ids.first().copied());
    let begin = config.bos_token_id.or(ends).unwrap_or(0);
    let mut text = Vec::with_capacity(tokens);
    for part in 0..tokens.div_ceil(window.max(2)) {
        let wanted = GenerationConfig::new()
            .max_new_tokens(window.min(tokens - text.len()).saturating_sub(1).max(1))
            .do_sample(true)
            .temperature(1.0)
            .top_k(0)
            .top_p(1.0)
            .seed(seed.wrapping_add(part as u64))
            .eos_token_id(Vec::new());
        text.push(begin);
        let plan = Plan::dynamic();
        for step in model.generate(vec![begin]).config(wanted).plan(plan).steps()? {
            text.extend(step?.tokens.first().copied().flatten());
        }
    }
    Ok(text)
}

/// Feeds a token; the logits behind it, and how long that took.
fn step(model: &Model, cache: &mut ModelCache, token: TokenId) -> Result<(Vec<f32>, Duration)> {
    let started = Instant::now();
    let batch = Batch::from_rows(&[vec![token]], model.device())?;
    let logits = model.causal().forward(&batch, Logits::Last, cache)?;
    let logits: Vec<f32> = read_back::read(logits)?.iter().collect();
    Ok((logits, started.elapsed()))
}

/// Logarithms of the probabilities of all tokens.
struct Distribution {
    logarithms: Vec<f64>,
    likeliest: usize,
}

impl Distribution {
    fn of(logits: &[f32]) -> Self {
        let (mut likeliest, mut most) = (0, f32::NEG_INFINITY);
        for (at, &logit) in logits.iter().enumerate() {
            if logit > most {
                (likeliest, most) = (at, logit);
            }
        }
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
        let all = f64::from(most) + sum.ln();
        Self { logarithms: logits.iter().map(|&logit| f64::from(logit) - all).collect(), likeliest }
    }

    fn divergence_from(&self, right: &Self) -> f64 {
        let terms = right.logarithms.iter().zip(&self.logarithms);
        let sum: f64 =
            terms.map(|(p, q)| if *p == f64::NEG_INFINITY { 0.0 } else { p.exp() * (p - q) }).sum();
        // Rounding can make a sum of nothing but roundings negative. What is no number stays none.
        if sum < 0.0 { 0.0 } else { sum }
    }
}

#[derive(Default)]
struct Counts {
    divergences: Vec<f64>,
    agreed: usize,
    surprise: f64,
    steps: Vec<Duration>,
    bytes: usize,
    tokens: usize,
}

impl Counts {
    fn add(&mut self, said: &Distribution, right: &Distribution, next: TokenId) {
        self.divergences.push(said.divergence_from(right));
        self.agreed += usize::from(said.likeliest == right.likeliest);
        self.surprise -= said.logarithms.get(next as usize).copied().unwrap_or(f64::NEG_INFINITY);
    }

    fn finish(mut self, cache: String) -> Probed {
        let n = self.divergences.len().max(1) as f64;
        self.steps.sort();
        Probed {
            cache,
            bytes_per_token: self.bytes as f64 / self.tokens.max(1) as f64,
            divergence: self.divergences.iter().sum::<f64>() / n,
            largest_divergence: self.divergences.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0),
            agreement: self.agreed as f64 / n,
            perplexity: (self.surprise / n).exp(),
            step: self.steps.get(self.steps.len() / 2).copied().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed(cache: &str, bytes_per_token: f64, divergence: f64, agreement: f64) -> Probed {
        Probed {
            cache: cache.to_owned(),
            bytes_per_token,
            divergence,
            largest_divergence: divergence,
            agreement,
            perplexity: 1.0,
            step: Duration::ZERO,
        }
    }

    #[test]
    fn words_follow_from_bounds() {
        assert_eq!(probed("a", 1.0, UNSEEN, UNSEEN_AGREEMENT).loss(), Loss::Unseen);
        assert_eq!(probed("b", 1.0, 9e-4, 0.952).loss(), Loss::Seen, "one token in twenty changes");
        assert_eq!(probed("c", 1.0, BROKEN, 0.2).loss(), Loss::Seen);
        assert_eq!(probed("d", 1.0, f64::NAN, 1.0).loss(), Loss::Broken);
        let dense = probed("dense", 100.0, 0.0, 1.0);
        let of = |caches: &[Probed]| Probe {
            tokens: 9,
            window: 9,
            caches: [std::slice::from_ref(&dense), caches].concat(),
        };
        let (eight, four) = (probed("8", 50.0, 1e-4, 0.999), probed("4", 30.0, 1e-3, 0.995));
        let (close, coarse) = (probed("close", 29.9, 5e-3, 0.991), probed("2", 20.0, 0.03, 0.92));
        let name = |probe: &Probe| probe.recommended().map(|best| best.cache.clone());
        assert_eq!(name(&of(&[eight.clone(), coarse.clone()])).as_deref(), Some("8"));
        let all = of(&[close, eight, four, coarse.clone()]);
        assert_eq!(name(&all).as_deref(), Some("4"), "of one size the one that loses less");
        assert_eq!(name(&of(&[coarse])), None);
    }
}
