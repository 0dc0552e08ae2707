//! GPT-2 (Radford et al., 2019; transformers' `GPT2LMHeadModel`): learned positions, LayerNorms, biases, a
//! feed-forward without a gate, and matrices that are stored as `[in, out]`.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults},
    nn::{
        attention::AttentionConfig,
        block::{BlockConfig, FeedForwardConfig, MixerConfig},
        decoder::DecoderConfig,
        mlp::{self, MlpConfig},
        names::{Names, NormNames},
        norm::NormKind,
    },
};

#[derive(Debug)]
pub(crate) struct Gpt2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    n_inner: Option<usize>,
    activation_function: Option<String>,
    layer_norm_epsilon: Option<f64>,
    scale_attn_weights: Option<bool>,
    scale_attn_by_inverse_layer_idx: bool,
    add_cross_attention: bool,
}

/// Names of fields here, and the names that other models have for them. Both are read.
const ALIASES: [(&str, &str); 4] = [
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_positions", "max_position_embeddings"),
];

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 1024, eps: 1e-5, tied: true };

impl Architecture for Gpt2 {
    fn model_type(&self) -> &'static str {
        "gpt2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        if fields.add_cross_attention {
            return Err(config.error("`add_cross_attention` asks for an encoder, which GPT-2 has not here"));
        }
        let config = config.with_aliases(&ALIASES)?.without(&["num_key_value_heads", "head_dim"]);
        let sizes = [("hidden_size", 768), ("num_hidden_layers", 12), ("num_attention_heads", 12)];
        let config = sizes.iter().fold(config, |config, (name, size)| config.or(name, *size));
        let hidden = config.get("hidden_size").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let inner = fields.n_inner.map_or(hidden.saturating_mul(4), |inner| inner as u64);
        let config = &config.with("intermediate_size", inner.into());
        let common = Common::read(config, DEFAULTS)?;
        let name = "layer_norm_epsilon";
        let eps = config.positive(name, fields.layer_norm_epsilon.unwrap_or(DEFAULTS.eps))?;
        let sizes = common.sizes;
        let attention = AttentionConfig {
            fused: Some("c_attn"),
            o_name: "c_proj",
            qkv_bias: true,
            o_bias: true,
            ..AttentionConfig::new(&sizes)
        };
        let scaled = if fields.scale_attn_weights.unwrap_or(true) { attention.scale } else { 1.0 };
        let scale = |i: usize| match fields.scale_attn_by_inverse_layer_idx {
            true => scaled / (i + 1) as f64,
            false => scaled,
        };
        let block = |i| BlockConfig {
            feed_forward: Some(FeedForwardConfig::Plain(["mlp.c_fc", "mlp.c_proj"])),
            ..BlockConfig::alone(MixerConfig::Attention(AttentionConfig { scale: scale(i), ..attention }))
        };
        let activation = fields.activation_function.as_deref().unwrap_or("gelu_new");
        let activation = mlp::activation(config, "activation_function", Some(activation))?;
        let mut decoder = DecoderConfig::without_ropes(sizes, NormKind::Layer { eps, bias: true });
        decoder.blocks = (0..decoder.sizes.layers).map(block).collect();
        decoder.mlp = MlpConfig { bias: true, activation, ..MlpConfig::new(&decoder.sizes) };
        decoder.learned_positions = Some(decoder.sizes.positions);
        decoder.names = Names {
            model: "transformer",
            embeddings: "wte",
            positions: "wpe",
            layers: "h",
            norm: "ln_f",
            norms: NormNames::before("ln_1", "ln_2"),
            attention: "attn",
            transposed: &["c_attn.weight", "c_proj.weight", "c_fc.weight"],
            ..Names::default()
        };
        Ok(Box::new(decoder))
    }
}
