//! Nemotron-H and Nemotron 3 (NVIDIA, 2025; transformers' `NemotronHForCausalLM`): each block is one of a
//! Mamba-2 mixer, attention without positions, a feed-forward without a gate, and a mixture of such.

use kiln_core::Result;
use kiln_kernels::{Groups, Scores};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults, layer_type},
    mamba::check_silu,
    mamba2,
    nn::{
        attention::AttentionConfig,
        block::{BlockConfig, FeedForwardConfig, MixerConfig, StateConfig},
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig, SharedConfig},
        linear::Factors,
        mamba2::{Mamba2Config, ResultNorm},
        mlp,
        names::{Names, NormNames},
    },
};

#[derive(Debug)]
pub(crate) struct NemotronH;

/// Fields of `config.json` in addition to those of every decoder, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    mlp_hidden_act: String,
    mlp_bias: bool,
    use_bias: bool,
    ssm_state_size: usize,
    mamba_num_heads: usize,
    mamba_head_dim: usize,
    mamba_hidden_act: String,
    n_groups: usize,
    conv_kernel: usize,
    use_conv_bias: bool,
    time_step_min: f64,
    n_routed_experts: usize,
    moe_intermediate_size: usize,
    moe_shared_expert_intermediate_size: usize,
    moe_latent_size: Option<usize>,
    num_experts_per_tok: usize,
    routed_scaling_factor: f64,
    n_group: usize,
    topk_group: usize,
    norm_topk_prob: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            mlp_hidden_act: "relu2".to_owned(),
            mlp_bias: false,
            use_bias: false,
            ssm_state_size: 128,
            mamba_num_heads: 128,
            mamba_head_dim: 64,
            mamba_hidden_act: "silu".to_owned(),
            n_groups: 8,
            conv_kernel: 4,
            use_conv_bias: true,
            time_step_min: 0.001,
            n_routed_experts: 8,
            moe_intermediate_size: 7688,
            moe_shared_expert_intermediate_size: 7688,
            moe_latent_size: None,
            num_experts_per_tok: 2,
            routed_scaling_factor: 1.0,
            n_group: 1,
            topk_group: 1,
            norm_topk_prob: true,
        }
    }
}

/// Other names of fields, in configs of other versions of Transformers.
const ALIASES: [(&str, &str); 6] = [
    ("layer_types", "layers_block_type"),
    ("num_local_experts", "n_routed_experts"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_conv", "conv_kernel"),
    ("mamba_dt_min", "time_step_min"),
    ("mamba_conv_bias", "use_conv_bias"),
];

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Mixture,
}

/// Returns the kind of each block, which a list or a pattern of characters says.
fn kinds(config: &ConfigFile) -> Result<Vec<Kind>> {
    let of_name = |name: &Value| match name.as_str().map(layer_type) {
        Some("linear_attention") => Ok(Kind::Mamba),
        Some("full_attention") => Ok(Kind::Attention),
        Some("mlp") => Ok(Kind::Dense),
        Some("moe") => Ok(Kind::Mixture),
        _ => Err(config.error(&format!(
            "`layers_block_type` has {name}; known: linear_attention, full_attention, mlp, moe"
        ))),
    };
    let of_character = |character| match character {
        'M' => Ok(Kind::Mamba),
        '*' => Ok(Kind::Attention),
        '-' => Ok(Kind::Dense),
        'E' => Ok(Kind::Mixture),
        _ => Err(config.error(&format!("`hybrid_override_pattern` has `{character}`; known: M, *, -, E"))),
    };
    let kinds: Vec<_> = match (config.get("layers_block_type"), config.get("hybrid_override_pattern")) {
        (Some(Value::Array(names)), _) => names.iter().map(of_name).collect::<Result<_>>()?,
        (None, Some(Value::String(pattern))) => pattern.chars().map(of_character).collect::<Result<_>>()?,
        (None, None) => vec![Kind::Mamba, Kind::Mixture, Kind::Attention, Kind::Dense],
        _ => {
            let why = "`layers_block_type` is no list, or `hybrid_override_pattern` no text";
            return Err(config.error(why));
        }
    };
    config.check("num_hidden_layers", kinds.len(), 4096)?;
    Ok(kinds)
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: Some(128), positions: 4096, eps: 1e-5, tied: false };

impl Architecture for NemotronH {
    fn model_type(&self) -> &'static str {
        "nemotron_h"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let config = config.with_aliases(&ALIASES)?.or("intermediate_size", 21_504);
        let eps = config.get("layer_norm_epsilon").cloned().unwrap_or(Value::Null);
        let config = config.with("rms_norm_eps", eps);
        let kinds = kinds(&config)?;
        // Transformers does not read it if it has the blocks.
        let config = config.with("num_hidden_layers", kinds.len().into());
        let fields: Fields = config.parse()?;
        let common = Common::read(&config, DEFAULTS)?;
        check_silu(&config, "mamba_hidden_act", &fields.mamba_hidden_act)?;
        // Transformers 5.23 reads this field and not `time_step_limit`.
        let smallest = match fields.time_step_min {
            0.0 => None,
            smallest => Some(config.positive("time_step_min", smallest)? as f32),
        };
        let mamba = Mamba2Config {
            hidden: common.sizes.hidden,
            heads: fields.mamba_num_heads,
            head_dim: fields.mamba_head_dim,
            groups: fields.n_groups,
            state_dim: fields.ssm_state_size,
            conv_width: fields.conv_kernel,
            in_bias: fields.use_bias,
            conv_bias: fields.use_conv_bias,
            out_bias: fields.use_bias,
            step_limits: smallest.map(|smallest| [smallest, f32::INFINITY]),
            norm: Some(ResultNorm { eps: common.eps, before_gate: false }),
            factors: Factors::NONE,
        };
        let names = ["mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"];
        mamba2::check(&config, &mamba, names)?;
        let mut decoder = DecoderConfig::without_positions(common);
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(&config, "mlp_hidden_act", Some(&fields.mlp_hidden_act))?;
        // Squares of activations exceed float16.
        decoder.fits_float16 = false;
        decoder.names = Names {
            embeddings: "embeddings",
            norm: "norm_f",
            norms: NormNames::before("norm", "norm"),
            attention: "mixer",
            state_space: "mixer",
            feed_forward: "mixer",
            aliases: &[("backbone.", "model.")],
            ..decoder.names
        };
        if kinds.contains(&Kind::Mixture) {
            let [groups, chosen] = [fields.n_group, fields.topk_group];
            let experts = ExpertsConfig {
                experts: fields.n_routed_experts,
                chosen: fields.num_experts_per_tok,
                intermediate: fields.moe_intermediate_size,
                latent: fields.moe_latent_size,
                shared: Some(SharedConfig {
                    width: fields.moe_shared_expert_intermediate_size,
                    name: "shared_experts",
                    gated: false,
                }),
                router: RouterConfig {
                    scores: Scores::Sigmoid,
                    float32: true,
                    normalised: fields.norm_topk_prob,
                    correction: Some("gate.e_score_correction_bias"),
                    groups: ([groups, chosen] != [1, 1]).then_some(Groups { groups, chosen, best: 2 }),
                    scale: config.positive("routed_scaling_factor", fields.routed_scaling_factor)? as f32,
                    ..RouterConfig::softmax(true)
                },
                names: ExpertNames { gate: None, ..ExpertNames::new("gate") },
                ..ExpertsConfig::default()
            };
            experts.check(&config, "n_routed_experts")?;
            decoder.set_experts(experts, |i| kinds[i] == Kind::Mixture);
        }
        let attention = AttentionConfig::new(&decoder.sizes);
        let dense = FeedForwardConfig::Plain(["mixer.up_proj", "mixer.down_proj"]);
        for (block, kind) in decoder.blocks.iter_mut().zip(kinds) {
            let feed_forward = |feed_forward| BlockConfig { mixer: MixerConfig::Nothing, feed_forward };
            *block = match kind {
                Kind::Mamba => BlockConfig::alone(MixerConfig::State(StateConfig::Mamba2(mamba))),
                Kind::Attention => BlockConfig::alone(MixerConfig::Attention(attention)),
                Kind::Dense => feed_forward(Some(dense)),
                Kind::Mixture => feed_forward(block.feed_forward),
            };
            if kind == Kind::Mamba {
                decoder.sizes.state_channels = mamba.channels();
            }
        }
        Ok(Box::new(decoder))
    }
}
