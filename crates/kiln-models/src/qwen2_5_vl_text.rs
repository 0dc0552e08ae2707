//! The text model of Qwen2.5-VL (Bai et al., 2025; transformers' `Qwen2_5_VLTextModel`): Qwen2 with other
//! defaults. For text, its multimodal rotary positions are plain ones.

use kiln_core::Result;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::rope::RopeParameters,
    qwen2,
};

#[derive(Debug)]
pub(crate) struct Qwen25VlText;

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 32768, eps: 1e-5, tied: true };

impl Architecture for Qwen25VlText {
    fn model_type(&self) -> &'static str {
        "qwen2_5_vl_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: qwen2::Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let parameters = RopeParameters::read(config)?.of_text(1e6);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = fields.decoder(config, common, rope, 80)?;
        decoder.attention_mut().for_each(|attention| attention.qkv_bias = true);
        Ok(Box::new(decoder))
    }
}
