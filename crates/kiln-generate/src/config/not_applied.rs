//! Settings of transformers that change which tokens are chosen, and that are not applied here yet.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::GenerationConfig;

/// When a setting has an effect, beside having a value that is not neutral.
#[derive(Clone, Copy, PartialEq)]
enum Effect {
    Always,
    /// Only where tokens are drawn.
    Sampling,
}
use Effect::{Always, Sampling};

/// Settings of `GenerationConfig` in transformers 5.23, and the number at which each does nothing. Empty lists, false and
/// null do nothing either. Settings that only shape beams are not here: `num_beams` is.
const NOT_APPLIED: &[(&str, Effect, f64)] = &[
    ("bad_words_ids", Always, 0.0),
    ("begin_suppress_tokens", Always, 0.0),
    ("constraints", Always, 0.0),
    ("dola_layers", Always, 0.0),
    ("encoder_repetition_penalty", Always, 1.0),
    ("epsilon_cutoff", Sampling, 0.0),
    ("eta_cutoff", Sampling, 0.0),
    ("exponential_decay_length_penalty", Always, 0.0),
    ("force_words_ids", Always, 0.0),
    ("forced_bos_token_id", Always, -1.0),
    ("forced_decoder_ids", Always, 0.0),
    ("forced_eos_token_id", Always, -1.0),
    ("guidance_scale", Always, 1.0),
    ("max_time", Always, 0.0),
    ("min_length", Always, 0.0),
    ("min_new_tokens", Always, 0.0),
    ("no_repeat_ngram_size", Always, 0.0),
    ("num_beams", Always, 1.0),
    ("num_return_sequences", Always, 1.0),
    ("penalty_alpha", Always, 0.0),
    ("sequence_bias", Always, 0.0),
    ("suppress_tokens", Always, 0.0),
    ("token_healing", Always, 0.0),
    ("top_h", Sampling, 1.0),
    ("typical_p", Sampling, 1.0),
    ("watermarking_config", Always, 0.0),
];

/// Reads those of them that are given.
pub(super) fn named_in<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Value>, D::Error> {
    let mut given = BTreeMap::deserialize(deserializer)?;
    given.retain(|given: &String, _| NOT_APPLIED.iter().any(|(name, ..)| name == given));
    Ok(given)
}

impl GenerationConfig {
    /// The names of settings that would change which tokens are chosen, and that are not applied here. `sampling`: whether
    /// tokens are drawn.
    pub fn not_applied(&self, sampling: bool) -> Vec<&'static str> {
        let has_effect = |(name, effect, neutral): &&(&'static str, Effect, f64)| {
            let value = self.others.get(*name).unwrap_or(&Value::Null);
            (sampling || *effect == Always) && !is_neutral(value, *neutral)
        };
        NOT_APPLIED.iter().filter(has_effect).map(|(name, ..)| *name).collect()
    }
}

fn is_neutral(value: &Value, neutral: f64) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) | Value::String(_) => false,
        Value::Number(number) => number.as_f64() == Some(neutral),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
