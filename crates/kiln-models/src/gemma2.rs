//! Gemma 2 (Gemma Team, 2024; transformers' `Gemma2ForCausalLM`): Gemma with norms before and after attention
//! and feed-forward, soft caps on scores and logits, a separate scale for queries, and a window on every
//! other block.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{decoder::DecoderConfig, mlp, names::NormNames},
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Gemma2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    hidden_activation: Option<String>,
    attention_bias: bool,
    query_pre_attn_scalar: Option<f64>,
    attn_logit_softcapping: Option<f64>,
    final_logit_softcapping: Option<f64>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: Some(256), positions: 8192, eps: 1e-6, tied: true };

impl Architecture for Gemma2 {
    fn model_type(&self) -> &'static str {
        "gemma2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder =
            fields.decoder(config, DecoderConfig::gemma(common, rope.into()), |i| i % 2 == 0, Some(30.0))?;
        let softcap = config.positive_unless_null(
            "attn_logit_softcapping",
            fields.attn_logit_softcapping,
            Some(50.0),
        )?;
        decoder.attention_mut().for_each(|attention| attention.softcap = softcap);
        Ok(Box::new(decoder))
    }
}

impl Fields {
    /// Adds to `decoder` the settings that Gemma 2 and 3 share. If the config does not say, `sliding` decides
    /// which blocks have a window, and the logits' cap is `final_softcap`.
    pub(crate) fn decoder(
        &self,
        config: &ConfigFile,
        mut decoder: DecoderConfig,
        sliding: impl Fn(usize) -> bool,
        final_softcap: Option<f64>,
    ) -> Result<DecoderConfig> {
        let window = config.unless_null("sliding_window", self.sliding_window, Some(4096));
        let layers = decoder.sizes.layers;
        decoder.set_windows(windows(config, layers, window, self.layer_types.as_deref(), sliding)?);
        decoder.names.norms = NormNames::AROUND;
        // Gemma 2 and 3 were trained in bfloat16, and their residuals reach beyond 65,504.
        decoder.fits_float16 = false;
        decoder.set_attention_bias(self.attention_bias);
        let scalar = self.query_pre_attn_scalar.unwrap_or(256.0);
        let scale = config.positive("query_pre_attn_scalar", scalar)?.powf(-0.5);
        decoder.attention_mut().for_each(|attention| attention.scale = scale);
        decoder.final_softcap = config.positive_unless_null(
            "final_logit_softcapping",
            self.final_logit_softcapping,
            final_softcap,
        )?;
        let activation = self.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh");
        decoder.mlp.activation = mlp::activation(config, "hidden_activation", Some(activation))?;
        Ok(decoder)
    }
}
