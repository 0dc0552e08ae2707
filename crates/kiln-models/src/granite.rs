//! Granite 3 (IBM, 2024; transformers' `GraniteForCausalLM`): Llama with factors for embeddings, scores, what
//! blocks add, and logits.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        decoder::{DecoderConfig, Scale},
        mlp,
    },
};

#[derive(Debug)]
pub(crate) struct Granite;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    mlp_bias: bool,
}

/// Fields with factors, each 1 by default.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Factors {
    embedding_multiplier: Option<f64>,
    attention_multiplier: Option<f64>,
    residual_multiplier: Option<f64>,
    logits_scaling: Option<f64>,
}

impl Factors {
    pub(crate) fn apply(&self, config: &ConfigFile, decoder: &mut DecoderConfig) -> Result<()> {
        let factor = |name: &str, factor: Option<f64>| config.positive(name, factor.unwrap_or(1.0));
        let scale = factor("attention_multiplier", self.attention_multiplier)?;
        decoder.attention_mut().for_each(|attention| attention.scale = scale);
        let embeddings = factor("embedding_multiplier", self.embedding_multiplier)?;
        decoder.embedding_scale = (embeddings != 1.0).then_some(Scale::Exact(embeddings as f32));
        let residual = factor("residual_multiplier", self.residual_multiplier)?;
        decoder.residual_scale = (residual != 1.0).then_some(residual);
        let logits = factor("logits_scaling", self.logits_scaling)?;
        decoder.logit_scale = (logits != 1.0).then_some(1.0 / logits);
        Ok(())
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-6, tied: false };

impl Architecture for Granite {
    fn model_type(&self) -> &'static str {
        "granite"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let factors: Factors = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_attention_bias(fields.attention_bias);
        factors.apply(config, &mut decoder)?;
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
