//! Watermarks: generated text favors tokens that a key selects, and anyone with the key can detect that in
//! the text.
//!
//! There are two, with the settings and results of transformers. [`GreenListConfig`] raises the scores of a
//! part of the vocabulary, which depends on the preceding tokens. [`SynthIdConfig`] changes the probabilities
//! of tokens in a tournament. [`WatermarkDetector`] and [`SynthIdDetector`] detect them.
//!
//! Random numbers are those of torch on the CPU: transformers on the CPU detects the watermarks that Kiln
//! generates on any device, and the other way round. On CUDA, transformers uses other numbers for both.

mod detectors;
mod green_list;
mod synth_id;
mod torch_random;

use kiln_core::{Error, Result};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value};

pub use detectors::{SynthIdDetection, SynthIdDetector, WatermarkDetection, WatermarkDetector};
pub use green_list::{GreenListConfig, SeedingScheme};
pub use synth_id::SynthIdConfig;

pub(crate) use green_list::GreenList;
pub(crate) use synth_id::SynthId;

/// The name of the setting.
const NAME: &str = "watermarking_config";

/// The watermark of a generation, and its settings: `watermarking_config`.
///
/// ```
/// # use kiln_generate::{GenerationConfig, watermark::{GreenListConfig, SynthIdConfig}};
/// let green = GenerationConfig::new().watermarking_config(GreenListConfig::default().hashing_key(4711).into());
/// let synth_id = GenerationConfig::new().watermarking_config(SynthIdConfig::new(5, vec![654, 400, 836]).into());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum WatermarkingConfig {
    /// Transformers' `WatermarkingConfig`
    GreenList(GreenListConfig),
    /// Transformers' `SynthIDTextWatermarkingConfig`
    SynthId(SynthIdConfig),
}

impl WatermarkingConfig {
    /// Parses the JSON object of `watermarking_config` in `generation_config.json`. One with `ngram_len` or
    /// `keys` is for SynthID.
    ///
    /// # Errors
    /// [`Error::Setting`] for text that is not a JSON object, unknown settings, and values of the wrong type.
    pub fn from_json(text: &str) -> Result<Self> {
        let error = |why| Error::Setting { name: NAME, why };
        let map = serde_json::from_str(text).map_err(|e| error(format!("is not a JSON object: {e}")))?;
        Self::read(map).map_err(error)
    }

    fn read(map: Map<String, Value>) -> Result<Self, String> {
        match ["ngram_len", "keys"].iter().any(|key| map.contains_key(*key)) {
            true => fields(map).map(Self::SynthId),
            false => fields(map).map(Self::GreenList),
        }
    }
}

/// Reads fields. Errors name the field with the wrong value.
fn fields<T: DeserializeOwned>(map: Map<String, Value>) -> Result<T, String> {
    serde_path_to_error::deserialize(Value::Object(map)).map_err(|e| match e.path().iter().next() {
        Some(_) => format!("`{}`: {}", e.path(), e.inner()),
        None => e.inner().to_string(),
    })
}

impl<'de> Deserialize<'de> for WatermarkingConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(Map::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl From<GreenListConfig> for WatermarkingConfig {
    fn from(config: GreenListConfig) -> Self {
        Self::GreenList(config)
    }
}

impl From<SynthIdConfig> for WatermarkingConfig {
    fn from(config: SynthIdConfig) -> Self {
        Self::SynthId(config)
    }
}

/// The error for an invalid value.
fn impossible(why: String) -> Error {
    Error::Setting { name: NAME, why }
}

#[cfg(test)]
mod tests;
