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
        // Limits far above any model, and far below the point where the product of two overflows.
        for (name, value, largest) in [
            ("num_hidden_layers", self.num_hidden_layers, 4096),
            ("hidden_size", hidden, 1 << 20),
            ("vocab_size", self.vocab_size, 1 << 24),
            ("state_size", self.state_size, 1 << 12),
            ("conv_kernel", self.conv_kernel, 1 << 8),
            ("expand", self.expand, 1 << 6),
        ] {
            config.check(name, value, largest)?;
        }
        let time_step_rank = time_step_rank(config, "time_step_rank", &self.time_step_rank, hidden)?;
        if !matches!(&*self.hidden_act, "silu" | "swish") {
            let why = format!("`hidden_act` is `{}`; known: silu, swish", self.hidden_act);
            return Err(config.error(&why));
        }
        let eps = config.positive("layer_norm_epsilon", self.layer_norm_epsilon)?;
        // Like transformers, which does not read `intermediate_size`.
        let channels = self.expand * hidden;
        let sizes = Sizes {
            layers: self.num_hidden_layers,
            hidden,
            heads: 0,
            kv_heads: 0,
            head_dim: 0,
            intermediate: channels,
            vocab: self.vocab_size,
            positions: Sizes::ANY_LENGTH,
            tied: self.tie_word_embeddings,
            state_channels: channels,
            experts: None,
        };
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
        let mut decoder = DecoderConfig::mamba(Common { sizes, eps }, mamba);
        decoder.float32_residual = self.residual_in_fp32;
        Ok(decoder)
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
