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
    /// Number of rotated dimensions.
    head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
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
        let Fields { head_dim, qk_rope_head_dim } = config.parse()?;
        let mut decoder = latent(config, DEFAULTS)?;
        let rotated = qk_rope_head_dim.unwrap_or(64);
        if let Some(other) = head_dim.filter(|size| *size != rotated) {
            let why = format!("`head_dim` is {other}, and `qk_rope_head_dim` {rotated}; both are rotated");
            return Err(config.error(&why));
        }
        let are_mixtures = config.marks("mlp_layer_types", decoder.blocks.len(), ["sparse", "dense"])?;
        let defaults =
            ExpertDefaults { experts: 64, chosen: 4, width: 1536, scale: 1.8, groups: [1, 1], dense: 1 };
        let config = &config.without(&["first_k_dense_replace"]);
        let experts: SigmoidExperts = config.parse()?;
        experts.apply(config, &mut decoder, defaults, are_mixtures.as_deref())?;
        Ok(Box::new(decoder))
    }
}
