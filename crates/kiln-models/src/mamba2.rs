//! Mamba-2 (Dao and Gu, 2024, <https://arxiv.org/abs/2405.21060>; transformers' `Mamba2ForCausalLM`): blocks
//! that consist of a mixer with matrix states alone.

use kiln_core::Result;
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Sizes,
    config::Common,
    mamba::{check_silu, sizes},
    nn::{
        block::StateConfig,
        decoder::DecoderConfig,
        linear::Factors,
        mamba2::{Mamba2Config, ResultNorm},
    },
};

#[derive(Debug)]
pub(crate) struct Mamba2;

/// Fields of `config.json`, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    state_size: usize,
    num_hidden_layers: usize,
    num_heads: usize,
    head_dim: usize,
    n_groups: usize,
    layer_norm_epsilon: f64,
    expand: usize,
    conv_kernel: usize,
    use_bias: bool,
    use_conv_bias: bool,
    hidden_act: String,
    residual_in_fp32: bool,
    tie_word_embeddings: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            vocab_size: 32_768,
            hidden_size: 4096,
            state_size: 128,
            num_hidden_layers: 64,
            num_heads: 128,
            head_dim: 64,
            n_groups: 8,
            layer_norm_epsilon: 1e-5,
            expand: 2,
            conv_kernel: 4,
            use_bias: false,
            use_conv_bias: true,
            hidden_act: "silu".to_owned(),
            residual_in_fp32: true,
            tie_word_embeddings: false,
        }
    }
}

impl Architecture for Mamba2 {
    fn model_type(&self) -> &'static str {
        "mamba2"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        check_silu(config, "hidden_act", &fields.hidden_act)?;
        let eps = config.positive("layer_norm_epsilon", fields.layer_norm_epsilon)?;
        let sizes =
            sizes(config, [fields.num_hidden_layers, fields.hidden_size, fields.vocab_size], fields.expand)?;
        let mamba = Mamba2Config {
            hidden: sizes.hidden,
            heads: fields.num_heads,
            head_dim: fields.head_dim,
            groups: fields.n_groups,
            state_dim: fields.state_size,
            conv_width: fields.conv_kernel,
            in_bias: fields.use_bias,
            conv_bias: fields.use_conv_bias,
            out_bias: fields.use_bias,
            step_limits: step_limits(config)?,
            norm: Some(ResultNorm { eps, before_gate: false }),
            factors: Factors::NONE,
        };
        let names = ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"];
        check(config, &mamba, names)?;
        if mamba.values() != sizes.intermediate {
            let why = format!(
                "`num_heads` {} times `head_dim` {} is not `expand` times `hidden_size`, {}",
                mamba.heads, mamba.head_dim, sizes.intermediate
            );
            return Err(config.error(&why));
        }
        let sizes = Sizes { tied: fields.tie_word_embeddings, state_channels: mamba.channels(), ..sizes };
        let mut decoder = DecoderConfig::of_states(Common { sizes, eps }, StateConfig::Mamba2(mamba));
        decoder.float32_residual = fields.residual_in_fp32;
        Ok(Box::new(decoder))
    }
}

/// Checks the sizes of a mixer. `names` are the fields with its numbers of heads, their width, groups, the
/// width of keys, and the width of the convolution.
pub(crate) fn check(config: &ConfigFile, mamba: &Mamba2Config, names: [&str; 5]) -> Result<()> {
    let &Mamba2Config { heads, head_dim, groups, state_dim, conv_width, .. } = mamba;
    let [of_heads, _, of_groups, ..] = names;
    let sizes = [heads, head_dim, groups, state_dim, conv_width];
    let largest = [1 << 14, 1 << 14, heads.max(1), 1 << 12, 1 << 8];
    for ((name, size), largest) in names.into_iter().zip(sizes).zip(largest) {
        config.check(name, size, largest)?;
    }
    if !heads.is_multiple_of(groups) {
        let why = format!("`{of_heads}` {heads} is no multiple of `{of_groups}` {groups}");
        return Err(config.error(&why));
    }
    Ok(())
}

/// Reads `time_step_limit`, the smallest and the largest step size. Returns `None` if these are 0 and
/// infinity.
pub(crate) fn step_limits(config: &ConfigFile) -> Result<Option<[f32; 2]>> {
    const NAME: &str = "time_step_limit";
    let Some(limits) = config.get(NAME) else { return Ok(None) };
    let number = |i: usize| ConfigFile::float(limits.get(i)?).filter(|limit| *limit >= 0.0);
    match (number(0), number(1), limits.get(2)) {
        (Some(smallest), Some(largest), None) if smallest <= largest => {
            let limits = [smallest as f32, largest as f32];
            Ok(Some(limits).filter(|limits| *limits != [0.0, f32::INFINITY]))
        }
        _ => Err(config.error(&format!("`{NAME}` is {limits}, must be two ascending numbers from 0"))),
    }
}
