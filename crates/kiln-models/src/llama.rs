//! Llama (Touvron et al., 2023; transformers' `LlamaForCausalLM`): grouped heads, rotary positions of every kind,
//! optional biases, tied embeddings.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use kiln_core::{
    Result,
    batch::Batch,
    model::{CausalModel, Logits},
    model_cache::ModelCache,
    need::{AttentionNeed, LayerNeed},
};
use kiln_kernels::{Kernels, NormOrder};
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope, Rows, Sizes, Weights,
    nn::{
        attention::{Attention, AttentionSizes, Places},
        mlp::GatedMlp,
        norm::RmsNorm,
    },
};

#[derive(Debug)]
pub(crate) struct Llama;

impl Architecture for Llama {
    fn model_type(&self) -> &'static str {
        "llama"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        Ok(Box::new(LlamaConfig::read(config)?))
    }
}

/// The fields of `config.json`, with transformers' defaults.
#[derive(Debug, Deserialize)]
struct Fields {
    num_hidden_layers: usize,
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    #[serde(default = "default_positions")]
    max_position_embeddings: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f64,
    #[serde(default = "default_act")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
}

fn default_positions() -> usize {
    2048
}

fn default_eps() -> f64 {
    1e-6
}

fn default_act() -> String {
    "silu".to_owned()
}

#[derive(Debug)]
struct LlamaConfig {
    sizes: Sizes,
    eps: f64,
    attention_bias: bool,
    mlp_bias: bool,
    rope: Rope,
}

impl LlamaConfig {
    fn read(config: &ConfigFile) -> Result<Self> {
        let fields: Fields = config.parse()?;
        let kv_heads = fields.num_key_value_heads.unwrap_or(fields.num_attention_heads);
        // Far above any model, far below where products of two overflow.
        for (name, value, largest) in [
            ("num_hidden_layers", fields.num_hidden_layers, 4096),
            ("hidden_size", fields.hidden_size, 1 << 20),
            ("num_attention_heads", fields.num_attention_heads, 1 << 14),
            ("num_key_value_heads", kv_heads, 1 << 14),
            ("head_dim", fields.head_dim.unwrap_or(1), 1 << 14),
            ("intermediate_size", fields.intermediate_size, 1 << 24),
            ("vocab_size", fields.vocab_size, 1 << 24),
            ("max_position_embeddings", fields.max_position_embeddings, 1 << 30),
        ] {
            config.check(name, value, largest)?;
        }
        let heads = fields.num_attention_heads;
        if !heads.is_multiple_of(kv_heads) {
            return Err(config
                .error(&format!("{heads} attention heads cannot share {kv_heads} key-value heads evenly")));
        }
        let head_dim = match fields.head_dim {
            Some(head_dim) => head_dim,
            None if fields.hidden_size.is_multiple_of(heads) => fields.hidden_size / heads,
            None => {
                return Err(config.error(&format!(
                    "`hidden_size` {} is not a multiple of {heads} heads, and `head_dim` is missing",
                    fields.hidden_size
                )));
            }
        };
        if fields.hidden_act != "silu" {
            let why = format!("`hidden_act` is `{}`; known: silu", fields.hidden_act);
            return Err(config.error(&why));
        }
        if !(fields.rms_norm_eps.is_finite() && fields.rms_norm_eps > 0.0) {
            return Err(config.error(&format!("`rms_norm_eps` is {}, must be positive", fields.rms_norm_eps)));
        }
        let positions = fields.max_position_embeddings;
        let rope = Rope::read(config, head_dim, positions)?;
        Ok(Self {
            sizes: Sizes {
                layers: fields.num_hidden_layers,
                hidden: fields.hidden_size,
                heads,
                kv_heads,
                head_dim,
                intermediate: fields.intermediate_size,
                vocab: fields.vocab_size,
                positions: rope.stretched(positions),
                tied: fields.tie_word_embeddings,
            },
            eps: fields.rms_norm_eps,
            attention_bias: fields.attention_bias,
            mlp_bias: fields.mlp_bias,
            rope,
        })
    }
}

impl Configured for LlamaConfig {
    fn sizes(&self) -> Sizes {
        self.sizes.clone()
    }

    fn needs(&self) -> Vec<LayerNeed> {
        let Sizes { layers, kv_heads, head_dim, .. } = self.sizes;
        vec![
            LayerNeed::Attention(AttentionNeed {
                kv_heads,
                head_dim,
                window: None,
                rotary: Some(self.rope.need())
            });
            layers
        ]
    }

    fn rope(&self) -> Option<&Rope> {
        Some(&self.rope)
    }

    fn load(&self, weights: &mut dyn Weights, kernels: &Kernels) -> Result<Box<dyn CausalModel>> {
        let Sizes { layers, hidden, vocab, .. } = self.sizes;
        let embed_tokens = weights.rows("model.embed_tokens.weight", [vocab, hidden])?;
        let layers: Result<_> =
            (0..layers).map(|i| Block::load(weights, &format!("model.layers.{i}"), self)).collect();
        Ok(Box::new(LlamaModel {
            layers: layers?,
            norm: RmsNorm::load(weights, "model.norm", hidden, self.eps, NormOrder::CastThenScale)?,
            lm_head: match self.sizes.tied {
                true => embed_tokens.clone(),
                false => weights.rows("lm_head.weight", [vocab, hidden])?,
            },
            embed_tokens,
            rope: self.rope.clone(),
            needs: self.needs(),
            vocab,
            kernels: kernels.clone(),
        }))
    }
}

#[derive(Debug)]
struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl Block {
    fn load(weights: &mut dyn Weights, name: &str, config: &LlamaConfig) -> Result<Self> {
        let Sizes { hidden, heads, kv_heads, head_dim, intermediate, .. } = config.sizes;
        let sizes = AttentionSizes { hidden, heads, kv_heads, head_dim };
        let norm = |weights: &mut dyn Weights, part: &str| {
            RmsNorm::load(weights, &format!("{name}.{part}"), hidden, config.eps, NormOrder::CastThenScale)
        };
        Ok(Self {
            input_layernorm: norm(weights, "input_layernorm")?,
            self_attn: Attention::load(
                weights,
                &format!("{name}.self_attn"),
                sizes,
                config.attention_bias,
                None,
            )?,
            post_attention_layernorm: norm(weights, "post_attention_layernorm")?,
            mlp: GatedMlp::load(weights, &format!("{name}.mlp"), hidden, intermediate, config.mlp_bias)?,
        })
    }
}

#[derive(Debug)]
struct LlamaModel {
    embed_tokens: Rows,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Rows,
    rope: Rope,
    needs: Vec<LayerNeed>,
    vocab: usize,
    kernels: Kernels,
}

impl CausalModel for LlamaModel {
    fn needs(&self) -> Vec<LayerNeed> {
        self.needs.clone()
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn rotary_tables(
        &self,
        slots: Range<usize>,
        left_pad: &[usize],
        device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        vec![self.rope.step_tables(slots, left_pad, device)]
    }

    fn forward(&self, batch: &Batch, logits: Logits, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let kernels = &self.kernels;
        let mut places = Places::new(batch, &self.rope);
        let mut x = self.embed_tokens.select(batch.tokens.clone());
        for (i, block) in self.layers.iter().enumerate() {
            let attended = block.self_attn.forward(
                block.input_layernorm.forward(x.clone(), kernels),
                &mut places,
                cache.attention(i)?,
                kernels,
            )?;
            x = x + attended;
            let normed = block.post_attention_layernorm.forward(x.clone(), kernels);
            x = x + block.mlp.forward(normed, kernels);
        }
        let x = match logits {
            Logits::Last => x.narrow(1, batch.len() - 1, 1),
            Logits::All => x,
        };
        Ok(self.lm_head.project(self.norm.forward(x, kernels), kernels).cast(DType::F32))
    }
}
