//! StarCoder2 (Lozhkov et al., 2024; transformers' `Starcoder2ForCausalLM`): LayerNorms, biases, a
//! feed-forward without a gate, rotary positions, and a window on all blocks if the config asks for one.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{block::FeedForwardConfig, decoder::DecoderConfig, mlp, norm::NormKind},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Starcoder2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    norm_epsilon: Option<f64>,
    use_bias: Option<bool>,
    sliding_window: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(2), head_dim: None, positions: 4096, eps: 1e-5, tied: true };

impl Architecture for Starcoder2 {
    fn model_type(&self) -> &'static str {
        "starcoder2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let eps = config.positive("norm_epsilon", fields.norm_epsilon.unwrap_or(DEFAULTS.eps))?;
        let window = fields.sliding_window;
        let windows = windows(config, common.sizes.layers, window, None, |_| window.is_some())?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.norm = NormKind::Layer { eps, bias: true };
        decoder.set_windows(windows);
        decoder.set_feed_forward(FeedForwardConfig::Plain(["mlp.c_fc", "mlp.c_proj"]));
        let bias = fields.use_bias.unwrap_or(true);
        decoder.set_attention_bias(bias);
        decoder.mlp.bias = bias;
        let activation = fields.hidden_act.as_deref().unwrap_or("gelu_pytorch_tanh");
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(activation))?;
        Ok(Box::new(decoder))
    }
}
