//! Falcon-H1 (TII, 2025; transformers' `FalconH1ForCausalLM`): attention and a Mamba-2 mixer in every block,
//! and factors before and after most projections.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    bamba::MixerFields,
    config::{Common, Defaults},
    nn::{
        block::MixerConfig,
        decoder::{DecoderConfig, Scale},
        hybrid::HybridConfig,
        linear::Factors,
        mamba2::ResultNorm,
        mlp,
        names::{Names, NormNames},
    },
};

#[derive(Debug)]
pub(crate) struct FalconH1;

/// Fields of `config.json` in addition to those of every decoder and of the mixers. Factors are 1 by default.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    mlp_bias: bool,
    projectors_bias: bool,
    mamba_d_ssm: Option<usize>,
    mamba_norm_before_gate: Option<bool>,
    mamba_rms_norm: bool,
    lm_head_multiplier: Option<f64>,
    embedding_multiplier: Option<f64>,
    /// Factors of gates and of the output.
    mlp_multipliers: Option<[f64; 2]>,
    key_multiplier: Option<f64>,
    attention_out_multiplier: Option<f64>,
    attention_in_multiplier: Option<f64>,
    /// Factors of gate, values, keys, queries and step sizes.
    ssm_multipliers: Option<[f64; 5]>,
    ssm_in_multiplier: Option<f64>,
    ssm_out_multiplier: Option<f64>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 8192, eps: 1e-5, tied: false };

impl Architecture for FalconH1 {
    fn model_type(&self) -> &'static str {
        "falcon_h1"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let mixer: MixerFields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let factor = |name: &str, factor: Option<f64>| config.positive(name, factor.unwrap_or(1.0));
        let width = config.unless_null("mamba_d_ssm", fields.mamba_d_ssm, Some(1024));
        let mut mamba = mixer.mixer(config, &common, width)?;
        mamba.out_bias = fields.projectors_bias;
        let before_gate =
            config.unless_null("mamba_norm_before_gate", fields.mamba_norm_before_gate, Some(true));
        let before_gate = before_gate.unwrap_or(false);
        mamba.norm = fields.mamba_rms_norm.then_some(ResultNorm { eps: common.eps, before_gate });
        mamba.factors = Factors {
            input: factor("ssm_in_multiplier", fields.ssm_in_multiplier)?,
            parts: fields.ssm_multipliers.unwrap_or([1.0; 5]),
            output: factor("ssm_out_multiplier", fields.ssm_out_multiplier)?,
        };
        for part in mamba.factors.parts {
            config.positive("ssm_multipliers", part)?;
        }
        let rope = Rope::read(config, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_attention_bias(fields.attention_bias);
        decoder.names = Names {
            norm: "final_layernorm",
            feed_forward: "feed_forward",
            norms: NormNames::before("input_layernorm", "pre_ff_layernorm"),
            ..decoder.names
        };
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        let [gates, output] = fields.mlp_multipliers.unwrap_or([1.0; 2]);
        let [gates, output] =
            [config.positive("mlp_multipliers", gates)?, config.positive("mlp_multipliers", output)?];
        decoder.mlp.factors = Factors { parts: [gates, 1.0], output, ..Factors::NONE };
        let embeddings = factor("embedding_multiplier", fields.embedding_multiplier)?;
        decoder.embedding_scale = (embeddings != 1.0).then_some(Scale::Exact(embeddings as f32));
        let logits = factor("lm_head_multiplier", fields.lm_head_multiplier)?;
        decoder.logit_scale = (logits != 1.0).then_some(logits);
        let factors = Factors {
            input: factor("attention_in_multiplier", fields.attention_in_multiplier)?,
            parts: [1.0, factor("key_multiplier", fields.key_multiplier)?, 1.0],
            output: factor("attention_out_multiplier", fields.attention_out_multiplier)?,
        };
        decoder.attention_mut().for_each(|attention| attention.factors = factors);
        for block in &mut decoder.blocks {
            if let MixerConfig::Attention(attention) = block.mixer {
                block.mixer = MixerConfig::Hybrid(HybridConfig { attention, mamba });
            }
        }
        decoder.sizes.state_channels = mamba.channels();
        Ok(Box::new(decoder))
    }
}
