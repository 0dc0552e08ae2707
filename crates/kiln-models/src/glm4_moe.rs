//! GLM-4.5, 4.6 and 4.7 (Zhipu AI, 2025, <https://arxiv.org/abs/2508.06471>; transformers'
//! `Glm4MoeForCausalLM`): rotary positions on half of each head, norms on each head of queries and keys if
//! the config asks for them, and mixtures of experts that are chosen by the sigmoid of their logits and a
//! bias, from the best groups, beside one that all tokens use.

use kiln_core::Result;
use kiln_kernels::{Groups, Scores};
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        mlp,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct Glm4Moe;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    use_qk_norm: bool,
}

/// Fields of the experts of GLM and DeepSeek.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SigmoidExperts {
    n_routed_experts: Option<usize>,
    /// Another name for `n_routed_experts`.
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    n_shared_experts: Option<usize>,
    routed_scaling_factor: Option<f64>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    norm_topk_prob: Option<bool>,
    first_k_dense_replace: Option<usize>,
}

/// Numbers of experts that a config leaves out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertDefaults {
    pub(crate) experts: usize,
    pub(crate) chosen: usize,
    pub(crate) width: usize,
    pub(crate) scale: f64,
    pub(crate) groups: [usize; 2],
    pub(crate) dense: usize,
}

impl SigmoidExperts {
    /// Makes feed-forwards mixtures: those of the blocks that `are_mixtures` marks, or of all but the first
    /// ones.
    pub(crate) fn apply(
        &self,
        config: &ConfigFile,
        decoder: &mut DecoderConfig,
        defaults: ExpertDefaults,
        are_mixtures: Option<&[bool]>,
    ) -> Result<()> {
        let width = self.moe_intermediate_size.unwrap_or(defaults.width);
        config.check("moe_intermediate_size", width, 1 << 24)?;
        let shared = self.n_shared_experts.unwrap_or(1);
        let shared =
            SharedConfig { width: width.saturating_mul(shared), name: "shared_experts", gated: false };
        let scale = self.routed_scaling_factor.unwrap_or(defaults.scale);
        let [groups, chosen] = defaults.groups;
        let (groups, chosen) = (self.n_group.unwrap_or(groups), self.topk_group.unwrap_or(chosen));
        let experts = ExpertsConfig {
            experts: self.num_local_experts.or(self.n_routed_experts).unwrap_or(defaults.experts),
            chosen: self.num_experts_per_tok.unwrap_or(defaults.chosen),
            intermediate: width,
            shared: Some(shared).filter(|shared| shared.width > 0),
            router: RouterConfig {
                scores: Scores::Sigmoid,
                float32: true,
                normalised: self.norm_topk_prob.unwrap_or(true),
                correction: Some("gate.e_score_correction_bias"),
                groups: ([groups, chosen] != [1, 1]).then_some(Groups { groups, chosen, best: 2 }),
                scale: config.positive("routed_scaling_factor", scale)? as f32,
                ..RouterConfig::softmax(true)
            },
            names: ExpertNames::new("gate"),
            ..ExpertsConfig::default()
        };
        experts.check(config, "n_routed_experts")?;
        let dense = self.first_k_dense_replace.unwrap_or(defaults.dense);
        decoder.set_experts(experts, |i| match are_mixtures {
            Some(blocks) => blocks.get(i) == Some(&true),
            None => i >= dense,
        });
        Ok(())
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 131_072, eps: 1e-5, tied: false };

impl Architecture for Glm4Moe {
    fn model_type(&self) -> &'static str {
        "glm4_moe"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let experts: SigmoidExperts = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let parameters = RopeParameters::read(config)?.or(1e4, 0.5);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        for attention in decoder.attention_mut() {
            attention.qkv_bias = fields.attention_bias;
            attention.head_norms = fields.use_qk_norm.then_some(HeadNorms::PerHead(QK_NORMS));
        }
        let defaults =
            ExpertDefaults { experts: 128, chosen: 8, width: 1408, scale: 1.0, groups: [1, 1], dense: 1 };
        experts.apply(config, &mut decoder, defaults, None)?;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
