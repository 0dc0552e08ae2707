//! Bamba (IBM, 2024; transformers' `BambaForCausalLM`): Mamba-2 mixers, and attention with positions in a few
//! blocks.

use kiln_core::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured, Rope,
    config::{Common, Defaults},
    mamba::check_silu,
    mamba2::{self, step_limits},
    nn::{
        block::StateConfig,
        decoder::DecoderConfig,
        linear::Factors,
        mamba2::{Mamba2Config, ResultNorm},
        mlp,
        names::{Names, NormNames},
        rope::RopeParameters,
    },
};

#[derive(Debug)]
pub(crate) struct Bamba;

/// Fields of `config.json` in addition to those of every decoder.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    hidden_act: Option<String>,
    attention_bias: bool,
    mlp_bias: bool,
    attn_layer_indices: Option<Vec<usize>>,
}

/// Fields of the mixers, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(crate) struct MixerFields {
    hidden_act: String,
    mamba_n_heads: usize,
    /// A number, or `auto` for the width of the mixer divided by the number of heads.
    mamba_d_head: Value,
    mamba_n_groups: usize,
    mamba_d_state: usize,
    mamba_d_conv: usize,
    mamba_expand: usize,
    mamba_conv_bias: bool,
    mamba_proj_bias: bool,
}

impl Default for MixerFields {
    fn default() -> Self {
        Self {
            hidden_act: "silu".to_owned(),
            mamba_n_heads: 128,
            mamba_d_head: "auto".into(),
            mamba_n_groups: 1,
            mamba_d_state: 256,
            mamba_d_conv: 4,
            mamba_expand: 2,
            mamba_conv_bias: true,
            mamba_proj_bias: false,
        }
    }
}

impl MixerFields {
    /// Returns the settings of the mixers. `width` is their width, if it is not `mamba_expand` times
    /// `hidden_size`.
    ///
    /// # Errors
    /// [`Error::File`](kiln_core::Error::File) for sizes that are impossible or do not fit together.
    pub(crate) fn mixer(
        &self,
        config: &ConfigFile,
        common: &Common,
        width: Option<usize>,
    ) -> Result<Mamba2Config> {
        let (hidden, heads) = (common.sizes.hidden, self.mamba_n_heads);
        // Also the activation of convolutions.
        check_silu(config, "hidden_act", &self.hidden_act)?;
        config.check("mamba_expand", self.mamba_expand, 1 << 6)?;
        let width = width.unwrap_or(self.mamba_expand * hidden);
        let head_dim = match &self.mamba_d_head {
            Value::String(auto) if auto == "auto" => width / heads.max(1),
            number => {
                let number = number.as_u64().and_then(|number| usize::try_from(number).ok());
                number.ok_or_else(|| config.error("`mamba_d_head` is neither `auto` nor a number"))?
            }
        };
        let mamba = Mamba2Config {
            hidden,
            heads,
            head_dim,
            groups: self.mamba_n_groups,
            state_dim: self.mamba_d_state,
            conv_width: self.mamba_d_conv,
            in_bias: self.mamba_proj_bias,
            conv_bias: self.mamba_conv_bias,
            out_bias: self.mamba_proj_bias,
            step_limits: step_limits(config)?,
            norm: Some(ResultNorm { eps: common.eps, before_gate: false }),
            factors: Factors::NONE,
        };
        let names = ["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"];
        mamba2::check(config, &mamba, names)?;
        if mamba.values() != width {
            let why = format!(
                "`mamba_n_heads` {heads} times `mamba_d_head` {head_dim} is not the width of the mixer, {width}"
            );
            return Err(config.error(&why));
        }
        Ok(mamba)
    }
}

const DEFAULTS: Defaults =
    Defaults { kv_heads: Some(8), head_dim: None, positions: 262_144, eps: 1e-5, tied: false };

impl Architecture for Bamba {
    fn model_type(&self) -> &'static str {
        "bamba"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        // Transformers overwrites the share of each head that is rotated, unless `rope_parameters` has it.
        let config = config.with_aliases(&[("layers_block_type", "layer_types")])?;
        let config = config.without(&["partial_rotary_factor"]);
        let fields: Fields = config.parse()?;
        let mixer: MixerFields = config.parse()?;
        let common = Common::read(&config, DEFAULTS)?;
        let mamba = mixer.mixer(&config, &common, None)?;
        let parameters = RopeParameters::read(&config)?.or(1e4, 0.5);
        let rope = Rope::new(&config, &parameters, common.sizes.head_dim, common.sizes.positions)?;
        let mut decoder = DecoderConfig::new(common, rope.into());
        decoder.set_attention_bias(fields.attention_bias);
        decoder.names = Names {
            norm: "final_layernorm",
            feed_forward: "feed_forward",
            norms: NormNames::before("input_layernorm", "pre_ff_layernorm"),
            ..decoder.names
        };
        decoder.mlp.bias = fields.mlp_bias;
        decoder.mlp.activation = mlp::activation(&config, "hidden_act", fields.hidden_act.as_deref())?;
        let layers = decoder.blocks.len();
        let attends = match &fields.attn_layer_indices {
            Some(numbers) => Some((0..layers).map(|i| numbers.contains(&i)).collect()),
            None => config.marks("layer_types", layers, ["full_attention", "linear_attention"])?,
        };
        let attends = attends.unwrap_or_else(|| vec![false; layers]);
        decoder.set_states(StateConfig::Mamba2(mamba), mamba.channels(), &attends);
        Ok(Box::new(decoder))
    }
}
