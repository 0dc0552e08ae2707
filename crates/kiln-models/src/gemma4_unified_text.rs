//! The language model of Gemma 4 12B (Google, 2026; transformers' `Gemma4UnifiedForCausalLM`): Gemma 4
//! without per-layer embeddings and experts.

use kiln_core::Result;

use crate::{Architecture, ConfigFile, Configured, gemma4_text};

#[derive(Debug)]
pub(crate) struct Gemma4UnifiedText;

/// Fields of Gemma 4 that this model has not.
const UNKNOWN: [&str; 2] = ["hidden_size_per_layer_input", "enable_moe_block"];

impl Architecture for Gemma4UnifiedText {
    fn model_type(&self) -> &'static str {
        "gemma4_unified_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let usual = [("sliding_window", 1024), ("max_position_embeddings", 262_144)];
        let own = usual.into_iter().fold(config.without(&UNKNOWN), |own, (name, value)| own.or(name, value));
        Ok(Box::new(gemma4_text::decoder(&own)?))
    }
}
