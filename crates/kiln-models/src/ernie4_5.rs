//! ERNIE 4.5 (Baidu, 2025; transformers' `Ernie4_5ForCausalLM`): Llama that rotates adjacent dimensions
//! together, with biases everywhere if the config asks for them.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, rope::RopeParameters},
};

#[derive(Debug)]
pub(crate) struct Ernie45;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    use_bias: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(2), head_dim: Some(128), positions: 131_072, eps: 1e-5, tied: true };

impl Architecture for Ernie45 {
    fn model_type(&self) -> &'static str {
        "ernie4_5"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let parameters = RopeParameters::read(config)?.or(5e5, 1.0);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.adjacent().into());
        decoder.set_attention_bias(fields.use_bias);
        decoder.mlp.bias = fields.use_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
