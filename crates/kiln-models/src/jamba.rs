//! Jamba (Lieber et al., 2024, <https://arxiv.org/abs/2403.19887>; transformers' `JambaForCausalLM`): Mamba
//! mixers with additional norms, attention without positions in one of every few blocks, and a mixture of
//! experts in one of every few blocks.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured,
    config::{Common, Defaults},
    mamba,
    nn::{
        attention::AttentionConfig,
        block::{BlockConfig, FeedForwardConfig, MixerConfig, StateConfig},
        decoder::DecoderConfig,
        experts::{ExpertNames, ExpertsConfig, RouterConfig},
        mamba::{MambaConfig, MixerNorms},
        mlp,
        names::{Names, NormNames},
    },
};

#[derive(Debug)]
pub(crate) struct Jamba;

/// Fields of `config.json` in addition to those of every decoder, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: String,
    num_experts: usize,
    /// Another name for `num_experts`; takes precedence if both are present.
    num_local_experts: Option<usize>,
    num_experts_per_tok: usize,
    expert_layer_period: usize,
    expert_layer_offset: usize,
    attn_layer_period: usize,
    attn_layer_offset: usize,
    mamba_d_state: usize,
    mamba_d_conv: usize,
    mamba_expand: usize,
    /// A number, or `auto` for a sixteenth of the hidden size.
    mamba_dt_rank: serde_json::Value,
    mamba_conv_bias: bool,
    mamba_proj_bias: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            hidden_act: "silu".to_owned(),
            num_experts: 16,
            num_local_experts: None,
            num_experts_per_tok: 2,
            expert_layer_period: 2,
            expert_layer_offset: 1,
            attn_layer_period: 8,
            attn_layer_offset: 4,
            mamba_d_state: 16,
            mamba_d_conv: 4,
            mamba_expand: 2,
            mamba_dt_rank: "auto".into(),
            mamba_conv_bias: true,
            mamba_proj_bias: false,
        }
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 262_144, eps: 1e-6, tied: false };

impl Architecture for Jamba {
    fn model_type(&self) -> &'static str {
        "jamba"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        let common = Common::read(config, DEFAULTS)?;
        let hidden = common.sizes.hidden;
        for (name, value, largest) in [
            ("expert_layer_period", fields.expert_layer_period, usize::MAX),
            ("attn_layer_period", fields.attn_layer_period, usize::MAX),
            ("mamba_d_state", fields.mamba_d_state, 1 << 12),
            ("mamba_d_conv", fields.mamba_d_conv, 1 << 8),
            ("mamba_expand", fields.mamba_expand, 1 << 6),
        ] {
            config.check(name, value, largest)?;
        }
        for (name, offset, period) in [
            ("expert_layer", fields.expert_layer_offset, fields.expert_layer_period),
            ("attn_layer", fields.attn_layer_offset, fields.attn_layer_period),
        ] {
            if offset >= period {
                let why =
                    format!("`{name}_offset` is {offset}, must be below `{name}_period`, which is {period}");
                return Err(config.error(&why));
            }
        }
        mamba::check_silu(config, "hidden_act", &fields.hidden_act)?;
        let mamba = MambaConfig {
            hidden,
            channels: fields.mamba_expand * hidden,
            state_dim: fields.mamba_d_state,
            conv_width: fields.mamba_d_conv,
            time_step_rank: mamba::time_step_rank(config, "mamba_dt_rank", &fields.mamba_dt_rank, hidden)?,
            bias: fields.mamba_proj_bias,
            conv_bias: fields.mamba_conv_bias,
            norms: MixerNorms::Weighted(common.eps),
        };
        let mut decoder = DecoderConfig::of_states(common, StateConfig::Mamba(mamba));
        decoder.float32_residual = false;
        decoder.names = Names {
            norm: "final_layernorm",
            state_space: "mamba",
            feed_forward: "feed_forward",
            norms: NormNames::before("input_layernorm", "pre_ff_layernorm"),
            ..Names::default()
        };
        decoder.mlp.activation = mlp::activation(config, "hidden_act", Some(&fields.hidden_act))?;
        decoder.sizes.state_channels = mamba.channels;
        let attention = AttentionConfig::new(&decoder.sizes);
        for (i, block) in decoder.blocks.iter_mut().enumerate() {
            let attends = i % fields.attn_layer_period == fields.attn_layer_offset;
            let mixer = if attends { MixerConfig::Attention(attention) } else { block.mixer };
            *block =
                BlockConfig { feed_forward: Some(FeedForwardConfig::Gated), ..BlockConfig::alone(mixer) };
        }
        // A single expert is a dense feed-forward.
        let experts = fields.num_local_experts.unwrap_or(fields.num_experts);
        if experts != 1 {
            let experts = ExpertsConfig {
                experts,
                chosen: fields.num_experts_per_tok,
                intermediate: decoder.sizes.intermediate,
                names: ExpertNames::new("router"),
                router: RouterConfig::softmax(false),
                ..ExpertsConfig::default()
            };
            experts.check(config, "num_experts")?;
            decoder.set_experts(experts, |i| i % fields.expert_layer_period == fields.expert_layer_offset);
        }
        Ok(Box::new(decoder))
    }
}
