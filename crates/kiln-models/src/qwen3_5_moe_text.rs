//! The text model of Qwen 3.5 and 3.6 with mixtures of experts (Qwen Team, 2026; transformers'
//! `Qwen3_5MoeForCausalLM`).

use kiln_core::Result;

use crate::{
    Architecture, ConfigFile, Configured,
    config::Defaults,
    qwen3_next::{hybrid, set_experts},
};

#[derive(Debug)]
pub(crate) struct Qwen35MoeText;

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(2), head_dim: Some(256), positions: 32_768, eps: 1e-6, tied: false };

/// Fields of other models, which are ignored as Transformers ignores them.
const UNKNOWN: [&str; 3] = ["norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"];

impl Architecture for Qwen35MoeText {
    fn model_type(&self) -> &'static str {
        "qwen3_5_moe_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        // No feed-forward is dense, so the width is that of the experts.
        let width = config.get("moe_intermediate_size").cloned().unwrap_or_else(|| 512.into());
        let config = config.without(&UNKNOWN).with("intermediate_size", width);
        let (mut decoder, _) = hybrid(&config, DEFAULTS)?;
        set_experts(&config, &mut decoder, [256, 8])?;
        Ok(Box::new(decoder))
    }
}
