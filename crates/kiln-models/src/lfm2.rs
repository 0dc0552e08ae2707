//! LFM2 and LFM2.5 (Liquid AI, 2025; transformers' `Lfm2ForCausalLM`): most blocks have a gated short
//! convolution, and the others attention with norms on each head of queries and keys.

use kiln_core::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::HeadNorms,
        block::StateConfig,
        decoder::DecoderConfig,
        names::{Names, NormNames},
        rope::RopeParameters,
        short_conv::ShortConvConfig,
    },
};

#[derive(Debug)]
pub(crate) struct Lfm2;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    conv_bias: bool,
    #[serde(rename = "conv_L_cache")]
    conv_width: Option<usize>,
    full_attn_idxs: Option<Vec<usize>>,
}

/// Fields of the width of feed-forwards.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Width {
    block_auto_adjust_ff_dim: Option<bool>,
    block_ffn_dim_multiplier: Option<f64>,
    block_multiple_of: Option<usize>,
}

impl Width {
    /// Returns the width of feed-forwards for the field `intermediate_size`.
    fn of(&self, config: &ConfigFile, intermediate: usize) -> Result<usize> {
        if !self.block_auto_adjust_ff_dim.unwrap_or(true) {
            return Ok(intermediate);
        }
        let checked = |width: usize| config.check("intermediate_size", width, 1 << 24).map(|()| width);
        let width = checked(2 * intermediate / 3)?;
        let times = config.unless_null("block_ffn_dim_multiplier", self.block_ffn_dim_multiplier, Some(1.0));
        let Some(times) = times else { return Ok(width) };
        let times = config.positive("block_ffn_dim_multiplier", times)?;
        let multiple = self.block_multiple_of.unwrap_or(256);
        config.check("block_multiple_of", multiple, 1 << 24)?;
        let width = checked((times * width as f64) as usize)?;
        checked(width.next_multiple_of(multiple))
    }
}

/// Names of the projections of feed-forwards and of experts: gate, values and output.
pub(crate) const PROJECTIONS: [&str; 3] = ["w1", "w3", "w2"];

/// Returns the settings of a decoder of short convolutions and attention, with dense feed-forwards.
pub(crate) fn hybrid(config: &ConfigFile, defaults: Defaults) -> Result<DecoderConfig> {
    let fields: Fields = config.parse()?;
    let eps = config.get("norm_eps").cloned().unwrap_or(Value::Null);
    let mut config = config.with("rms_norm_eps", eps);
    // Old names, which take precedence.
    for (old, name) in [("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size")] {
        if let Some(value) = config.get(old).cloned() {
            config.set(name, value);
        }
    }
    let common = Common::read(&config, defaults)?;
    let layers = common.sizes.layers;
    let attends = match config.marks("layer_types", layers, ["full_attention", "conv"])? {
        Some(attends) => attends,
        None => {
            let attends = |i| fields.full_attn_idxs.as_ref().is_none_or(|numbers| numbers.contains(&i));
            (0..layers).map(attends).collect()
        }
    };
    let conv = ShortConvConfig {
        hidden: common.sizes.hidden,
        width: fields.conv_width.unwrap_or(3),
        bias: fields.conv_bias,
    };
    config.check("conv_L_cache", conv.width, 1 << 8)?;
    let parameters = RopeParameters::read(&config)?.or(1e6, 1.0);
    let rope = Rope::new(&config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
    let mut decoder = DecoderConfig::new(common, rope.into());
    decoder.names = Names {
        norm: "embedding_norm",
        norms: NormNames::before("operator_norm", "ffn_norm"),
        state_space: "conv",
        feed_forward: "feed_forward",
        ..decoder.names
    };
    for attention in decoder.attention_mut() {
        attention.o_name = "out_proj";
        attention.head_norms = Some(HeadNorms::PerHead(["q_layernorm", "k_layernorm"]));
    }
    decoder.set_states(StateConfig::ShortConv(conv), conv.hidden, &attends);
    decoder.mlp.names = PROJECTIONS;
    Ok(decoder)
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 128_000, eps: 1e-5, tied: true };

impl Architecture for Lfm2 {
    fn model_type(&self) -> &'static str {
        "lfm2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let width: Width = config.parse()?;
        let mut decoder = hybrid(config, DEFAULTS)?;
        let width = width.of(config, decoder.sizes.intermediate)?;
        (decoder.sizes.intermediate, decoder.mlp.intermediate) = (width, width);
        Ok(Box::new(decoder))
    }
}
