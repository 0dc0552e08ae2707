//! SmolLM3 (Hugging Face, 2025; transformers' `SmolLM3ForCausalLM`): Llama without rotary positions in one of
//! every few blocks, and with a window in those blocks if the config asks for it.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, rope::RopeParameters},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct SmolLm3;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    mlp_bias: bool,
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// For each block 1 if it rotates keys, 0 if not.
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: None, positions: 32_768, eps: 1e-6, tied: true };

impl Architecture for SmolLm3 {
    fn model_type(&self) -> &'static str {
        "smollm3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let layers = common.sizes.layers;
        let rotates = rotating(config, layers, fields.no_rope_layers, fields.no_rope_layer_interval)?;
        let window = fields.sliding_window;
        let sliding = |i: usize| fields.use_sliding_window && window.is_some() && !rotates[i];
        let windows = windows(config, layers, window, fields.layer_types.as_deref(), sliding)?;
        let parameters = RopeParameters::read(config)?.or(2e6, 1.0);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.set_rotating(|i| rotates[i]);
        decoder.set_attention_bias(fields.attention_bias);
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}

/// Returns for each of `layers` blocks whether it rotates keys: as `list` says, or all but every
/// `interval`th.
///
/// # Errors
/// A list that is too short, or an interval of 0.
pub(crate) fn rotating(
    config: &ConfigFile,
    layers: usize,
    list: Option<Vec<u8>>,
    interval: Option<usize>,
) -> Result<Vec<bool>> {
    let interval = interval.unwrap_or(4);
    config.check("no_rope_layer_interval", interval, usize::MAX)?;
    match list {
        None => Ok((1..=layers).map(|number| !number.is_multiple_of(interval)).collect()),
        Some(list) if list.len() < layers => {
            let why = format!("`no_rope_layers` has {} entries, `num_hidden_layers` is {layers}", list.len());
            Err(config.error(&why))
        }
        Some(list) => Ok(list.into_iter().map(|rotates| rotates != 0).collect()),
    }
}
