//! Ministral 3 and Devstral 2 (Mistral AI, 2025; transformers' `Ministral3ForCausalLM`): Mistral with rotary
//! positions that are stretched by YaRN, and queries that grow with their position.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, places::QueryTemperature, rope::RopeParameters},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Ministral3;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    sliding_window: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: Some(128), positions: 262_144, eps: 1e-5, tied: false };

impl Architecture for Ministral3 {
    fn model_type(&self) -> &'static str {
        "ministral3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = fields.sliding_window;
        let windows = windows(config, common.sizes.layers, window, None, |_| window.is_some())?;
        let has_rope = ["rope_parameters", "rope_scaling"].iter().any(|key| config.get(key).is_some());
        let parameters = match RopeParameters::read(config)? {
            read if has_rope => read.or(1e4, 1.0),
            _ => RopeParameters::ministral3(),
        };
        let trained = parameters.original_max_position_embeddings.unwrap_or(common.sizes.positions);
        config.check("original_max_position_embeddings", trained, 1 << 30)?;
        let Some(growth) = parameters.llama_4_scaling_beta.filter(|growth| growth.is_finite()) else {
            let why =
                "`rope_parameters` has no `llama_4_scaling_beta`, by which queries grow with their position";
            return Err(config.error(why));
        };
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.query_temperature =
            Some(QueryTemperature { growth, length: trained, first: 0, counts_padding: false });
        decoder.attention_mut().for_each(|attention| attention.tempered = true);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
