//! Mamba (Gu and Dao, 2023; transformers' `MambaForCausalLM`): blocks that consist of a state-space mixer
//! alone and remember a state of constant size. There is neither attention nor a feed-forward, and sequences
//! may have any length.

use kiln_core::Result;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Architecture, ConfigFile, Configured, Sizes,
    config::Common,
    nn::{
        block::StateConfig,
        decoder::DecoderConfig,
        mamba::{MambaConfig, MixerNorms},
    },
};

#[derive(Debug)]
pub(crate) struct Mamba;

/// Fields of `config.json`, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    state_size: usize,
    num_hidden_layers: usize,
    layer_norm_epsilon: f64,
    expand: usize,
    conv_kernel: usize,
    use_bias: bool,
    use_conv_bias: bool,
    hidden_act: String,
    residual_in_fp32: bool,
    /// A number, or `auto` for a sixteenth of the hidden size.
    time_step_rank: Value,
    tie_word_embeddings: bool,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            vocab_size: 50_280,
            hidden_size: 768,
            state_size: 16,
            num_hidden_layers: 32,
            layer_norm_epsilon: 1e-5,
            expand: 2,
            conv_kernel: 4,
            use_bias: false,
            use_conv_bias: true,
            hidden_act: "silu".to_owned(),
            residual_in_fp32: true,
            time_step_rank: "auto".into(),
            tie_word_embeddings: true,
        }
    }
}

impl Architecture for Mamba {
    fn model_type(&self) -> &'static str {
        "mamba"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let fields: Fields = config.parse()?;
        Ok(Box::new(fields.decoder(config, MixerNorms::None)?))
    }
}

impl Fields {
    /// Returns the decoder's config. `norms` are the additional norms of the mixer.
    pub(crate) fn decoder(self, config: &ConfigFile, norms: MixerNorms) -> Result<DecoderConfig> {
        let hidden = self.hidden_size;
        config.check("state_size", self.state_size, 1 << 12)?;
        config.check("conv_kernel", self.conv_kernel, 1 << 8)?;
        let time_step_rank = time_step_rank(config, "time_step_rank", &self.time_step_rank, hidden)?;
        check_silu(config, "hidden_act", &self.hidden_act)?;
        let eps = config.positive("layer_norm_epsilon", self.layer_norm_epsilon)?;
        let sizes = sizes(config, [self.num_hidden_layers, hidden, self.vocab_size], self.expand)?;
        // Like transformers, which does not read `intermediate_size`.
        let channels = sizes.intermediate;
        let sizes = Sizes { tied: self.tie_word_embeddings, state_channels: channels, ..sizes };
        let mamba = MambaConfig {
            hidden,
            channels,
            state_dim: self.state_size,
            conv_width: self.conv_kernel,
            time_step_rank,
            bias: self.use_bias,
            conv_bias: self.use_conv_bias,
            norms,
        };
        let mut decoder = DecoderConfig::of_states(Common { sizes, eps }, StateConfig::Mamba(mamba));
        decoder.float32_residual = self.residual_in_fp32;
        Ok(decoder)
    }
}

/// Returns the sizes of a model without attention, whose mixers are `expand` times as wide as hidden states.
///
/// # Errors
/// [`Error::File`](kiln_core::Error::File) for an impossible number of layers, hidden states or tokens.
pub(crate) fn sizes(
    config: &ConfigFile,
    [layers, hidden, vocab]: [usize; 3],
    expand: usize,
) -> Result<Sizes> {
    // Limits far above any model, and far below the point where the product of two overflows.
    for (name, value, largest) in [
        ("num_hidden_layers", layers, 4096),
        ("hidden_size", hidden, 1 << 20),
        ("vocab_size", vocab, 1 << 24),
        ("expand", expand, 1 << 6),
    ] {
        config.check(name, value, largest)?;
    }
    let intermediate = expand * hidden;
    Ok(Sizes {
        layers,
        hidden,
        heads: 0,
        kv_heads: 0,
        head_dim: 0,
        intermediate,
        vocab,
        positions: Sizes::ANY_LENGTH,
        tied: false,
        state_channels: intermediate,
        experts: None,
    })
}

/// Checks that the activation in field `name` is the one that mixers have.
pub(crate) fn check_silu(config: &ConfigFile, name: &str, activation: &str) -> Result<()> {
    match activation {
        "silu" | "swish" => Ok(()),
        _ => Err(config.error(&format!("`{name}` is `{activation}`; known: silu, swish"))),
    }
}

/// Parses the number in field `name`; `auto` stands for a sixteenth of the hidden size.
pub(crate) fn time_step_rank(config: &ConfigFile, name: &str, value: &Value, hidden: usize) -> Result<usize> {
    let rank = match value {
        Value::String(auto) if auto == "auto" => hidden.div_ceil(16),
        rank => {
            let rank = rank.as_u64().and_then(|rank| usize::try_from(rank).ok());
            rank.ok_or_else(|| config.error(&format!("`{name}` is neither `auto` nor a number")))?
        }
    };
    config.check(name, rank, 1 << 20)?;
    Ok(rank)
}
