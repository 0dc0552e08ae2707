//! Qwen3 with mixtures of experts (Yang et al., 2025; transformers' `Qwen3MoeForCausalLM`): Qwen3 with
//! mixtures as feed-forwards in the blocks that the config selects, and with the window, if there is one, on
//! all blocks.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig},
        mlp,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Qwen3Moe;

/// Fields of `config.json` in addition to those of every decoder, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: String,
    attention_bias: bool,
    use_sliding_window: bool,
    sliding_window: Option<usize>,
    decoder_sparse_step: usize,
    mlp_only_layers: Option<Vec<usize>>,
    moe_intermediate_size: usize,
    num_experts_per_tok: usize,
    num_experts: Option<usize>,
    /// Name of `num_experts` in transformers 5; takes precedence if both are present.
    num_local_experts: Option<usize>,
    norm_topk_prob: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            hidden_act: "silu".to_owned(),
            attention_bias: false,
            use_sliding_window: false,
            sliding_window: None,
            decoder_sparse_step: 1,
            mlp_only_layers: None,
            moe_intermediate_size: 768,
            num_experts_per_tok: 8,
            num_experts: None,
            num_local_experts: None,
            norm_topk_prob: false,
        }
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: None, positions: 32768, eps: 1e-6, tied: false };

impl Architecture for Qwen3Moe {
    fn model_type(&self) -> &'static str {
        "qwen3_moe"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let window = window.filter(|_| fields.use_sliding_window);
        let windows = windows(config, common.sizes.layers, window, None, |_| window.is_some())?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder
            .attention_mut()
            .for_each(|attention| attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS)));
        decoder.set_attention_bias(fields.attention_bias);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(&fields.hidden_act))?;
        // Without experts, all blocks are dense.
        let experts = fields.num_local_experts.or(fields.num_experts).unwrap_or(128);
        if experts > 0 {
            let experts = ExpertsConfig {
                experts,
                chosen: fields.num_experts_per_tok,
                intermediate: fields.moe_intermediate_size,
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
