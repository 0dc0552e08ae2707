//! Llama (Touvron et al., 2023; transformers' `LlamaForCausalLM`): grouped heads, rotary positions of every
//! kind, optional biases, tied embeddings.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp},
};

#[derive(Debug)]
pub(crate) struct Llama;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    mlp_bias: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-6, tied: false };

impl Architecture for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_attention_bias(fields.attention_bias);
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
