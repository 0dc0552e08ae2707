//! Gemma 4's language model (Google, 2026; transformers' `Gemma4ForCausalLM`): Gemma 3 with wider heads in
//! blocks without a window, values that are normed or are the keys, blocks that attend to the keys of an
//! earlier one, per-layer embeddings, and a mixture of experts beside the feed-forward.

use std::collections::BTreeMap;

use kiln_core::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        block::{FeedForwardConfig, MixerConfig},
        decoder::{DecoderConfig, PerLayerConfig},
        experts::{ExpertNames, ExpertsConfig, RouterConfig, RouterNorm},
        mlp,
        names::NormNames,
        norm::NormKind,
        rope::LayerRopes,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct Gemma4Text;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_activation: Option<String>,
    attention_bias: bool,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    final_logit_softcapping: Option<f64>,
    vocab_size_per_layer_input: Option<usize>,
    hidden_size_per_layer_input: Option<usize>,
    attention_k_eq_v: bool,
    num_kv_shared_layers: usize,
    enable_moe_block: bool,
    use_double_wide_mlp: bool,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    /// In old configs, the width and the number of heads of keys of blocks without a window.
    global_head_dim: Option<usize>,
    num_global_key_value_heads: Option<usize>,
    per_layer_config: Option<BTreeMap<String, LayerFields>>,
}

/// Fields of some blocks, which replace those of all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerFields {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(4), head_dim: Some(256), positions: 131_072, eps: 1e-6, tied: true };

impl Architecture for Gemma4Text {
    fn model_type(&self) -> &'static str {
        "gemma4_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let usual = [("sliding_window", 512), ("hidden_size_per_layer_input", 256)];
        let config = usual.into_iter().fold(config.clone(), |config, (name, value)| config.or(name, value));
        Ok(Box::new(decoder(&config)?))
    }
}

/// Returns the settings of a decoder of Gemma 4.
pub(crate) fn decoder(config: &ConfigFile) -> Result<DecoderConfig> {
    // For text, tokens never see later ones.
    let config = &match config.get("use_bidirectional_attention").and_then(Value::as_str) {
        Some("vision") => config.without(&["use_bidirectional_attention"]),
        Some("all") => config.with("use_bidirectional_attention", true.into()),
        _ => config.clone(),
    };
    let fields: Fields = config.parse()?;
    let common = Common::read(config, DEFAULTS)?;
    let (layers, positions) = (common.sizes.layers, common.sizes.positions);
    let mut types = fields.layer_types.clone();
    // As in Transformers, the last block sees all.
    if let Some(last) = types.as_mut().and_then(|types| types.last_mut()) {
        *last = "full_attention".to_owned();
    }
    let window = fields.sliding_window.unwrap_or(512);
    let period = |i: usize| !(i + 1).is_multiple_of(6) && i + 1 < layers;
    let windows = windows(config, layers, Some(window), types.as_deref(), period)?;
    let dims = fields.head_dims(config, &windows)?;
    let of_kind = |is_full: bool| {
        let mut own = dims.iter().zip(&windows).filter(|(_, window)| window.is_none() == is_full);
        own.next().map_or(common.sizes.head_dim, |(dims, _)| dims[0])
    };
    let rope_dims = [of_kind(true), of_kind(false)];
    let ropes = match config.get("rope_parameters").is_some() {
        true => LayerRopes::read(config)?,
        false => LayerRopes::read(&config.with("rope_parameters", usual_ropes()))?,
    };
    let ropes = ropes.ropes(config, rope_dims, positions, [1e6, 1e4])?;
    let eps = common.eps;
    let mut decoder = DecoderConfig::gemma(common, ropes);
    decoder.sizes.positions = positions;
    decoder.norm = NormKind::rms(eps);
    decoder.fits_float16 = false;
    decoder.names.norms = NormNames::AROUND;
    decoder.block_scalar = Some("layer_scalar");
    decoder.set_windows(windows.clone());
    decoder.set_attention_bias(fields.attention_bias);
    decoder.final_softcap =
        config.positive_unless_null("final_logit_softcapping", fields.final_logit_softcapping, None)?;
    let activation = fields.hidden_activation.as_deref().unwrap_or("gelu_pytorch_tanh");
    decoder.mlp.activation = mlp::activation(config, "hidden_activation", Some(activation))?;
    for ((attention, [head_dim, kv_heads]), window) in decoder.attention_mut().zip(&dims).zip(&windows) {
        (attention.head_dim, attention.value_dim, attention.kv_heads) = (*head_dim, *head_dim, *kv_heads);
        attention.scale = 1.0;
        attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS));
        attention.value_norm = Some(eps);
        attention.values_are_keys = fields.attention_k_eq_v && window.is_none();
    }
    // Sizes are those of the widest blocks, which estimates of memory need.
    let widest = dims.iter().map(|[head_dim, _]| *head_dim).max().unwrap_or(decoder.sizes.head_dim);
    decoder.sizes.head_dim = widest;
    fields.share(config, &mut decoder, &windows)?;
    fields.add_experts(config, &mut decoder, eps)?;
    let width = fields.hidden_size_per_layer_input.unwrap_or(0);
    if width > 0 {
        let vocab = fields.vocab_size_per_layer_input.unwrap_or(262_144);
        config.check("hidden_size_per_layer_input", width, 1 << 16)?;
        config.check("vocab_size_per_layer_input", vocab, 1 << 24)?;
        if vocab < decoder.sizes.vocab {
            let why = format!(
                "`vocab_size_per_layer_input` is {vocab}, and `vocab_size` is {}; tokens would have no row",
                decoder.sizes.vocab
            );
            return Err(config.error(&why));
        }
        decoder.per_layer = Some(PerLayerConfig { width, vocab, blocks: layers });
    }
    Ok(decoder)
}

/// The rotary positions of configs that have none.
fn usual_ropes() -> Value {
    json!({
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        "full_attention": { "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6 },
    })
}

impl Fields {
    /// Returns the size of heads and the number of heads of keys of each block.
    fn head_dims(&self, config: &ConfigFile, windows: &[Option<usize>]) -> Result<Vec<[usize; 2]>> {
        let sizes = Common::read(config, DEFAULTS)?.sizes;
        let of_block = |(i, window): (usize, &Option<usize>)| {
            let stated = self.per_layer_config.as_ref().and_then(|all| all.get(&i.to_string()));
            let [head_dim, kv_heads] = match (&self.per_layer_config, window) {
                (Some(_), _) => {
                    [stated.and_then(|own| own.head_dim), stated.and_then(|own| own.num_key_value_heads)]
                }
                (None, Some(_)) => [None, None],
                (None, None) => {
                    let kv_heads = self.num_global_key_value_heads.filter(|_| self.attention_k_eq_v);
                    [Some(self.global_head_dim.unwrap_or(512)), kv_heads]
                }
            };
            let (head_dim, kv_heads) =
                (head_dim.unwrap_or(sizes.head_dim), kv_heads.unwrap_or(sizes.kv_heads));
            config.check("head_dim", head_dim, 1 << 14)?;
            config.check("num_key_value_heads", kv_heads, sizes.heads)?;
            if !sizes.heads.is_multiple_of(kv_heads) {
                let why =
                    format!("{} attention heads cannot share {kv_heads} key-value heads evenly", sizes.heads);
                return Err(config.error(&why));
            }
            Ok([head_dim, kv_heads])
        };
        let dims: Vec<_> = windows.iter().enumerate().map(of_block).collect::<Result<_>>()?;
        for (is_full, kind) in [(true, "full_attention"), (false, "sliding_attention")] {
            let mut own = dims.iter().zip(windows).filter(|(_, window)| window.is_none() == is_full);
            let first = own.next();
            if own.any(|(dims, _)| first.is_some_and(|(first, _)| first[0] != dims[0])) {
                return Err(config.error(&format!("heads of `{kind}` have several sizes, and one rotation")));
            }
        }
        Ok(dims)
    }

    /// Makes the last blocks attend to the keys of the last block of their kind before them.
    fn share(
        &self,
        config: &ConfigFile,
        decoder: &mut DecoderConfig,
        windows: &[Option<usize>],
    ) -> Result<()> {
        let shared = self.num_kv_shared_layers;
        let Some(first) = windows.len().checked_sub(shared).filter(|first| *first > 0) else {
            return Err(config.error(&format!("`num_kv_shared_layers` {shared} leaves no block with keys")));
        };
        if shared == 0 {
            return Ok(());
        }
        let intermediate = decoder.mlp.intermediate;
        for is_full in [true, false] {
            let is_own = |i: &usize| windows[*i].is_none() == is_full;
            let source = (0..first).rev().find(is_own);
            let needs = (first..windows.len()).any(|i| is_own(&i));
            let Some(source) = source else {
                if needs {
                    let why =
                        format!("`num_kv_shared_layers` {shared} leaves blocks without keys of their kind");
                    return Err(config.error(&why));
                }
                continue;
            };
            if let MixerConfig::Attention(attention) = &mut decoder.blocks[source].mixer {
                attention.keeps = needs;
            }
        }
        for block in &mut decoder.blocks[first..] {
            if let MixerConfig::Attention(attention) = block.mixer {
                block.mixer = MixerConfig::SharedAttention(attention);
            }
            if self.use_double_wide_mlp {
                block.feed_forward = Some(FeedForwardConfig::GatedOf(2 * intermediate));
            }
        }
        Ok(())
    }

    /// Adds mixtures of experts beside the feed-forwards.
    fn add_experts(&self, config: &ConfigFile, decoder: &mut DecoderConfig, eps: f64) -> Result<()> {
        if !self.enable_moe_block {
            return Ok(());
        }
        let needed = |name: &str, value: Option<usize>| {
            value.ok_or_else(|| config.error(&format!("`enable_moe_block` is set, and `{name}` is missing")))
        };
        let experts = ExpertsConfig {
            experts: needed("num_experts", self.num_experts)?,
            chosen: needed("top_k_experts", self.top_k_experts)?,
            intermediate: needed("moe_intermediate_size", self.moe_intermediate_size)?,
            router: RouterConfig {
                norm: Some(RouterNorm { eps, names: ["router.scale", "router.per_expert_scale"] }),
                ..RouterConfig::softmax(true)
            },
            names: ExpertNames::new("router.proj"),
            ..ExpertsConfig::default()
        };
        experts.check(config, "num_experts")?;
        let widths: Vec<_> = decoder.blocks.iter().map(|block| block.feed_forward).collect();
        decoder.set_experts(experts, |_| true);
        for (block, dense) in decoder.blocks.iter_mut().zip(widths) {
            let width = match dense {
                Some(FeedForwardConfig::GatedOf(width)) => width,
                _ => decoder.mlp.intermediate,
            };
            block.feed_forward = Some(FeedForwardConfig::Beside(experts, width));
        }
        Ok(())
    }
}
