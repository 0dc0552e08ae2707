//! Seed-OSS (ByteDance Seed, 2025; transformers' `SeedOssForCausalLM`): Llama with biases on queries, keys
//! and values, and a separate setting for the bias of the output projection.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp},
};

#[derive(Debug)]
pub(crate) struct SeedOss;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    attention_out_bias: bool,
    mlp_bias: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: Some(128), positions: 524_288, eps: 1e-6, tied: false };

impl Architecture for SeedOss {
    fn model_type(&self) -> &'static str {
        "seed_oss"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        for attention in decoder.attention_mut() {
            attention.qkv_bias = fields.attention_bias.unwrap_or(true);
            attention.o_bias = fields.attention_out_bias;
        }
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
