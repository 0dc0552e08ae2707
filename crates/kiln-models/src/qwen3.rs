//! Qwen3 (Yang et al., 2025; transformers' `Qwen3ForCausalLM`): Qwen2 with a norm on each head of queries and
//! keys, and biases only if the config asks for them.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::attention::{HeadNorms, QK_NORMS},
    qwen2,
};

#[derive(Debug)]
pub(crate) struct Qwen3;

/// Fields of `config.json` in addition to those of Qwen2.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    attention_bias: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(32), head_dim: Some(128), positions: 32768, eps: 1e-6, tied: false };

impl Architecture for Qwen3 {
    fn model_type(&self) -> &'static str {
        "qwen3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let Fields { attention_bias } = config.parse()?;
        let fields: qwen2::Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = fields.decoder(config, common, rope, 28)?;
        decoder
            .attention_mut()
            .for_each(|attention| attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS)));
        decoder.set_attention_bias(attention_bias);
        Ok(Box::new(decoder))
    }
}
