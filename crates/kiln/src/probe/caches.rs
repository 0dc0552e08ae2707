//! The loss of a lossy cache on a model: text is fed token by token through the lossy cache and through a
//! dense cache, and the predictions of the model are compared.

use std::time::{Duration, Instant};

use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{Logits, TokenId},
    model_cache::ModelCache,
    read_back,
};

use super::{
    Comparison, Loss,
    comparison::{Comparisons, Distribution, Lossy, ranked, recommended},
    windows::Windows,
};
use crate::Model;

/// The caches that are probed by default: each format at each width, with different settings for keys and
/// values if that pays off.
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

/// The measurements of a cache.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probed {
    /// The strategy and its settings, in the syntax of [`Plan::named`].
    pub cache: String,
    /// Bytes of the cache on the device per token, for a full window of text.
    pub bytes_per_token: f64,
    /// The model's predictions with this cache, compared with those with the dense cache.
    pub compared: Comparison,
    /// Median time per token, in the second half of windows.
    pub step: Duration,
}

/// The result of [`probe`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Probe {
    /// Number of tokens that were fed to each cache.
    pub tokens: usize,
    /// Number of tokens after which the cache is reset.
    pub window: usize,
    /// The dense cache, followed by the others in the requested order.
    pub caches: Vec<Probed>,
}

impl Probed {
    /// The severity of the measured loss.
    pub fn loss(&self) -> Loss {
        self.compared.loss()
    }
}

impl Lossy for Probed {
    fn bytes(&self) -> f64 {
        self.bytes_per_token
    }

    fn compared(&self) -> &Comparison {
        &self.compared
    }
}

impl Probe {
    /// The dense cache.
    pub fn dense(&self) -> &Probed {
        &self.caches[0]
    }

    /// The other caches, in ascending order of loss.
    pub fn ranked(&self) -> Vec<&Probed> {
        ranked(&self.caches[1..])
    }

    /// The smallest cache whose loss is not noticeable; among caches of one size, the one with the least
    /// loss. `None` if no such cache is smaller than the dense cache.
    pub fn recommended(&self) -> Option<&Probed> {
        recommended(&self.caches[1..], self.dense().bytes_per_token)
    }

    /// The caches that break the model.
    pub fn broken(&self) -> impl Iterator<Item = &Probed> {
        self.caches[1..].iter().filter(|probed| probed.loss() == Loss::Broken)
    }
}

/// Measures the loss of caches: feeds `text` in windows of `window` tokens, each with an empty cache, through
/// a `dynamic` cache and through each of `caches`. Calls `on_progress` with the number of tokens fed.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Model, Plan, expert::probe::probe};
///
/// let model = Model::load(folder)?;
/// let text = model.encode("Friends, Romans, countrymen, lend me your ears; I come to bury Caesar.")?;
/// let caches = [Plan::named("quantized:nbits=8")?, Plan::named("quantized:nbits=2")?];
/// let probe = probe(&model, &text, 16, &caches, &mut |_| ())?;
/// for probed in probe.ranked() {
///     println!("{}: {:.4} nats lost, {:?}", probed.cache, probed.compared.divergence, probed.loss());
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
///
/// # Errors
/// A text of fewer than two tokens, a window longer than the model's positions, caches that do not support
/// the model or store nothing, a model whose own scores are not finite numbers.
pub fn probe(
    model: &Model,
    text: &[TokenId],
    window: usize,
    caches: &[Plan],
    on_progress: &mut dyn FnMut(usize),
) -> Result<Probe> {
    let windows = Windows::of(text, window, model)?;
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
    for part in windows.iter() {
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
                let said = match dense {
                    None => Distribution::checked(&logits)?,
                    Some(_) => Distribution::of(&logits),
                };
                counts.compared.add(said.beside(dense.as_ref().unwrap_or(&said), pair[1]));
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

/// Feeds a token. Returns the logits of the next token, and the time that the step took.
fn step(model: &Model, cache: &mut ModelCache, token: TokenId) -> Result<(Vec<f32>, Duration)> {
    let started = Instant::now();
    let batch = Batch::from_rows(&[vec![token]], model.device())?;
    let logits = model.causal().forward(&batch, Logits::Last, cache)?;
    let logits: Vec<f32> = read_back::read(logits)?.iter().collect();
    Ok((logits, started.elapsed()))
}

#[derive(Default)]
struct Counts {
    compared: Comparisons,
    steps: Vec<Duration>,
    bytes: usize,
    tokens: usize,
}

impl Counts {
    fn finish(mut self, cache: String) -> Probed {
        self.steps.sort();
        Probed {
            cache,
            bytes_per_token: self.bytes as f64 / self.tokens.max(1) as f64,
            compared: self.compared.finish(),
            step: self.steps.get(self.steps.len() / 2).copied().unwrap_or_default(),
        }
    }
}
