//! GLM-4 (Zhipu AI, 2025; transformers' `Glm4ForCausalLM`): Llama with norms before and after attention and
//! feed-forward, one matrix for both input projections of the feed-forward, biases on queries, keys and
//! values, and rotary positions of adjacent dimensions on half of each head.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, names::NormNames, rope::RopeParameters},
};

#[derive(Debug)]
pub(crate) struct Glm4;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(2), head_dim: Some(128), positions: 131_072, eps: 1.5625e-7, tied: false };

impl Architecture for Glm4 {
    fn model_type(&self) -> &'static str {
        "glm4"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let parameters = RopeParameters::read(config)?.or(1e4, 0.5);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.adjacent().into());
        decoder.names.norms = NormNames {
            after_mixer: Some("post_self_attn_layernorm"),
            after_feed_forward: Some("post_mlp_layernorm"),
            ..decoder.names.norms
        };
        let bias = fields.attention_bias.unwrap_or(true);
        decoder.attention_mut().for_each(|attention| attention.qkv_bias = bias);
        decoder.mlp.fused = true;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
