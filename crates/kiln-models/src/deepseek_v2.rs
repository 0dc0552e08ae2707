//! DeepSeek-V2 (DeepSeek-AI, 2024, <https://arxiv.org/abs/2405.04434>; transformers'
//! `DeepseekV2ForCausalLM`): latent attention, and mixtures of experts that are chosen by the softmax of
//! their logits, of all or from the best groups, beside experts that all tokens use.

use kiln_core::Result;
use kiln_kernels::{Groups, Scores};
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::Defaults,
    deepseek_v3::{LatentDefaults, latent},
    nn::experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
};

#[derive(Debug)]
pub(crate) struct DeepseekV2;

/// Fields of `config.json` in addition to those of latent attention.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    mlp_bias: bool,
    n_routed_experts: Option<usize>,
    /// Another name for `n_routed_experts`.
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    n_shared_experts: Option<usize>,
    routed_scaling_factor: Option<f64>,
    topk_method: Option<String>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    first_k_dense_replace: usize,
}

const DEFAULTS: LatentDefaults = LatentDefaults {
    common: Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-6, tied: false },
    query_rank: 1536,
    key_dim: 128,
    value_dim: 128,
};

impl Architecture for DeepseekV2 {
    fn model_type(&self) -> &'static str {
        "deepseek_v2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        // The rotation has only one order.
        let mut decoder = latent(&config.without(&["rope_interleave"]), DEFAULTS)?;
        decoder.mlp.bias = fields.mlp_bias;
        let Some(chosen) = fields.num_experts_per_tok else {
            return Err(config.error("`num_experts_per_tok` is missing"));
        };
        let groups = match fields.topk_method.as_deref().unwrap_or("greedy") {
            "greedy" => None,
            "group_limited_greedy" => {
                let (Some(groups), Some(chosen)) = (fields.n_group, fields.topk_group) else {
                    return Err(config.error("`n_group` or `topk_group` is missing"));
                };
                Some(Groups { groups, chosen, best: 1 })
            }
            other => {
                let why = format!("`topk_method` is `{other}`; known: greedy, group_limited_greedy");
                return Err(config.error(&why));
            }
        };
        let width = fields.moe_intermediate_size.unwrap_or(1407);
        config.check("moe_intermediate_size", width, 1 << 24)?;
        let shared = width.saturating_mul(fields.n_shared_experts.unwrap_or(2));
        let shared = SharedConfig { width: shared, name: "shared_experts", gated: false };
        let scale = fields.routed_scaling_factor.unwrap_or(1.0);
        let experts = ExpertsConfig {
            experts: fields.num_experts.or(fields.n_routed_experts).unwrap_or(64),
            chosen,
            intermediate: width,
            shared: Some(shared).filter(|shared| shared.width > 0),
            router: RouterConfig {
                scores: Scores::Softmax,
                float32: true,
                groups,
                scale: config.positive("routed_scaling_factor", scale)? as f32,
                ..RouterConfig::softmax(false)
            },
            names: ExpertNames::new("gate"),
            ..ExpertsConfig::default()
        };
        experts.check(config, "n_routed_experts")?;
        decoder.set_experts(experts, |i| i >= fields.first_k_dense_replace);
        Ok(Box::new(decoder))
    }
}
