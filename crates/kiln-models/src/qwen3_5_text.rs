//! The text model of Qwen 3.5 and 3.6 (Qwen Team, 2026; transformers' `Qwen3_5ForCausalLM`): Qwen3-Next with
//! dense feed-forwards. For text, its multimodal rotary positions are plain ones.

use kiln_core::Result;

use crate::{Architecture, ConfigFile, Configured, config::Defaults, qwen3_next::hybrid};

#[derive(Debug)]
pub(crate) struct Qwen35Text;

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: Some(256), positions: 32_768, eps: 1e-6, tied: false };

impl Architecture for Qwen35Text {
    fn model_type(&self) -> &'static str {
        "qwen3_5_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let (decoder, _) = hybrid(config, DEFAULTS)?;
        Ok(Box::new(decoder))
    }
}
