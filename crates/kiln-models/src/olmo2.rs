//! OLMo 2 (OLMo Team, 2024; transformers' `Olmo2ForCausalLM`): Llama with norms after attention and
//! feed-forward instead of before, and a norm on all queries and on all keys of a token.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope, Ropes,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        decoder::DecoderConfig,
        mlp,
        names::NormNames,
    },
};

#[derive(Debug)]
pub(crate) struct Olmo2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
}

pub(crate) const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-5, tied: false };

impl Architecture for Olmo2 {
    fn model_type(&self) -> &'static str {
        "olmo2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        Ok(Box::new(fields.decoder(config, common, rope.into())?))
    }
}

impl Fields {
    /// Returns the settings that OLMo 2 and 3 share.
    pub(crate) fn decoder(&self, config: &ConfigFile, common: Common, ropes: Ropes) -> Result<DecoderConfig> {
        let mut decoder = DecoderConfig::new(common, ropes);
        decoder.names.norms = NormNames::AFTER;
        decoder.attention_mut().for_each(|attention| attention.head_norms = Some(HeadNorms::Whole(QK_NORMS)));
        decoder.set_attention_bias(self.attention_bias);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", self.hidden_act.as_deref())?;
        Ok(decoder)
    }
}
