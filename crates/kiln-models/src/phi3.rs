//! Phi-3 and Phi-4 (Abdin et al., 2024; transformers' `Phi3ForCausalLM`): Llama with one matrix for the input
//! projections of attention, and one for those of the feed-forward block; rotary positions on a fraction of
//! each head, stretched by `longrope`; and a window, if the config asks for one.
//!
//! When a sequence grows beyond the trained length, `longrope` switches to other frequencies. transformers'
//! `generate()` then drops the cache and feeds everything again. Here cached keys keep their frequencies, as
//! they do when transformers' `forward` is called token by token.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, rope::RopeParameters},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Phi3;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    original_max_position_embeddings: Option<usize>,
    sliding_window: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 4096, eps: 1e-5, tied: false };

impl Architecture for Phi3 {
    fn model_type(&self) -> &'static str {
        "phi3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = fields.sliding_window;
        let windows = windows(config, common.sizes.layers, window, None, |_| window.is_some())?;
        let mut rope = RopeParameters::read(config)?;
        // Old names of `longrope`.
        if matches!(rope.kind(), "su" | "yarn") {
            rope.rope_type = Some("longrope".to_owned());
        }
        // The field outside the rope parameters takes precedence, even if it has only its default.
        rope.original_max_position_embeddings = Some(fields.original_max_position_embeddings.unwrap_or(4096));
        let rope = Rope::new(config, &rope, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.attention_mut().for_each(|attention| attention.fused = Some("qkv_proj"));
        decoder.mlp.fused = true;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
