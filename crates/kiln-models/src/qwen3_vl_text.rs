//! The text model of Qwen3-VL (Qwen Team, 2025; transformers' `Qwen3VLTextModel`): Qwen3 without windows. For
//! text, its multimodal rotary positions are plain ones.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        decoder::DecoderConfig,
        mlp,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct Qwen3VlText;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    attention_bias: bool,
    hidden_act: Option<String>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(32), head_dim: Some(128), positions: 128_000, eps: 1e-6, tied: true };

impl Architecture for Qwen3VlText {
    fn model_type(&self) -> &'static str {
        "qwen3_vl_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let Fields { attention_bias, hidden_act } = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let parameters = RopeParameters::read(config)?.of_text(5e5);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder
            .attention_mut()
            .for_each(|attention| attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS)));
        decoder.set_attention_bias(attention_bias);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}
