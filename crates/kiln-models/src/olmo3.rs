//! OLMo 3 (OLMo Team, 2025; transformers' `Olmo3ForCausalLM`): OLMo 2 with three blocks with a window for
//! each block without, and separate rotary positions in the blocks with a window.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, config::Common, nn::rope::LayerRopes, olmo2, windows::windows,
};

#[derive(Debug)]
pub(crate) struct Olmo3;

/// Fields of `config.json` in addition to those of OLMo 2.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// In old configs, the rotary base of blocks without a window.
    rope_theta: Option<f64>,
}

const THETA: f64 = 5e5;

impl Architecture for Olmo3 {
    fn model_type(&self) -> &'static str {
        "olmo3"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let olmo2: olmo2::Fields = config.parse()?;
        let fields: Fields = config.parse()?;
        let common = Common::read(config, olmo2::DEFAULTS)?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(4096));
        let sliding = |i: usize| !(i + 1).is_multiple_of(4);
        let windows = windows(config, common.sizes.layers, window, fields.layer_types.as_deref(), sliding)?;
        // Old configs have no base for blocks with a window.
        let thetas = [fields.rope_theta.unwrap_or(THETA), THETA];
        let ropes = LayerRopes::read(config)?.ropes(
            config,
            [common.sizes.head_dim; 2],
            common.sizes.positions,
            thetas,
        )?;
        let mut decoder = olmo2.decoder(config, common, ropes)?;
        decoder.set_windows(windows);
        Ok(Box::new(decoder))
    }
}
