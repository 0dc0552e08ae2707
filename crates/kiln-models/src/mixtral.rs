//! Mixtral (Jiang et al., 2024; transformers' `MixtralForCausalLM`): Mistral with a mixture of experts in
//! every block, and a window only if the config asks for one.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig},
        mlp,
        rope::RopeParameters,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Mixtral;

/// Fields of `config.json` in addition to those of every decoder, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: String,
    sliding_window: Option<usize>,
    num_local_experts: usize,
    /// Another name for `num_local_experts`; takes precedence if both are present.
    num_experts: Option<usize>,
    num_experts_per_tok: usize,
}

impl Default for Fields {
    fn default() -> Self {
        let hidden_act = "silu".to_owned();
        Self {
            hidden_act,
            sliding_window: None,
            num_local_experts: 8,
            num_experts: None,
            num_experts_per_tok: 2,
        }
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 131_072, eps: 1e-5, tied: false };

impl Architecture for Mixtral {
    fn model_type(&self) -> &'static str {
        "mixtral"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = fields.sliding_window;
        let windows = windows(config, common.sizes.layers, window, None, |_| window.is_some())?;
        let mut parameters = RopeParameters::read(config)?;
        parameters.rope_theta.get_or_insert(1e6);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let experts = ExpertsConfig {
            experts: fields.num_experts.unwrap_or(fields.num_local_experts),
            chosen: fields.num_experts_per_tok,
            intermediate: common.sizes.intermediate,
            names: ExpertNames { gate: Some("w1"), up: "w3", down: "w2", ..ExpertNames::new("gate") },
            router: RouterConfig::softmax(true),
            ..ExpertsConfig::default()
        };
        experts.check(config, "num_local_experts")?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.set_experts(experts, |_| true);
        decoder.names.feed_forward = "block_sparse_moe";
        decoder.names.aliases = &[(".mlp.", ".block_sparse_moe.")];
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(&fields.hidden_act))?;
        Ok(Box::new(decoder))
    }
}
