//! Settings of transformers that change which tokens are chosen, or how, and that are not applied here.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::GenerationConfig;

/// Settings of `GenerationConfig` in transformers 5.23, and the number at which each has no effect. Empty
/// lists, false and null have no effect either.
const NOT_APPLIED: &[(&str, f64)] = &[
    ("assistant_early_exit", 0.0),
    ("assistant_ensemble_weight", 0.0),
    ("constraints", 0.0),
    ("forced_decoder_ids", 0.0),
    ("speculation_type", 0.0),
    ("token_healing", 0.0),
    ("use_mtp", 0.0),
];

/// Reads the settings among them that are given.
pub(super) fn named_in<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Value>, D::Error> {
    let mut given = BTreeMap::deserialize(deserializer)?;
    given.retain(|given: &String, _| NOT_APPLIED.iter().any(|(name, ..)| name == given));
    Ok(given)
}

impl GenerationConfig {
    /// The names of settings that would change the choice of tokens and that are not applied here.
    pub fn not_applied(&self) -> Vec<&'static str> {
        let has_effect = |(name, neutral): &&(&str, f64)| {
            !is_neutral(self.others.get(*name).unwrap_or(&Value::Null), *neutral)
        };
        NOT_APPLIED.iter().filter(has_effect).map(|(name, _)| *name).collect()
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
