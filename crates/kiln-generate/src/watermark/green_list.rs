//! The green-list watermark: a part of the vocabulary becomes more likely.

use std::sync::OnceLock;

use kiln_core::{Result, model::TokenId, setters};
use serde::Deserialize;

use super::{impossible, torch_random::TorchRandom};

/// Raises the scores of green tokens: a random part of the vocabulary that depends on a key and on the
/// preceding tokens. (Kirchenbauer et al., "On the Reliability of Watermarks for Large Language Models",
/// 2023; transformers' `WatermarkingConfig`)
///
/// Anyone with the key can detect and imitate the watermark: choose your own key, and keep it secret.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct GreenListConfig {
    /// The share of the vocabulary that is green: above 0 and below 1. Default: 0.25.
    pub greenlist_ratio: f64,
    /// Increase of the scores of green tokens. Default: 2.
    pub bias: f32,
    /// The key. Default: 15485863, which is public.
    pub hashing_key: i64,
    /// The tokens that select the green list. Default: the preceding token.
    pub seeding_scheme: SeedingScheme,
    /// Number of tokens that select the green list if the token itself is one of them: one or more. A token
    /// with fewer tokens before it gets no watermark. Default: 1.
    pub context_width: usize,
}

setters!(GreenListConfig {
    greenlist_ratio: f64,
    bias: f32,
    hashing_key: i64,
    seeding_scheme: SeedingScheme,
    context_width: usize,
});

impl Default for GreenListConfig {
    fn default() -> Self {
        Self {
            greenlist_ratio: 0.25,
            bias: 2.0,
            hashing_key: 15_485_863,
            seeding_scheme: SeedingScheme::LeftHash,
            context_width: 1,
        }
    }
}

/// The tokens that select the green list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SeedingScheme {
    /// `lefthash`: the preceding token. Takes `vocab` steps per generated token.
    LeftHash,
    /// `selfhash`: the token itself and the preceding ones. Only the 40 likeliest tokens can be green, and
    /// generating takes 40 times as long as with [`LeftHash`](Self::LeftHash).
    SelfHash,
}

/// The green lists of checked settings.
#[derive(Debug)]
pub(crate) struct GreenList {
    pub(super) config: GreenListConfig,
    /// `fixed_table` of transformers: a permutation, computed on first use.
    table: OnceLock<Vec<u32>>,
}

impl GreenList {
    /// Size of the table.
    const TABLE: usize = 1_000_003;
    /// Number of likeliest tokens that can be green in `selfhash`.
    const CANDIDATES: usize = 40;

    pub(crate) fn new(config: &GreenListConfig) -> Result<Self> {
        let GreenListConfig { greenlist_ratio, bias, context_width, .. } = *config;
        if !(greenlist_ratio > 0.0 && greenlist_ratio < 1.0) {
            return Err(impossible(format!(
                "`greenlist_ratio` is {greenlist_ratio}, must be above 0 and below 1"
            )));
        }
        if !bias.is_finite() {
            return Err(impossible(format!("`bias` is {bias}, must be a finite number")));
        }
        if context_width == 0 {
            return Err(impossible("`context_width` is 0, must be at least 1".to_owned()));
        }
        Ok(Self { config: config.clone(), table: OnceLock::new() })
    }

    /// Raises the scores of green tokens after `ids`; `len`: number of tokens in the row.
    pub(crate) fn apply(&self, ids: &[TokenId], len: usize, scores: &mut [f32]) {
        if len < self.config.context_width {
            return;
        }
        let green = match self.config.seeding_scheme {
            SeedingScheme::LeftHash => self.behind(ids, scores.len()),
            SeedingScheme::SelfHash => {
                let candidates = likeliest(scores, Self::CANDIDATES).into_iter();
                candidates.filter(|&token| self.is_green(ids, token, scores.len())).collect()
            }
        };
        for token in green {
            scores[token as usize] += self.config.bias;
        }
    }

    /// The green tokens after `ids` of a vocabulary of `vocab` tokens, if only the last of `ids` counts.
    pub(super) fn behind(&self, ids: &[TokenId], vocab: usize) -> Vec<TokenId> {
        let random = ids.last().map(|&last| self.random_behind(last));
        random.map_or_else(Vec::new, |random| random.permutation(vocab, self.size(vocab)))
    }

    /// Whether `token` is green after `ids`.
    pub(super) fn is_green(&self, ids: &[TokenId], token: TokenId, vocab: usize) -> bool {
        let random = match self.config.seeding_scheme {
            SeedingScheme::LeftHash => ids.last().map(|&last| self.random_behind(last)),
            SeedingScheme::SelfHash => Some(self.random_of(ids, token)),
        };
        random.is_some_and(|random| random.begins_with(token, vocab, self.size(vocab)))
    }

    /// Number of green tokens.
    fn size(&self, vocab: usize) -> usize {
        (vocab as f64 * self.config.greenlist_ratio) as usize
    }

    fn random_behind(&self, last: TokenId) -> TorchRandom {
        seeded(i128::from(self.config.hashing_key) * i128::from(last))
    }

    fn random_of(&self, ids: &[TokenId], token: TokenId) -> TorchRandom {
        let GreenListConfig { hashing_key: key, context_width, .. } = self.config;
        let table = self.table.get_or_init(|| TorchRandom::new(key).permutation(Self::TABLE, Self::TABLE));
        let hash = |id: TokenId| i64::from(table[id as usize % Self::TABLE]) + 1;
        let before = &ids[(ids.len() + 1).saturating_sub(context_width).min(ids.len())..];
        // Products wrap around, as int64 in torch.
        let product = |id| key.wrapping_mul(hash(id)).wrapping_mul(hash(token));
        let least = before.iter().map(|&id| product(id)).fold(product(token), i64::min);
        seeded(i128::from(least))
    }
}

fn seeded(seed: i128) -> TorchRandom {
    TorchRandom::new(seed.rem_euclid(i128::from(u64::MAX)) as i64)
}

/// The tokens with the largest scores, of equal ones the first.
fn likeliest(scores: &[f32], count: usize) -> Vec<TokenId> {
    let mut order: Vec<TokenId> = (0..scores.len() as TokenId).collect();
    let first = |a: &TokenId, b: &TokenId| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    if order.len() > count {
        order.select_nth_unstable_by(count, first);
        order.truncate(count);
    }
    order
}
