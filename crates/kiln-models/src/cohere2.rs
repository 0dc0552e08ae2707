//! Command R7B and Command A (Cohere, 2024; transformers' `Cohere2ForCausalLM`): parallel blocks with one
//! LayerNorm without a bias, a factor for logits, and three blocks with a window for each block without. Only
//! blocks with a window have rotary positions, of adjacent dimensions.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, names::NormNames, norm::NormKind},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Cohere2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    logit_scale: Option<f64>,
    attention_bias: bool,
    sliding_window: Option<usize>,
    /// Period of the blocks without a window, if `layer_types` is missing.
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 8192, eps: 1e-5, tied: true };

impl Architecture for Cohere2 {
    fn model_type(&self) -> &'static str {
        "cohere2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        // Transformers overwrites it.
        let config = &config.without(&["head_dim"]);
        let common = Common::read(config, DEFAULTS)?;
        let eps = config.positive("layer_norm_eps", fields.layer_norm_eps.unwrap_or(DEFAULTS.eps))?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let period = fields.sliding_window_pattern.unwrap_or(4);
        config.check("sliding_window_pattern", period, usize::MAX)?;
        let sliding = |i: usize| !(i + 1).is_multiple_of(period);
        let windows = windows(config, common.sizes.layers, window, fields.layer_types.as_deref(), sliding)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.adjacent().into());
        decoder.norm = NormKind::Layer { eps, bias: false };
        decoder.names.norms = NormNames { before_feed_forward: None, ..decoder.names.norms };
        decoder.parallel = true;
        decoder.set_rotating(|i| windows[i].is_some());
        decoder.set_windows(windows);
        decoder.set_attention_bias(fields.attention_bias);
        decoder.logit_scale = Some(config.positive("logit_scale", fields.logit_scale.unwrap_or(0.0625))?);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
