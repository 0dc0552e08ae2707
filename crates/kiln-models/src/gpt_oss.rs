//! gpt-oss (OpenAI, 2025, <https://arxiv.org/abs/2508.10925>; transformers' `GptOssForCausalLM`): a sink for
//! each head, a window on every other block, biases, and mixtures of experts with clamped gates whose
//! matrices are stored as `[experts, in, out]`, or in MXFP4.

use kiln_core::Result;
use kiln_kernels::Gate;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig},
        rope::RopeParameters,
    },
    windows::windows,
};

#[derive(Debug)]
pub(crate) struct GptOss;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    attention_bias: Option<bool>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
    num_local_experts: Option<usize>,
    /// Another name for `num_local_experts`.
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    swiglu_alpha: Option<f64>,
    swiglu_limit: Option<f64>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: Some(64), positions: 131_072, eps: 1e-5, tied: false };

impl Architecture for GptOss {
    fn model_type(&self) -> &'static str {
        "gpt_oss"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let window = config.unless_null("sliding_window", fields.sliding_window, Some(128));
        let types = fields.layer_types.as_deref();
        let windows = windows(config, common.sizes.layers, window, types, |i| i.is_multiple_of(2))?;
        let has_rope = ["rope_parameters", "rope_scaling"].iter().any(|key| config.get(key).is_some());
        let mut parameters = RopeParameters::read(config)?.or(150_000.0, 1.0);
        if !has_rope {
            parameters = parameters.gpt_oss();
        }
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_windows(windows);
        decoder.set_attention_bias(fields.attention_bias.unwrap_or(true));
        decoder.attention_mut().for_each(|attention| attention.sinks = true);
        let number =
            |name: &str, value: Option<f64>, default| config.positive(name, value.unwrap_or(default));
        let alpha = number("swiglu_alpha", fields.swiglu_alpha, 1.702)? as f32;
        let limit = number("swiglu_limit", fields.swiglu_limit, 7.0)? as f32;
        let experts = ExpertsConfig {
            experts: fields.num_experts.or(fields.num_local_experts).unwrap_or(128),
            chosen: fields.num_experts_per_tok.unwrap_or(4),
            intermediate: decoder.sizes.intermediate,
            // The softmax of the chosen logits.
            router: RouterConfig::softmax(true),
            bias: true,
            gate: Some(Gate::Clamped { alpha, limit }),
            names: ExpertNames { transposed: true, interleaved: true, ..ExpertNames::new("router") },
            ..ExpertsConfig::default()
        };
        experts.check(config, "num_local_experts")?;
        decoder.set_experts(experts, |_| true);
        Ok(Box::new(decoder))
    }
}
