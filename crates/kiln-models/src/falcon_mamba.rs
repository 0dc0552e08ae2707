//! Falcon Mamba (Zuo et al., 2024; transformers' `FalconMambaForCausalLM`): Mamba with weightless norms of
//! the time steps and of the vectors that enter and leave the state (`B` and `C`).

use kiln_core::Result;
use serde::Deserialize;

use crate::{Architecture, ConfigFile, Configured, mamba, nn::mamba::MixerNorms};

#[derive(Debug)]
pub(crate) struct FalconMamba;

/// Fields of `config.json` in addition to those of Mamba.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    mixer_rms_eps: Option<f64>,
}

impl Architecture for FalconMamba {
    fn model_type(&self) -> &'static str {
        "falcon_mamba"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let mamba: mamba::Fields = config.parse()?;
        let Fields { mixer_rms_eps } = config.parse()?;
        let eps = config.positive("mixer_rms_eps", mixer_rms_eps.unwrap_or(1e-6))?;
        Ok(Box::new(mamba.decoder(config, MixerNorms::Plain(eps))?))
    }
}
