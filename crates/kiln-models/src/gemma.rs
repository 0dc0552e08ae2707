//! Gemma (Gemma Team, 2024; transformers' `GemmaForCausalLM`): Llama with norms that scale by one plus their
//! weights, embeddings multiplied by the square root of their width, GELU, and a head size independent of the
//! hidden size.

use kiln_core::Result;
use kiln_kernels::Activation;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp},
};

#[derive(Debug)]
pub(crate) struct Gemma;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    hidden_activation: Option<String>,
    attention_bias: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(16), head_dim: Some(256), positions: 8192, eps: 1e-6, tied: true };

impl Architecture for Gemma {
    fn model_type(&self) -> &'static str {
        "gemma"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::gemma(common, rope.into());
        decoder.set_attention_bias(fields.attention_bias);
        decoder.mlp.activation = fields.activation(config)?;
        Ok(Box::new(decoder))
    }
}

impl Fields {
    /// Returns the activation. transformers 4 reads `hidden_activation`, and 5 reads `hidden_act`, where
    /// `gelu` is an old name of the tanh approximation.
    fn activation(&self, config: &ConfigFile) -> Result<Activation> {
        let activation = match self.hidden_act.as_deref() {
            None | Some("gelu") => Activation::GeluTanh,
            Some(name) => mlp::activation(config, "hidden_act", Some(name))?,
        };
        match self.hidden_activation.as_deref() {
            Some(name) if mlp::activation(config, "hidden_activation", Some(name))? != activation => {
                Err(config.error(&format!("`hidden_activation` is `{name}`, and `hidden_act` means another")))
            }
            _ => Ok(activation),
        }
    }
}
