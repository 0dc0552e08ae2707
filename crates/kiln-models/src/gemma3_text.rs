//! Gemma 3's language model (Gemma Team, 2025; transformers' `Gemma3ForCausalLM`): Gemma 2 with norms on each
//! head of queries and keys, five blocks with a window for each block without, and separate rotary positions
//! in the blocks with a window.
//!
//! `attn_logit_softcapping` is a field of its config that neither transformers' attention nor Kiln uses.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults},
    gemma2,
    nn::{
        attention::{HeadNorms, QK_NORMS, Reach},
        decoder::DecoderConfig,
        rope::LayerRopes,
    },
};

#[derive(Debug)]
pub(crate) struct Gemma3Text;

/// Fields of `config.json` in addition to those of Gemma 2.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    /// In old configs, the period of blocks with full attention; all other blocks have a window.
    sliding_window_pattern: Option<usize>,
    /// In old configs, the rotary base of blocks with a window; `rope_theta` is that of the other blocks.
    rope_local_base_freq: Option<f64>,
    rope_theta: Option<f64>,
    /// Whether tokens see later ones, as in EmbeddingGemma.
    use_bidirectional_attention: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: Some(256), positions: 131_072, eps: 1e-6, tied: true };

impl Architecture for Gemma3Text {
    fn model_type(&self) -> &'static str {
        "gemma3_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let gemma2: gemma2::Fields = config.parse()?;
        let fields: Fields = config.parse()?;
        let config = &config.without(&["use_bidirectional_attention"]);
        let common = Common::read(config, DEFAULTS)?;
        let pattern = fields.sliding_window_pattern.unwrap_or(6);
        config.check("sliding_window_pattern", pattern, usize::MAX)?;
        let positions = common.sizes.positions;
        let thetas = [fields.rope_theta.unwrap_or(1e6), fields.rope_local_base_freq.unwrap_or(1e4)];
        let ropes = LayerRopes::read(config)?.ropes(
            config,
            [common.sizes.head_dim; 2],
            common.sizes.positions,
            thetas,
        )?;
        let decoder = DecoderConfig::gemma(common, ropes);
        let mut decoder = gemma2.decoder(config, decoder, |i| !(i + 1).is_multiple_of(pattern), None)?;
        // The config has the stretched number of positions, whatever the type of rope.
        decoder.sizes.positions = positions;
        for attention in decoder.attention_mut() {
            attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS));
            attention.bidirectional = fields.use_bidirectional_attention;
            if let (true, Reach::Window(window)) = (attention.bidirectional, attention.reach) {
                // Half of the window is before a token, and half after it.
                attention.reach = Reach::Window(window / 2 + 1);
            }
        }
        Ok(Box::new(decoder))
    }
}
