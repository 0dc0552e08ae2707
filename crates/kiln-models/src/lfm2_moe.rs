//! LFM2 with mixtures of experts (Liquid AI, 2025; transformers' `Lfm2MoeForCausalLM`), which are chosen by
//! the sigmoid of their logits and a bias.

use kiln_core::Result;
use kiln_kernels::Scores;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::Defaults,
    lfm2::{PROJECTIONS, hybrid},
    nn::experts::{ExpertNames, ExpertsConfig, RouterConfig},
};

#[derive(Debug)]
pub(crate) struct Lfm2Moe;

/// Fields of `config.json` in addition to those of LFM2.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    moe_intermediate_size: Option<usize>,
    num_dense_layers: Option<usize>,
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    use_expert_bias: Option<bool>,
    routed_scaling_factor: Option<f64>,
    norm_topk_prob: Option<bool>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 128_000, eps: 1e-5, tied: true };

impl Architecture for Lfm2Moe {
    fn model_type(&self) -> &'static str {
        "lfm2_moe"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let mut decoder = hybrid(config, DEFAULTS)?;
        let [gate, up, down] = PROJECTIONS;
        let scale = fields.routed_scaling_factor.unwrap_or(1.0);
        let experts = ExpertsConfig {
            experts: fields.num_experts.unwrap_or(32),
            chosen: fields.num_experts_per_tok.unwrap_or(4),
            intermediate: fields.moe_intermediate_size.unwrap_or(1792),
            router: RouterConfig {
                scores: Scores::Sigmoid,
                correction: fields.use_expert_bias.unwrap_or(true).then_some("expert_bias"),
                scale: config.positive("routed_scaling_factor", scale)? as f32,
                ..RouterConfig::softmax(fields.norm_topk_prob.unwrap_or(true))
            },
            names: ExpertNames { gate: Some(gate), up, down, ..ExpertNames::new("gate") },
            ..ExpertsConfig::default()
        };
        experts.check(config, "num_experts")?;
        let dense = fields.num_dense_layers.unwrap_or(2);
        decoder.set_experts(experts, |i| i >= dense);
        Ok(Box::new(decoder))
    }
}
