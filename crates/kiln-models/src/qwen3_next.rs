//! Qwen3-Next (Qwen Team, 2025; transformers' `Qwen3NextForCausalLM`): three of four blocks have a gated
//! delta net, and the others attention whose results are gated. Norms scale by `1 + weight`. Feed-forwards
//! are mixtures of experts, beside one that all tokens use.

use kiln_core::Result;
use kiln_kernels::NormOrder;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    nn::{
        attention::{HeadNorms, QK_NORMS},
        block::{MixerConfig, StateConfig},
        decoder::DecoderConfig,
        delta_net::DeltaNetConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        mlp,
        names::ByHead,
        norm::NormKind,
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct Qwen3Next;

/// Fields of `config.json` in addition to those of every decoder, which Qwen 3.5 has, too.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    /// Period of the blocks with attention.
    full_attention_interval: Option<usize>,
    linear_conv_kernel_dim: Option<usize>,
    /// Whether value head `h` has key head `h mod n` of `n`, as in GGUF files.
    linear_heads_alternate: bool,
    /// Whether gates are a matrix of their own, beside that of queries, keys and values, as in GGUF files.
    linear_gates_apart: bool,
    linear_key_head_dim: Option<usize>,
    linear_value_head_dim: Option<usize>,
    linear_num_key_heads: Option<usize>,
    linear_num_value_heads: Option<usize>,
}

/// Fields of the experts of Qwen3-Next and Qwen 3.5.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ExpertFields {
    num_experts: Option<usize>,
    /// Another name for `num_experts`.
    num_local_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    shared_expert_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

/// Returns the settings of a decoder of delta nets and attention, with dense feed-forwards.
pub(crate) fn hybrid(config: &ConfigFile, defaults: Defaults) -> Result<(DecoderConfig, DeltaNetConfig)> {
    let fields: Fields = config.parse()?;
    let common = Common::read(config, defaults)?;
    let eps = common.eps;
    let delta = DeltaNetConfig {
        hidden: common.sizes.hidden,
        heads: fields.linear_num_value_heads.unwrap_or(32),
        key_heads: fields.linear_num_key_heads.unwrap_or(16),
        key_dim: fields.linear_key_head_dim.unwrap_or(128),
        value_dim: fields.linear_value_head_dim.unwrap_or(128),
        conv_width: fields.linear_conv_kernel_dim.unwrap_or(4),
        eps,
        apart: false,
        alternates: fields.linear_heads_alternate,
    };
    for (name, size, largest) in [
        ("linear_num_value_heads", delta.heads, 1 << 12),
        ("linear_num_key_heads", delta.key_heads, 1 << 12),
        ("linear_key_head_dim", delta.key_dim, 1 << 12),
        ("linear_value_head_dim", delta.value_dim, 1 << 12),
        ("linear_conv_kernel_dim", delta.conv_width, 1 << 8),
    ] {
        config.check(name, size, largest)?;
    }
    if !delta.heads.is_multiple_of(delta.key_heads) {
        let why = format!(
            "`linear_num_value_heads` is {}, which is no multiple of `linear_num_key_heads` {}",
            delta.heads, delta.key_heads
        );
        return Err(config.error(&why));
    }
    if !matches!(fields.hidden_act.as_deref(), None | Some("silu" | "swish")) {
        let name = fields.hidden_act.unwrap_or_default();
        return Err(config.error(&format!("`hidden_act` is `{name}`; known: silu, swish")));
    }
    let period = fields.full_attention_interval.unwrap_or(4);
    config.check("full_attention_interval", period, usize::MAX)?;
    let layers = common.sizes.layers;
    let types = ["full_attention", "linear_attention"];
    let attends = config.marks("layer_types", layers, types)?;
    let attends = attends.unwrap_or_else(|| (0..layers).map(|i| (i + 1).is_multiple_of(period)).collect());
    let parameters = RopeParameters::read(config)?.or(1e4, 0.25).of_text(1e4);
    let rope = Rope::new(config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
    let mut decoder = DecoderConfig::new(common, rope.into());
    decoder.norm = NormKind::Rms { eps, order: NormOrder::ScaleThenCast };
    decoder.set_attention_bias(fields.attention_bias);
    for attention in decoder.attention_mut() {
        attention.head_norms = Some(HeadNorms::PerHead(QK_NORMS));
        attention.gate = Some("q_gate");
    }
    // Query and gate of each head are adjacent.
    let parts = ["q_proj", "q_gate"].map(|part| (part, decoder.sizes.head_dim));
    let by_head = ByHead::new(decoder.sizes.heads, parts);
    decoder.by_head = ["q_proj.weight", "q_proj.bias"].map(|end| (end, by_head.clone())).into();
    decoder.names.state_space = "linear_attn";
    decoder.set_states(StateConfig::DeltaNet(delta), delta.channels(), &attends);
    decoder.mlp.activation = mlp::activation(config, "hidden_act", fields.hidden_act.as_deref())?;
    Ok((decoder, delta))
}

/// Makes feed-forwards mixtures of experts. `defaults`: number of experts, and of those that a token uses.
pub(crate) fn set_experts(
    config: &ConfigFile,
    decoder: &mut DecoderConfig,
    [experts, chosen]: [usize; 2],
) -> Result<()> {
    let fields: ExpertFields = config.parse()?;
    let experts = fields.num_local_experts.or(fields.num_experts).unwrap_or(experts);
    // Without experts, all blocks are dense.
    if experts == 0 {
        return Ok(());
    }
    let width = fields.shared_expert_intermediate_size.unwrap_or(512);
    config.check("shared_expert_intermediate_size", width, 1 << 24)?;
    let experts = ExpertsConfig {
        experts,
        chosen: fields.num_experts_per_tok.unwrap_or(chosen),
        intermediate: fields.moe_intermediate_size.unwrap_or(512),
        shared: Some(SharedConfig { width, name: "shared_expert", gated: true }),
        names: ExpertNames::new("gate"),
        router: RouterConfig::softmax(fields.norm_topk_prob.unwrap_or(true)),
        ..ExpertsConfig::default()
    };
    experts.check(config, "num_experts")?;
    let dense = fields.mlp_only_layers.unwrap_or_default();
    decoder.set_sparse_experts(config, experts, fields.decoder_sparse_step.unwrap_or(1), &dense)
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(2), head_dim: Some(256), positions: 32_768, eps: 1e-6, tied: false };

impl Architecture for Qwen3Next {
    fn model_type(&self) -> &'static str {
        "qwen3_next"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let (mut decoder, delta) = hybrid(config, DEFAULTS)?;
        // Projections are sorted by the heads of keys, each with its values.
        let shared = delta.heads / delta.key_heads;
        let values = shared * delta.value_dim;
        let [q, k, v, z, b, a] = [
            ("in_proj_q", delta.key_dim),
            ("in_proj_k", delta.key_dim),
            ("in_proj_v", values),
            ("in_proj_z", values),
            ("in_proj_b", shared),
            ("in_proj_a", shared),
        ];
        let by_head = |parts: &[(&'static str, usize)]| ByHead::new(delta.key_heads, parts);
        decoder.by_head.push(("in_proj_qkvz.weight", by_head(&[q, k, v, z])));
        decoder.by_head.push(("in_proj_ba.weight", by_head(&[b, a])));
        let Fields { linear_gates_apart, .. } = config.parse()?;
        for block in &mut decoder.blocks {
            if let MixerConfig::State(StateConfig::DeltaNet(delta)) = &mut block.mixer {
                delta.apart = !linear_gates_apart;
            }
        }
        set_experts(config, &mut decoder, [512, 10])?;
        Ok(Box::new(decoder))
    }
}
