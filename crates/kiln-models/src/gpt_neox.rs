//! GPT-NeoX and Pythia (Black et al., 2022; transformers' `GPTNeoXForCausalLM`): parallel blocks with two
//! LayerNorms, biases, a feed-forward without a gate, rotary positions on a part of each head, and one matrix
//! for queries, keys and values, head by head.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        block::FeedForwardConfig,
        decoder::DecoderConfig,
        mlp,
        names::{ByHead, Names},
        norm::NormKind,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct GptNeoX;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    use_parallel_residual: Option<bool>,
    attention_bias: Option<bool>,
    /// Old names of the rotary base, and of the rotated part of each head.
    rotary_emb_base: Option<f64>,
    rotary_pct: Option<f64>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 2048, eps: 1e-5, tied: false };

impl Architecture for GptNeoX {
    fn model_type(&self) -> &'static str {
        "gpt_neox"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(&config.without(&["num_key_value_heads", "head_dim"]), DEFAULTS)?;
        let eps = config.positive("layer_norm_eps", fields.layer_norm_eps.unwrap_or(DEFAULTS.eps))?;
        let (base, part) = (fields.rotary_emb_base.unwrap_or(1e4), fields.rotary_pct.unwrap_or(0.25));
        let parameters = RopeParameters::read(config)?.or(base, part);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.norm = NormKind::Layer { eps, bias: true };
        decoder.names = Names {
            model: "gpt_neox",
            embeddings: "embed_in",
            norm: "final_layer_norm",
            attention: "attention",
            aliases: &[("embed_out.", "lm_head.")],
            ..decoder.names
        };
        let head_dim = decoder.sizes.head_dim;
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| (part, head_dim));
        let by_head = ByHead::new(decoder.sizes.heads, parts);
        decoder.by_head =
            ["query_key_value.weight", "query_key_value.bias"].map(|end| (end, by_head.clone())).into();
        decoder.parallel = fields.use_parallel_residual.unwrap_or(true);
        decoder.set_attention_bias(fields.attention_bias.unwrap_or(true));
        decoder.attention_mut().for_each(|attention| attention.o_name = "dense");
        decoder.set_feed_forward(FeedForwardConfig::Plain(["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]));
        decoder.mlp.bias = true;
        let activation = fields.hidden_act.as_deref().unwrap_or("gelu");
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(activation))?;
        Ok(Box::new(decoder))
    }
}
