//! BERT (Devlin et al., 2018, <https://arxiv.org/abs/1810.04805>; transformers' `BertModel`): an encoder of
//! text with learned positions, types of tokens, and norms of sums. Heads for tasks are not read.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults},
    nn::{
        attention::AttentionConfig,
        block::{BlockConfig, FeedForwardConfig, MixerConfig},
        decoder::{DecoderConfig, TextEncoderConfig},
        mlp::{self, MlpConfig},
        names::{Names, NormNames},
        norm::NormKind,
    },
};

#[derive(Debug)]
pub(crate) struct Bert;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    layer_norm_eps: Option<f64>,
    type_vocab_size: Option<usize>,
    position_embedding_type: Option<String>,
    is_decoder: bool,
    add_cross_attention: bool,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: None, head_dim: None, positions: 512, eps: 1e-12, tied: true };

/// Names of parts in folders, and their names here.
const ALIASES: [(&str, &str); 7] = [
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("attention.self.query.", "attention.q_proj."),
    ("attention.self.key.", "attention.k_proj."),
    ("attention.self.value.", "attention.v_proj."),
    ("attention.output.dense.", "attention.o_proj."),
    ("attention.output.LayerNorm.", "attention_norm."),
];

impl Architecture for Bert {
    fn model_type(&self) -> &'static str {
        "bert"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        if fields.is_decoder || fields.add_cross_attention {
            let why = "asks for a decoder (`is_decoder`, `add_cross_attention`); BERT is an encoder here";
            return Err(config.error(why));
        }
        if let Some(kind) = fields.position_embedding_type.filter(|kind| kind != "absolute") {
            let why = format!("`position_embedding_type` is `{kind}`; positions can only be `absolute`");
            return Err(config.error(&why));
        }
        let sizes = [
            ("vocab_size", 30_522),
            ("hidden_size", 768),
            ("num_hidden_layers", 12),
            ("num_attention_heads", 12),
            ("intermediate_size", 3072),
        ];
        let config = config.without(&["num_key_value_heads", "head_dim"]);
        let config = &sizes.iter().fold(config, |config, (name, size)| config.or(name, *size));
        let sizes = Common::read(config, DEFAULTS)?.sizes;
        let type_count = fields.type_vocab_size.unwrap_or(2);
        config.check("type_vocab_size", type_count, 1 << 16)?;
        let eps = config.positive("layer_norm_eps", fields.layer_norm_eps.unwrap_or(DEFAULTS.eps))?;
        let attention = AttentionConfig {
            bidirectional: true,
            qkv_bias: true,
            o_bias: true,
            ..AttentionConfig::new(&sizes)
        };
        let block = BlockConfig {
            feed_forward: Some(FeedForwardConfig::Plain(["intermediate.dense", "output.dense"])),
            ..BlockConfig::alone(MixerConfig::Attention(attention))
        };
        let activation = fields.hidden_act.as_deref().unwrap_or("gelu");
        let activation = mlp::activation(config, "hidden_act", Some(activation))?;
        let mut encoder = DecoderConfig::without_ropes(sizes, NormKind::Layer { eps, bias: true });
        encoder.blocks = vec![block; encoder.sizes.layers];
        encoder.mlp = MlpConfig { bias: true, activation, ..MlpConfig::new(&encoder.sizes) };
        encoder.learned_positions = Some(encoder.sizes.positions);
        encoder.text_encoder = Some(TextEncoderConfig {
            norm: "embeddings.LayerNorm",
            types: "embeddings.token_type_embeddings",
            type_count,
        });
        encoder.names = Names {
            model: "bert",
            embeddings: "embeddings.word_embeddings",
            positions: "embeddings.position_embeddings",
            layers: "encoder.layer",
            attention: "attention",
            norms: NormNames {
                before_mixer: None,
                after_mixer: Some("attention_norm"),
                before_feed_forward: None,
                after_feed_forward: Some("output.LayerNorm"),
            },
            aliases: &ALIASES,
            ..Names::default()
        };
        Ok(Box::new(encoder))
    }
}
