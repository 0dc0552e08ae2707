//! The choice of a token from scores.
//!
//! The random number generator is the same on every device and in every version. Torch's differ between CPU
//! and CUDA, so sampled tokens of transformers cannot be reproduced. Its definition:
//!
//! - Row `r` of a batch uses ChaCha with 8 rounds (Bernstein's: 64-bit block counter from 0, 64-bit nonce).
//!   The key is the seed's 8 bytes, little-endian, and 24 zero bytes; the nonce is `r`. So the tokens of a
//!   row do not depend on the number of other rows.
//! - If a draft model samples its drafts, the ninth byte of its key is 1. Each draft then takes one word of
//!   the row's own stream, to accept it if `u q < p`; a rejected one takes another, for the token in its
//!   place.
//! - A token takes one 32-bit word `w` of the stream: `u = (w >> 8) / 2^24`.
//! - With weights `exp(score - largest score)`, the token is the first, in the order of the vocabulary, whose
//!   cumulative weight exceeds `u` times the sum of all.
//!
//! On the host, weights and sums are float64. On a GPU (the kernel `sample`), they are float32, and a token
//! may differ from the host's if `u` is within a rounding of the border between two tokens. The words are the
//! same, and each device repeats itself.

use kiln_core::{Error, Result, model::TokenId};
use rand::{TryRng, rngs::SysRng};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Samples tokens, for each row from a stream of its own.
#[derive(Debug)]
pub struct Sampler {
    seed: u64,
    /// Whether drafts are sampled, from streams of their own.
    drafts: bool,
    /// The stream of each row so far.
    streams: Vec<ChaCha8Rng>,
}

impl Sampler {
    /// Creates a sampler that repeats itself for the same `seed`; `None`: a random seed from the system.
    ///
    /// # Errors
    /// [`Error::Setting`] if the system has no random numbers.
    pub fn new(seed: Option<u64>) -> Result<Self> {
        // 53 bits, so that a seed that passed through JSON as a float64 repeats the run.
        let system = || SysRng.try_next_u64().map(|bits| bits >> 11);
        let no_seed =
            |e| Error::Setting { name: "seed", why: format!("none is given and the system has none: {e}") };
        Ok(Self { seed: seed.map_or_else(system, Ok).map_err(no_seed)?, drafts: false, streams: Vec::new() })
    }

    /// Creates the sampler of a draft model.
    pub(crate) fn of_draft(seed: u64) -> Self {
        Self { seed, drafts: true, streams: Vec::new() }
    }

    /// The seed that repeats this run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Samples the next token of `row`. Tokens with score -inf cannot be sampled.
    ///
    /// # Errors
    /// [`Error::Execution`] if the scores are not a distribution: NaN, +inf, or all removed.
    pub fn sample(&mut self, row: usize, scores: &[f32]) -> Result<TokenId> {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Removed tokens have no weight; after `top_k` nearly all are removed.
        let left = scores.iter().enumerate().filter(|(_, score)| **score != f32::NEG_INFINITY);
        let weight = |score: f32| (f64::from(score) - f64::from(largest)).exp();
        let weights: Vec<(usize, f64)> = left.map(|(id, score)| (id, weight(*score))).collect();
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        // The largest score has weight 1, whatever the others are.
        if !largest.is_finite() || !total.is_finite() {
            return Err(no_distribution());
        }
        let target = self.uniform(row) * total;
        let mut cumulative = 0.0;
        let drawn = weights.iter().find(|(_, weight)| {
            cumulative += weight;
            cumulative > target
        });
        // `u` is at most 1 - 2^-24, and both sums are the same additions in the same order: one is always
        // found.
        drawn.map(|(id, _)| *id as TokenId).or_else(|| greedy(scores)).ok_or_else(no_distribution)
    }

    /// Samples a token of `row` by weights that need not sum up to 1; `None` if all are 0, or one is NaN.
    pub(crate) fn draw(&mut self, row: usize, weights: &[f64]) -> Option<TokenId> {
        let total: f64 = weights.iter().sum();
        if !total.is_finite() || total <= 0.0 {
            return None;
        }
        let target = self.uniform(row) * total;
        let mut cumulative = 0.0;
        let drawn = weights.iter().position(|weight| {
            cumulative += weight;
            cumulative > target
        });
        drawn.map(|id| id as TokenId)
    }

    /// The next number of the stream of `row`, from 0 to below 1.
    pub(crate) fn uniform(&mut self, row: usize) -> f64 {
        f64::from(self.word(row)) / f64::from(1 << 24)
    }

    /// The next 24 bits of `row`'s stream.
    pub(crate) fn word(&mut self, row: usize) -> u32 {
        while self.streams.len() <= row {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&self.seed.to_le_bytes());
            key[8] = u8::from(self.drafts);
            let mut stream = ChaCha8Rng::from_seed(key);
            stream.set_stream(self.streams.len() as u64);
            self.streams.push(stream);
        }
        self.streams.get_mut(row).map_or(0, |stream| stream.next_u32() >> 8)
    }
}

/// The error for scores that are not a distribution: NaN, or infinite.
pub fn no_distribution() -> Error {
    let why = "the model's scores are not finite numbers; its weights may be damaged, or overflow float16 (`dtype` f32 does not)";
    Error::Execution(why.to_owned())
}

/// The likeliest token, the first of equals; `None` if the scores are not a distribution: one is NaN, or the
/// largest is infinite.
pub fn greedy(scores: &[f32]) -> Option<TokenId> {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &score) in scores.iter().enumerate() {
        if score.is_nan() {
            return None;
        }
        if score > best.1 {
            best = (id, score);
        }
    }
    best.1.is_finite().then_some(best.0 as TokenId)
}

#[cfg(test)]
mod tests;
