//! GLM-4.7-Flash (Zhipu AI, 2026; transformers' `Glm4MoeLiteForCausalLM`): DeepSeek-V3 with a list of the
//! blocks whose feed-forwards are mixtures.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::Defaults,
    deepseek_v3::{LatentDefaults, latent},
    glm4_moe::{ExpertDefaults, SigmoidExperts},
};

#[derive(Debug)]
pub(crate) struct Glm4MoeLite;

/// Fields of `config.json` in addition to those of DeepSeek-V3.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    mlp_layer_types: Option<Vec<String>>,
}

const DEFAULTS: LatentDefaults = LatentDefaults {
    common: Defaults { kv_heads: None, head_dim: None, positions: 202_752, eps: 1e-5, tied: false },
    query_rank: 768,
    key_dim: 192,
    value_dim: 256,
};

impl Architecture for Glm4MoeLite {
    fn model_type(&self) -> &'static str {
        "glm4_moe_lite"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let Fields { mlp_layer_types } = config.parse()?;
        let experts: SigmoidExperts = config.parse()?;
        let mut decoder = latent(config, DEFAULTS)?;
        let layers = decoder.blocks.len();
        let are_mixtures = match mlp_layer_types {
            None => (0..layers).map(|i| i > 0).collect(),
            Some(types) if types.len() != layers => {
                let why =
                    format!("`mlp_layer_types` has {} entries, `num_hidden_layers` is {layers}", types.len());
                return Err(config.error(&why));
            }
            Some(types) => {
                let is_mixture = |name: &String| match &**name {
                    "sparse" => Ok(true),
                    "dense" => Ok(false),
                    _ => Err(config.error(&format!("`mlp_layer_types` has `{name}`; known: dense, sparse"))),
                };
                types.iter().map(is_mixture).collect::<Result<Vec<_>>>()?
            }
        };
        let defaults =
            ExpertDefaults { experts: 64, chosen: 4, width: 1536, scale: 1.8, groups: [1, 1], dense: 1 };
        experts.apply(config, &mut decoder, defaults, Some(&are_mixtures))?;
        Ok(Box::new(decoder))
    }
}
