//! Qwen2 (Yang et al., 2024; transformers' `Qwen2ForCausalLM`): Llama with biases on queries, keys and
//! values, and windows on its upper blocks if the config asks for them.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Qwen2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    hidden_act: Option<String>,
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(32), head_dim: None, positions: 32768, eps: 1e-6, tied: false };

impl Fields {
    /// Returns the settings that Qwen2 and Qwen3 share: the windows of blocks, and the activation. `first`:
    /// default number of the first block with a window.
    pub(crate) fn decoder(
        &self,
        config: &ConfigFile,
        common: Common,
        rope: Rope,
        first: usize,
    ) -> Result<DecoderConfig> {
        let window = config.unless_null("sliding_window", self.sliding_window, Some(4096));
        let window = window.filter(|_| self.use_sliding_window);
        let first = self.max_window_layers.unwrap_or(first);
        let sliding = |i| window.is_some() && i >= first;
        let windows = windows(config, common.sizes.layers, window, self.layer_types.as_deref(), sliding)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", self.hidden_act.as_deref())?;
        Ok(decoder)
    }
}

impl Architecture for Qwen2 {
    fn model_type(&self) -> &'static str {
        "qwen2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = fields.decoder(config, common, rope, 28)?;
        decoder.attention_mut().for_each(|attention| attention.qkv_bias = true);
        Ok(Box::new(decoder))
    }
}
