//! DoLa: the logits of the last layer are contrasted with those of an earlier one.
//!
//! Of several earlier layers, the one with the most different distribution is taken. ("DoLa: Decoding by
//! Contrasting Layers Improves Factuality in Large Language Models", <https://arxiv.org/abs/2309.03883>;
//! transformers 4.47's `_dola_decoding`)

use kiln_core::{Result, model::CausalModel};
use serde::{Deserialize, Deserializer, de};

use crate::{processors::log_softmax, settings::setting};

/// The layers that the last one is contrasted with. Layer 0 is the embeddings, layer `n` the output of the
/// first `n` blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DolaLayers {
    /// Every second layer of the first half.
    Low,
    /// Every second layer of the second half.
    High,
    /// The given layers. Layers that the model does not have before its last one are skipped.
    These(Vec<usize>),
}

impl<'de> Deserialize<'de> for DolaLayers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "neither \"low\", \"high\" nor a list of layers")]
        enum Written {
            Word(String),
            These(Vec<usize>),
        }

        match Written::deserialize(deserializer)? {
            Written::Word(word) if word == "low" => Ok(Self::Low),
            Written::Word(word) if word == "high" => Ok(Self::High),
            Written::Word(word) => {
                Err(de::Error::custom(format!("`{word}` is neither low, high nor a list of layers")))
            }
            Written::These(layers) => Ok(Self::These(layers)),
        }
    }
}

impl DolaLayers {
    /// The layers of `model` that are contrasted with its last, in ascending order.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) if the model has none of them.
    pub(super) fn of(&self, model: &dyn CausalModel) -> Result<Vec<usize>> {
        /// Number of layers of a large model that are taken from one of its ends.
        const MOST: usize = 20;

        let layers = model.needs().len();
        // With tied embeddings, the logits of layer 0 would be those of its input token.
        let first = match (model.ties_embeddings(), layers) {
            (true, 3..) => 2,
            (true, 2) => 1,
            _ => 0,
        };
        let half = layers / 2;
        let is_large = layers > 2 * MOST;
        let mut candidates: Vec<usize> = match self {
            Self::Low if first == half => vec![first],
            Self::Low => (first..if is_large { MOST } else { half }).step_by(2).collect(),
            Self::High => (if is_large { layers - MOST } else { half }..layers).step_by(2).collect(),
            Self::These(given) => given.iter().copied().filter(|&layer| layer < layers).collect(),
        };
        candidates.sort_unstable();
        candidates.dedup();
        match candidates.is_empty() {
            true => Err(setting(
                "dola_layers",
                format!("names no layer before the last of a model that has {layers}; choose others"),
            )),
            false => Ok(candidates),
        }
    }
}

/// The last layer's logits `[rows, vocab]`, and the scores that processors begin with, from the logits
/// `[rows, layers + 1, vocab]` of earlier layers and the last.
pub(super) fn contrast(logits: &[f32], layers: usize, vocab: usize) -> (Vec<f32>, Vec<f32>) {
    let rows: Vec<&[f32]> = logits.chunks_exact((layers + 1) * vocab).collect();
    let of = |row: &[f32], layer: usize| log_softmax(&row[layer * vocab..(layer + 1) * vocab]);
    let last: Vec<Vec<f32>> = rows.iter().map(|row| of(row, layers)).collect();
    let divergence = |layer: usize| -> f64 {
        rows.iter().zip(&last).map(|(row, last)| jensen_shannon(last, &of(row, layer))).sum()
    };
    // One layer for all rows, the first of equals.
    let chosen = match layers {
        1 => 0,
        _ => (0..layers)
            .map(|layer| (layer, divergence(layer)))
            .reduce(|best, other| if other.1 > best.1 { other } else { best })
            .map_or(0, |(layer, _)| layer),
    };
    let begin = rows.iter().zip(&last).flat_map(|(row, last)| difference(last, &of(row, chosen)));
    let begin = begin.collect();
    (rows.iter().flat_map(|row| &row[layers * vocab..]).copied().collect(), begin)
}

/// The Jensen-Shannon divergence of two distributions, given by log-probabilities, up to a factor.
fn jensen_shannon(a: &[f32], b: &[f32]) -> f64 {
    let of = |(&a, &b): (&f32, &f32)| {
        let mean = 0.5 * (a.exp() + b.exp());
        match mean > 0.0 {
            true => f64::from(mean * (mean.ln() - a)) + f64::from(mean * (mean.ln() - b)),
            false => 0.0,
        }
    };
    a.iter().zip(b).map(of).sum()
}

/// The differences of the log-probabilities `last` and `earlier`. Tokens less likely than a tenth of the
/// likeliest are removed.
fn difference(last: &[f32], earlier: &[f32]) -> Vec<f32> {
    let threshold = last.iter().copied().fold(f32::NEG_INFINITY, f32::max) + 0.1f32.ln();
    let of = |(&last, &earlier): (&f32, &f32)| match last < threshold {
        true => f32::NEG_INFINITY,
        false => last - earlier,
    };
    last.iter().zip(earlier).map(of).collect()
}

#[cfg(test)]
mod tests;
