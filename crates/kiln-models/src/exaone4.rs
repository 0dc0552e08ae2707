//! EXAONE 4.0 (LG AI Research, 2025; transformers' `Exaone4ForCausalLM`): Llama with norms after attention
//! and feed-forward instead of before, and norms on each head of queries and keys. If some blocks have a
//! window, the others have no rotary positions.

use kiln_core::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        decoder::DecoderConfig,
        mlp,
        names::NormNames,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Exaone4;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
    /// Period of the blocks without a window, or a pattern of the letters L and G.
    sliding_window_pattern: Value,
    layer_types: Option<Vec<String>>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(32), head_dim: None, positions: 2048, eps: 1e-5, tied: false };

impl Architecture for Exaone4 {
    fn model_type(&self) -> &'static str {
        "exaone4"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let layers = common.sizes.layers;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let types = fields.layer_types.as_deref();
        let period = match &fields.sliding_window_pattern {
            _ if window.is_none() || types.is_some() => 1,
            Value::Null => 4,
            pattern => match pattern.as_u64().and_then(|period| usize::try_from(period).ok()) {
                Some(period) if period > 0 => period,
                _ => {
                    let why = format!(
                        "`sliding_window_pattern` is {pattern}; give the period of blocks without a window, or `layer_types`"
                    );
                    return Err(config.error(&why));
                }
            },
        };
        let windows = windows(config, layers, window, types, |i| !(i + 1).is_multiple_of(period))?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.names.norms = NormNames::AFTER;
        decoder.set_rotating(|i| window.is_none() || windows[i].is_some());
        decoder.set_windows(windows);
        decoder
            .attention_mut()
            .for_each(|attention| attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS)));
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
