//! The SynthID watermark: a tournament between tokens.

use std::sync::OnceLock;

use kiln_core::{Result, model::TokenId, setters};
use serde::Deserialize;

use super::{impossible, torch_random::TorchRandom};

/// Changes the probabilities of tokens by a tournament: one round for each key, in which each sequence of
/// `ngram_len` tokens has a random g-value, 0 or 1, and tokens with a 1 win over others. (Dathathri et al.,
/// "Scalable watermarking for identifying large language model outputs", Nature 2024; transformers'
/// `SynthIDTextWatermarkingConfig`)
///
/// The watermark is meant for sampling. A context that occurred before gets no watermark. Anyone with the
/// keys can detect and imitate the watermark.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SynthIdConfig {
    /// Length of a sequence that has g-values: the token itself, and those before it. From 1 to 1024.
    pub ngram_len: usize,
    /// Keys, one for each round, at least one. The paper uses 30.
    pub keys: Vec<i64>,
    /// Number of contexts that are remembered to detect repeated ones. Default: 1024.
    #[serde(default = "context_history_size")]
    pub context_history_size: usize,
    /// Seed of the table of g-values. Default: 0.
    #[serde(default)]
    pub sampling_table_seed: i64,
    /// Size of that table, from 1 to 2^24. Default: 65536.
    #[serde(default = "sampling_table_size")]
    pub sampling_table_size: usize,
    /// Whether the first `ngram_len - 1` tokens get no watermark. Default: false.
    #[serde(default)]
    pub skip_first_ngram_calls: bool,
    /// Whether all tokens are equally likely before the watermark, for tests. Default: false.
    #[serde(default)]
    pub debug_mode: bool,
}

setters!(SynthIdConfig {
    context_history_size: usize,
    sampling_table_seed: i64,
    sampling_table_size: usize,
    skip_first_ngram_calls: bool,
    debug_mode: bool,
});

impl SynthIdConfig {
    /// Settings for sequences of this many tokens, with one round per key.
    pub fn new(ngram_len: usize, keys: Vec<i64>) -> Self {
        Self {
            ngram_len,
            keys,
            context_history_size: context_history_size(),
            sampling_table_seed: 0,
            sampling_table_size: sampling_table_size(),
            skip_first_ngram_calls: false,
            debug_mode: false,
        }
    }
}

fn context_history_size() -> usize {
    1024
}

fn sampling_table_size() -> usize {
    1 << 16
}

/// The g-values of checked settings.
#[derive(Debug)]
pub(crate) struct SynthId {
    pub(super) config: SynthIdConfig,
    /// The table, computed on first use.
    table: OnceLock<Vec<bool>>,
}

/// The hash of no tokens.
const OF_NOTHING: i64 = 1;

impl SynthId {
    pub(crate) fn new(config: &SynthIdConfig) -> Result<Self> {
        /// Bounds the time of a step.
        const MOST_TOKENS: usize = 1024;
        const MOST_ENTRIES: usize = 1 << 24;

        let SynthIdConfig { ngram_len, ref keys, sampling_table_size, .. } = *config;
        if !(1..=MOST_TOKENS).contains(&ngram_len) {
            return Err(impossible(format!("`ngram_len` is {ngram_len}, must be from 1 to {MOST_TOKENS}")));
        }
        if keys.is_empty() {
            return Err(impossible("`keys` is empty; give at least one key".to_owned()));
        }
        if !(1..=MOST_ENTRIES).contains(&sampling_table_size) {
            return Err(impossible(format!(
                "`sampling_table_size` is {sampling_table_size}, must be from 1 to {MOST_ENTRIES}"
            )));
        }
        Ok(Self { config: config.clone(), table: OnceLock::new() })
    }

    /// Changes the scores of the token after those that were `generated`. The prompt has no effect: a context
    /// that begins before the first generated token has zeros there.
    pub(crate) fn apply(&self, generated: &[TokenId], scores: &mut [f32]) {
        let SynthIdConfig { debug_mode, .. } = self.config;
        if debug_mode {
            scores.fill(1.0);
        }
        if generated.len() < self.unmarked() || self.is_repeated(generated) {
            return;
        }
        self.compete(self.context(generated), scores);
    }

    /// Number of first tokens that get no watermark.
    fn unmarked(&self) -> usize {
        if self.config.skip_first_ngram_calls { self.config.ngram_len - 1 } else { 0 }
    }

    /// Runs the rounds of the tournament.
    fn compete(&self, context: i64, scores: &mut [f32]) {
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total: f64 = scores.iter().map(|score| f64::from((score - max).exp())).sum();
        // The sampler reports NaN.
        if !max.is_finite() || total.is_nan() {
            return;
        }
        // A removed token cannot win, and needs no g-values.
        let players = scores.iter().enumerate().filter_map(|(token, score)| {
            let probability = (score - max).exp() / total as f32;
            (probability > 0.0).then(|| (token, hashed(context, token as i64), probability))
        });
        let mut players: Vec<(usize, i64, f32)> = players.collect();
        let mut wins = vec![0.0f32; players.len()];
        for &key in &self.config.keys {
            let mut mass = 0.0f64;
            for ((_, ngram, probability), wins) in players.iter().zip(&mut wins) {
                *wins = f32::from(u8::from(self.g_value(*ngram, key)));
                mass += f64::from(*wins * probability);
            }
            for ((.., probability), wins) in players.iter_mut().zip(&wins) {
                *probability *= 1.0 + wins - mass as f32;
            }
        }
        // As in transformers, tokens without probability get the lowest score.
        scores.fill(f32::MIN);
        for (token, _, probability) in players {
            scores[token] = Some(probability.ln()).filter(|score| score.is_finite()).unwrap_or(f32::MIN);
        }
    }

    /// Whether the context after `generated` is one of the latest before it. Missing ones count as 0.
    fn is_repeated(&self, generated: &[TokenId]) -> bool {
        let context = self.context(generated);
        let remembered = generated.len() - self.unmarked();
        let size = self.config.context_history_size;
        let latest = generated.len() - remembered.min(size);
        remembered < size && context == 0
            || (latest..generated.len()).any(|len| self.context(&generated[..len]) == context)
    }

    /// The hash of the last `ngram_len - 1` tokens of `tokens`, with zeros before the first.
    fn context(&self, tokens: &[TokenId]) -> i64 {
        let len = self.config.ngram_len - 1;
        let missing = std::iter::repeat_n(0, len.saturating_sub(tokens.len()));
        let tokens = &tokens[tokens.len().saturating_sub(len)..];
        missing.chain(tokens.iter().copied()).fold(OF_NOTHING, |hash, token| hashed(hash, i64::from(token)))
    }

    /// The hash of these tokens.
    pub(super) fn hash(tokens: &[TokenId]) -> i64 {
        tokens.iter().fold(OF_NOTHING, |hash, &token| hashed(hash, i64::from(token)))
    }

    /// The g-value that a key gives to a sequence of tokens with this hash.
    pub(super) fn g_value(&self, ngram: i64, key: i64) -> bool {
        let table = self.table.get_or_init(|| {
            let SynthIdConfig { sampling_table_seed, sampling_table_size, .. } = self.config;
            TorchRandom::new(sampling_table_seed).bits(sampling_table_size)
        });
        table[hashed(ngram, key).rem_euclid(table.len() as i64) as usize]
    }
}

/// A linear congruential generator with the constants of newlib and musl (`accumulate_hash`).
fn hashed(hash: i64, data: i64) -> i64 {
    hash.wrapping_add(data).wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1)
}
