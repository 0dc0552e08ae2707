//! Qwen2 with mixtures of experts (Yang et al., 2024; transformers' `Qwen2MoeForCausalLM`): Qwen2 with
//! mixtures as feed-forwards in the blocks that the config selects. In addition to the experts that the
//! router chooses, each token uses a shared expert with a separate gate.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        mlp,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Qwen2Moe;

/// Fields of `config.json` in addition to those of every decoder, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: String,
    qkv_bias: bool,
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    max_window_layers: usize,
    layer_types: Option<Vec<String>>,
    decoder_sparse_step: usize,
    mlp_only_layers: Option<Vec<usize>>,
    moe_intermediate_size: usize,
    shared_expert_intermediate_size: usize,
    num_experts_per_tok: usize,
    num_experts: usize,
    norm_topk_prob: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            hidden_act: "silu".to_owned(),
            qkv_bias: true,
            use_sliding_window: false,
            sliding_window: None,
            max_window_layers: 28,
            layer_types: None,
            decoder_sparse_step: 1,
            mlp_only_layers: None,
            moe_intermediate_size: 1408,
            shared_expert_intermediate_size: 5632,
            num_experts_per_tok: 4,
            num_experts: 60,
            norm_topk_prob: false,
        }
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(16), head_dim: None, positions: 32768, eps: 1e-6, tied: false };

impl Architecture for Qwen2Moe {
    fn model_type(&self) -> &'static str {
        "qwen2_moe"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let window = window.filter(|_| fields.use_sliding_window);
        // Every other one of the lower blocks.
        let sliding = |i: usize| window.is_some() && i.is_multiple_of(2) && i < fields.max_window_layers;
        let windows = windows(config, common.sizes.layers, window, fields.layer_types.as_deref(), sliding)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.attention_mut().for_each(|attention| attention.qkv_bias = fields.qkv_bias);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(&fields.hidden_act))?;
        // Without experts, all blocks are dense.
        if fields.num_experts > 0 {
            let shared = fields.shared_expert_intermediate_size;
            config.check("shared_expert_intermediate_size", shared, 1 << 24)?;
            let experts = ExpertsConfig {
                experts: fields.num_experts,
                chosen: fields.num_experts_per_tok,
                intermediate: fields.moe_intermediate_size,
                shared: Some(SharedConfig { width: shared, name: "shared_expert", gated: true }),
                names: ExpertNames::new("gate"),
                router: RouterConfig::softmax(fields.norm_topk_prob),
                ..ExpertsConfig::default()
            };
            experts.check(config, "num_experts")?;
            let dense = fields.mlp_only_layers.unwrap_or_default();
            decoder.set_sparse_experts(config, experts, fields.decoder_sparse_step, &dense)?;
        }
        Ok(Box::new(decoder))
    }
}
