//! Llama 4 (Meta, 2025; transformers' `Llama4ForCausalLM`): attention within chunks in blocks with rotary
//! positions, queries that grow with their position in the others, and mixtures of experts whose inputs are
//! multiplied by the sigmoid of their logits.

use kiln_core::Result;
use kiln_kernels::Scores;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::Reach,
        block::FeedForwardConfig,
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        mlp,
        names::Names,
        places::QueryTemperature,
        rope::RopeParameters,
    },
    smollm3::rotating,
};

#[derive(Debug)]
pub(crate) struct Llama4Text;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    attention_chunk_size: Option<usize>,
    layer_types: Option<Vec<String>>,
    /// For each block 1 if it rotates keys, 0 if not.
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: Option<usize>,
    use_qk_norm: Option<bool>,
    /// A truth value; early folders have a number.
    attn_temperature_tuning: Option<Value>,
    floor_scale: Option<usize>,
    attn_scale: Option<f64>,
    intermediate_size_mlp: Option<usize>,
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_layers: Option<Vec<usize>>,
    interleave_moe_layer_step: Option<usize>,
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: Some(128), positions: 131_072, eps: 1e-5, tied: false };

impl Architecture for Llama4Text {
    fn model_type(&self) -> &'static str {
        "llama4_text"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let (layers, eps) = (common.sizes.layers, common.eps);
        let list = fields.no_rope_layers.clone().filter(|list| !list.is_empty());
        let rotates = rotating(config, layers, list, fields.no_rope_layer_interval)?;
        let chunks = fields.chunks(config, &rotates)?;
        let temperature = fields.temperature(config)?;
        let is_mixture = fields.mixtures(config, layers)?;
        let dense = fields.intermediate_size_mlp.unwrap_or(16_384);
        config.check("intermediate_size_mlp", dense, 1 << 24)?;
        let parameters = RopeParameters::read(config)?.or(5e5, 1.0);
        let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.adjacent().into());
        decoder.names = Names { feed_forward: "feed_forward", ..Names::default() };
        decoder.set_attention_bias(fields.attention_bias);
        decoder.set_rotating(|i| rotates[i]);
        decoder.query_temperature = temperature;
        for (i, attention) in decoder.attention_mut().enumerate() {
            attention.reach = chunks[i].map_or(Reach::All, Reach::Chunk);
            attention.tempered = !rotates[i];
            attention.rotated_norm = (rotates[i] && fields.use_qk_norm.unwrap_or(true)).then_some(eps);
        }
        decoder.set_feed_forward(FeedForwardConfig::GatedOf(dense));
        let intermediate = decoder.sizes.intermediate;
        let experts = ExpertsConfig {
            experts: fields.num_local_experts.unwrap_or(16),
            chosen: fields.num_experts_per_tok.unwrap_or(1),
            intermediate,
            shared: Some(SharedConfig { width: intermediate, name: "shared_expert", gated: false }),
            router: RouterConfig {
                scores: Scores::Sigmoid,
                weighs_inputs: true,
                ..RouterConfig::softmax(false)
            },
            names: ExpertNames { transposed: true, ..ExpertNames::new("router") },
            ..ExpertsConfig::default()
        };
        experts.check(config, "num_local_experts")?;
        decoder.set_experts(experts, |i| is_mixture[i]);
        decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
        Ok(Box::new(decoder))
    }
}

impl Fields {
    /// Returns the length of the chunks of each block, `None` for blocks that see every token.
    fn chunks(&self, config: &ConfigFile, rotates: &[bool]) -> Result<Vec<Option<usize>>> {
        let len = config.unless_null("attention_chunk_size", self.attention_chunk_size, Some(8192));
        if let Some(len) = len {
            config.check("attention_chunk_size", len, 1 << 30)?;
        }
        let is_chunked = |layer_type: &String| match &**layer_type {
            "chunked_attention" => Ok(true),
            "full_attention" => Ok(false),
            _ => Err(config.error(&format!(
                "`layer_types` has `{layer_type}`; known: full_attention, chunked_attention"
            ))),
        };
        let chunked: Vec<bool> = match &self.layer_types {
            None => rotates.to_vec(),
            Some(types) if types.len() != rotates.len() => {
                let (found, layers) = (types.len(), rotates.len());
                let why = format!("`layer_types` has {found} entries, `num_hidden_layers` is {layers}");
                return Err(config.error(&why));
            }
            Some(types) => types.iter().map(is_chunked).collect::<Result<_>>()?,
        };
        if len.is_none() && chunked.contains(&true) {
            return Err(
                config.error("has blocks of chunked attention, and `attention_chunk_size` is missing")
            );
        }
        Ok(chunked.into_iter().map(|chunked| len.filter(|_| chunked)).collect())
    }

    /// Returns the factor of queries in blocks without rotation, if they have one.
    fn temperature(&self, config: &ConfigFile) -> Result<Option<QueryTemperature>> {
        let tunes = match &self.attn_temperature_tuning {
            None => true,
            Some(Value::Bool(tunes)) => *tunes,
            Some(Value::Number(number)) => number.as_f64() != Some(0.0),
            Some(_) => return Err(config.error("`attn_temperature_tuning` is neither true nor false")),
        };
        let length = self.floor_scale.unwrap_or(8192);
        config.check("floor_scale", length, 1 << 30)?;
        let growth = self.attn_scale.unwrap_or(0.1);
        if !growth.is_finite() {
            return Err(config.error("`attn_scale` is not a number"));
        }
        Ok(tunes.then_some(QueryTemperature { growth, length, first: 1, counts_padding: true }))
    }

    /// Returns for each block whether its feed-forward is a mixture.
    fn mixtures(&self, config: &ConfigFile, layers: usize) -> Result<Vec<bool>> {
        let step = self.interleave_moe_layer_step.unwrap_or(1);
        config.check("interleave_moe_layer_step", step, usize::MAX)?;
        let is_mixture = |i: usize| match &self.moe_layers {
            Some(blocks) => blocks.contains(&i),
            None => (i + 1).is_multiple_of(step),
        };
        Ok((0..layers).map(is_mixture).collect())
    }
}
