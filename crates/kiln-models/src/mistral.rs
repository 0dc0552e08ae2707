//! Mistral (Jiang et al., 2023; transformers' `MistralForCausalLM`): Llama without biases, with a window on
//! every block, or on the blocks that the config lists (`MinistralForCausalLM`).

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Mistral;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 131_072, eps: 1e-6, tied: false };

impl Architecture for Mistral {
    fn model_type(&self) -> &'static str {
        "mistral"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let layer_types = fields.layer_types.as_deref();
        let windows = windows(config, common.sizes.layers, window, layer_types, |_| window.is_some())?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
