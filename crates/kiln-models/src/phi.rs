//! Phi-1, Phi-1.5 and Phi-2 (Li et al., 2023; transformers' `PhiForCausalLM`): parallel blocks with one
//! LayerNorm, biases everywhere, a feed-forward without a gate, and rotary positions on half of each head.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::HeadNorms,
        block::FeedForwardConfig,
        decoder::DecoderConfig,
        mlp,
        names::{Names, NormNames},
        norm::NormKind,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct Phi;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    qk_layernorm: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-5, tied: false };

impl Architecture for Phi {
    fn model_type(&self) -> &'static str {
        "phi"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let eps = config.positive("layer_norm_eps", fields.layer_norm_eps.unwrap_or(DEFAULTS.eps))?;
        let parameters = RopeParameters::read(config)?.or(1e4, 0.5);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.norm = NormKind::Layer { eps, bias: true };
        decoder.names = Names {
            norm: "final_layernorm",
            norms: NormNames { before_feed_forward: None, ..decoder.names.norms },
            ..decoder.names
        };
        decoder.parallel = true;
        decoder.head_bias = true;
        decoder.set_attention_bias(true);
        for attention in decoder.attention_mut() {
            attention.o_name = "dense";
            attention.head_norms =
                fields.qk_layernorm.then_some(HeadNorms::PerHead(["q_layernorm", "k_layernorm"]));
        }
        decoder.set_feed_forward(FeedForwardConfig::Plain(["mlp.fc1", "mlp.fc2"]));
        decoder.mlp.bias = true;
        let activation = fields.hidden_act.as_deref().unwrap_or("gelu_new");
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(activation))?;
        Ok(Box::new(decoder))
    }
}
