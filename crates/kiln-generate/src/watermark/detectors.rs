//! Detection of watermarks in tokens.

use std::{
    collections::HashMap,
    f64::consts::{PI, SQRT_2},
};

use kiln_core::{Error, Result, model::TokenId, setters};

use super::{GreenList, GreenListConfig, SeedingScheme, SynthId, SynthIdConfig};

/// Number of standard deviations above the expectation for other text from which on transformers calls a text
/// watermarked. One in a thousand other texts is called so.
const Z_THRESHOLD: f64 = 3.0;

/// Detects the watermark of a [`GreenListConfig`]. (transformers' `WatermarkDetector`)
///
/// ```
/// # use kiln_generate::watermark::{GreenListConfig, WatermarkDetector};
/// // The settings that the text was generated with, and the vocabulary of the model.
/// let detector = WatermarkDetector::new(&GreenListConfig::default().hashing_key(4711), 2048)?;
/// let found = detector.detect(&[17, 4, 250, 250, 250, 9])?;
/// assert_eq!(found.num_tokens_scored, 5);
/// println!("z-score {}, p-value {}: {}", found.z_score, found.p_value, found.prediction);
/// # Ok::<(), kiln_core::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct WatermarkDetector {
    green_list: GreenList,
    vocab: usize,
    /// A token that begins a text and is not scored. Default: none.
    pub bos_token_id: Option<TokenId>,
    /// Whether a sequence of tokens counts once, however often it occurs. Default: each time.
    pub ignore_repeated_ngrams: bool,
    /// The z-score above which a text is called watermarked. Default: 3.
    pub z_threshold: f64,
}

setters!(WatermarkDetector { bos_token_id: TokenId, ignore_repeated_ngrams: bool, z_threshold: f64 });

/// The result of a [`WatermarkDetector`] for a text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WatermarkDetection {
    /// Number of tokens that could be green.
    pub num_tokens_scored: usize,
    /// Number of green tokens among them.
    pub num_green_tokens: usize,
    /// Share of green tokens among them.
    pub green_fraction: f64,
    /// Number of standard deviations by which green tokens exceed the expectation without a watermark.
    pub z_score: f64,
    /// The probability of at least this z-score without a watermark.
    pub p_value: f64,
    /// Whether the z-score is above the threshold.
    pub prediction: bool,
}

impl WatermarkDetector {
    /// Creates a detector for text that was generated with these settings by a model with a vocabulary of
    /// `vocab` tokens.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first invalid setting.
    pub fn new(config: &GreenListConfig, vocab: usize) -> Result<Self> {
        Ok(Self {
            green_list: GreenList::new(config)?,
            vocab,
            bos_token_id: None,
            ignore_repeated_ngrams: false,
            z_threshold: Z_THRESHOLD,
        })
    }

    /// Looks for the watermark in these tokens, which should not contain the prompt. Takes `vocab` steps per
    /// token.
    ///
    /// # Errors
    /// [`Error::Prompt`] for fewer than `context_width + 1` tokens, and for tokens that are not in the
    /// vocabulary.
    pub fn detect(&self, ids: &[TokenId]) -> Result<WatermarkDetection> {
        let ids = match ids {
            [first, rest @ ..] if Some(*first) == self.bos_token_id => rest,
            ids => ids,
        };
        in_vocabulary(ids, self.vocab)?;
        let GreenListConfig { context_width, seeding_scheme, greenlist_ratio: share, .. } =
            self.green_list.config;
        if ids.len() <= context_width {
            return Err(too_short(ids.len(), context_width.saturating_add(1)));
        }
        let n = match seeding_scheme {
            SeedingScheme::LeftHash => context_width + 1,
            SeedingScheme::SelfHash => context_width,
        };
        let mut counts: HashMap<&[TokenId], usize> = HashMap::new();
        for ngram in ids.windows(n) {
            let count = counts.entry(ngram).or_default();
            *count = if self.ignore_repeated_ngrams { 1 } else { *count + 1 };
        }
        let is_green = |ngram: &[TokenId]| {
            let split = ngram.split_last();
            split.is_some_and(|(token, before)| self.green_list.is_green(before, *token, self.vocab))
        };
        let scored: usize = counts.values().sum();
        let green = counts.iter().filter(|(ngram, _)| is_green(ngram)).map(|(_, count)| count).sum();
        let (tokens, green_tokens) = (scored as f64, green as f64);
        let z_score = (green_tokens - share * tokens) / (tokens * share * (1.0 - share)).sqrt();
        Ok(WatermarkDetection {
            num_tokens_scored: scored,
            num_green_tokens: green,
            green_fraction: green_tokens / tokens,
            z_score,
            p_value: p_value(z_score),
            prediction: z_score > self.z_threshold,
        })
    }
}

/// Detects the watermark of a [`SynthIdConfig`] by the mean of its g-values: half of them are 1 without a
/// watermark, more with it. (`mean_score` and `weighted_mean_score` of google-deepmind/synthid-text)
///
/// Transformers' `BayesianDetectorModel` detects it in shorter text, after a training for each model and key.
/// Kiln does not run it; its inputs are [`g_values`](Self::g_values) and the masks.
///
/// ```
/// # use kiln_generate::watermark::{SynthIdConfig, SynthIdDetector};
/// let detector = SynthIdDetector::new(&SynthIdConfig::new(3, vec![654, 400, 836]))?;
/// let found = detector.detect(&[17, 4, 250, 31, 9])?;
/// assert_eq!(found.num_tokens_scored, 3);
/// println!("weighted mean {}, z-score {}", found.weighted_mean, found.z_score);
/// # Ok::<(), kiln_core::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct SynthIdDetector {
    synth_id: SynthId,
    /// Tokens from the first of these on are not scored. Default: none, so that all tokens are scored.
    pub eos_token_id: Vec<TokenId>,
    /// The z-score above which a text is called watermarked. Default: 3.
    pub z_threshold: f64,
}

setters!(SynthIdDetector { eos_token_id: Vec<TokenId>, z_threshold: f64 });

/// The result of a [`SynthIdDetector`] for a text.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SynthIdDetection {
    /// Number of tokens with g-values: those after `ngram_len - 1` others that did not occur before.
    pub num_tokens_scored: usize,
    /// Mean of their g-values, from 0 to 1.
    pub mean: f64,
    /// Mean with weights that fall from 10 for the first key to 1 for the last, because the first rounds of
    /// the tournament leave more of the watermark.
    pub weighted_mean: f64,
    /// Number of standard deviations by which the weighted mean exceeds 0.5, if g-values of other text are
    /// fair coins.
    pub z_score: f64,
    /// The probability of at least this z-score without a watermark.
    pub p_value: f64,
    /// Whether the z-score is above the threshold.
    pub prediction: bool,
}

impl SynthIdDetector {
    /// Creates a detector for text that was generated with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first invalid setting.
    pub fn new(config: &SynthIdConfig) -> Result<Self> {
        Ok(Self { synth_id: SynthId::new(config)?, eos_token_id: Vec::new(), z_threshold: Z_THRESHOLD })
    }

    /// Looks for the watermark in these tokens, which should not contain the prompt.
    ///
    /// # Errors
    /// [`Error::Prompt`] for fewer than `ngram_len` tokens before one that ends the text.
    pub fn detect(&self, ids: &[TokenId]) -> Result<SynthIdDetection> {
        let SynthIdConfig { ngram_len, ref keys, .. } = self.synth_id.config;
        let end = ids.iter().position(|id| self.eos_token_id.contains(id)).unwrap_or(ids.len());
        let ids = &ids[..end];
        if ids.len() < ngram_len {
            return Err(too_short(ids.len(), ngram_len));
        }
        let mask = self.context_repetition_mask(ids);
        let scored = mask.iter().filter(|counts| **counts).count();
        if scored == 0 {
            let why =
                "every sequence of tokens repeats another, so none can be scored; give more text".to_owned();
            return Err(Error::Prompt { why });
        }
        let mut ones = vec![0usize; keys.len()];
        for (g_values, _) in self.g_values(ids).iter().zip(&mask).filter(|(_, counts)| **counts) {
            ones.iter_mut().zip(g_values).for_each(|(ones, g_value)| *ones += usize::from(*g_value));
        }
        let last = keys.len().saturating_sub(1).max(1) as f64;
        let weights: Vec<f64> = (0..keys.len()).map(|i| 10.0 - 9.0 * i as f64 / last).collect();
        let (sum, tokens) = (weights.iter().sum::<f64>(), scored as f64);
        let weighted: f64 = weights.iter().zip(&ones).map(|(weight, ones)| weight * *ones as f64).sum();
        let weighted_mean = weighted / (sum * tokens);
        // A coin has a variance of a quarter.
        let squares: f64 = weights.iter().map(|weight| weight * weight).sum();
        let deviation = (squares / 4.0 / tokens).sqrt() / sum;
        let z_score = (weighted_mean - 0.5) / deviation;
        Ok(SynthIdDetection {
            num_tokens_scored: scored,
            mean: ones.iter().sum::<usize>() as f64 / (keys.len() as f64 * tokens),
            weighted_mean,
            z_score,
            p_value: p_value(z_score),
            prediction: z_score > self.z_threshold,
        })
    }

    /// The g-values of each sequence of `ngram_len` tokens, `[ids.len() - ngram_len + 1][keys]`.
    /// (`compute_g_values`)
    pub fn g_values(&self, ids: &[TokenId]) -> Vec<Vec<bool>> {
        let SynthIdConfig { ngram_len, ref keys, .. } = self.synth_id.config;
        let of_ngram = |ngram: &[TokenId]| {
            let hash = SynthId::hash(ngram);
            keys.iter().map(|&key| self.synth_id.g_value(hash, key)).collect()
        };
        ids.windows(ngram_len).map(of_ngram).collect()
    }

    /// Whether the context of each sequence of `ngram_len` tokens is new, `[ids.len() - ngram_len + 1]`: not
    /// one of the `context_history_size` before it. (`compute_context_repetition_mask`)
    pub fn context_repetition_mask(&self, ids: &[TokenId]) -> Vec<bool> {
        let SynthIdConfig { ngram_len, context_history_size: size, .. } = self.synth_id.config;
        let mut latest: HashMap<i64, usize> = HashMap::new();
        let contexts = ids.windows(ngram_len).map(|ngram| SynthId::hash(&ngram[..ngram_len - 1]));
        let is_new = |(i, context)| {
            let occurred = latest.insert(context, i).is_some_and(|before| i - before <= size);
            // The history begins with zeros.
            !(occurred || context == 0 && i < size)
        };
        contexts.enumerate().map(is_new).collect()
    }
}

fn in_vocabulary(ids: &[TokenId], vocab: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => Err(Error::Prompt {
            why: format!("token {id} is not in the model's vocabulary of {vocab} tokens"),
        }),
        None => Ok(()),
    }
}

fn too_short(tokens: usize, least: usize) -> Error {
    let why =
        format!("a watermark shows in {least} tokens or more, and the text has {tokens}; give more text");
    Error::Prompt { why }
}

/// The probability that a normal distribution exceeds `z` standard deviations, with a relative error below
/// 1e-12.
pub(super) fn p_value(z: f64) -> f64 {
    match z {
        ..0.0 => 1.0 - p_value(-z),
        _ => 0.5 * erfc(z / SQRT_2),
    }
}

/// The complementary error function for nonnegative `x`: its power series, or its continued fraction.
fn erfc(x: f64) -> f64 {
    /// The number from which on the series suffers from cancellation.
    const LARGE: f64 = 2.0;
    const TERMS: u32 = 100;

    let square = x * x;
    if x < LARGE {
        let mut term = x;
        let mut sum = x;
        for n in 1..TERMS {
            term *= 2.0 * square / f64::from(2 * n + 1);
            sum += term;
        }
        return 1.0 - 2.0 / PI.sqrt() * (-square).exp() * sum;
    }
    let fraction = (1..TERMS).rev().fold(x, |below, n| x + f64::from(n) / 2.0 / below);
    (-square).exp() / (PI.sqrt() * fraction)
}
