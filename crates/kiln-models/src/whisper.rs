//! Whisper (Radford et al., 2022, <https://arxiv.org/abs/2212.04356>; transformers'
//! `WhisperForConditionalGeneration`): an encoder of log-mel features, and a text decoder that attends to the
//! encoder's output.

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Result,
    batch::Batch,
    model::{CausalModel, FeatureShape, Logits, LowRankSource, WeightBytes},
    model_cache::Pass,
    need::LayerNeed,
};
use kiln_kernels::{Kernels, Placement};
use serde::Deserialize;

use crate::{
    Architecture, ConfigFile, Configured, Ropes, Sizes, Weights,
    nn::{
        audio_encoder::{AudioEncoder, AudioEncoderConfig},
        decoder::{Decoder, DecoderConfig, Scale},
        mlp,
        names::TensorNames,
    },
};

#[derive(Debug)]
pub(crate) struct Whisper;

/// Fields of `config.json`, with the defaults of transformers.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Fields {
    vocab_size: usize,
    num_mel_bins: usize,
    d_model: usize,
    encoder_layers: usize,
    encoder_attention_heads: usize,
    encoder_ffn_dim: usize,
    decoder_layers: usize,
    decoder_attention_heads: usize,
    decoder_ffn_dim: usize,
    max_source_positions: usize,
    max_target_positions: usize,
    activation_function: String,
    scale_embedding: bool,
    tie_word_embeddings: bool,
    /// Other names for the encoder's settings; they take precedence if both are present.
    hidden_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            vocab_size: 51_865,
            num_mel_bins: 80,
            d_model: 384,
            encoder_layers: 4,
            encoder_attention_heads: 6,
            encoder_ffn_dim: 1536,
            decoder_layers: 4,
            decoder_attention_heads: 6,
            decoder_ffn_dim: 1536,
            max_source_positions: 1500,
            max_target_positions: 448,
            activation_function: "gelu".to_owned(),
            scale_embedding: false,
            tie_word_embeddings: true,
            hidden_size: None,
            num_hidden_layers: None,
            num_attention_heads: None,
            num_key_value_heads: None,
        }
    }
}

/// Epsilon that layer norms add to the variance; no config overrides it.
const EPS: f64 = 1e-5;

impl Architecture for Whisper {
    fn model_type(&self) -> &'static str {
        "whisper"
    }

    fn configure(&self, config: &ConfigFile) -> Result<Box<dyn Configured>> {
        let mut fields: Fields = config.parse()?;
        let heads = fields.num_attention_heads.or(fields.num_key_value_heads);
        for (field, other) in [
            (&mut fields.d_model, fields.hidden_size),
            (&mut fields.encoder_layers, fields.num_hidden_layers),
            (&mut fields.encoder_attention_heads, heads),
        ] {
            *field = other.unwrap_or(*field);
        }
        // Limits far above any model, and far below the point where the product of two overflows.
        for (name, value, largest) in [
            ("vocab_size", fields.vocab_size, 1 << 24),
            ("num_mel_bins", fields.num_mel_bins, 1 << 10),
            ("d_model", fields.d_model, 1 << 16),
            ("encoder_layers", fields.encoder_layers, 4096),
            ("encoder_attention_heads", fields.encoder_attention_heads, 1 << 12),
            ("encoder_ffn_dim", fields.encoder_ffn_dim, 1 << 20),
            ("decoder_layers", fields.decoder_layers, 4096),
            ("decoder_attention_heads", fields.decoder_attention_heads, 1 << 12),
            ("decoder_ffn_dim", fields.decoder_ffn_dim, 1 << 20),
            ("max_source_positions", fields.max_source_positions, 1 << 16),
            ("max_target_positions", fields.max_target_positions, 1 << 20),
        ] {
            config.check(name, value, largest)?;
        }
        let sizes = |layers: usize, heads: usize, intermediate: usize, positions: usize| {
            if !fields.d_model.is_multiple_of(heads) {
                let why = format!("`d_model` {} is not a multiple of {heads} heads", fields.d_model);
                return Err(config.error(&why));
            }
            Ok(Sizes {
                layers,
                hidden: fields.d_model,
                heads,
                kv_heads: heads,
                head_dim: fields.d_model / heads,
                intermediate,
                vocab: fields.vocab_size,
                positions,
                tied: fields.tie_word_embeddings,
                state_channels: 0,
                experts: None,
            })
        };
        let &Fields { encoder_layers, encoder_attention_heads, encoder_ffn_dim, .. } = &fields;
        let &Fields { decoder_layers, decoder_attention_heads, decoder_ffn_dim, .. } = &fields;
        let of_encoder =
            sizes(encoder_layers, encoder_attention_heads, encoder_ffn_dim, fields.max_source_positions)?;
        let of_decoder =
            sizes(decoder_layers, decoder_attention_heads, decoder_ffn_dim, fields.max_target_positions)?;
        let activation = mlp::activation(config, "activation_function", Some(&fields.activation_function))?;
        let encoder = AudioEncoderConfig::new(fields.num_mel_bins, of_encoder, EPS, activation);
        let mut decoder = DecoderConfig::of_encoder(of_decoder, EPS, activation);
        if fields.scale_embedding {
            decoder.embedding_scale = Some(Scale::Rounded((fields.d_model as f64).sqrt() as f32));
        }
        Ok(Box::new(WhisperConfig { encoder, decoder }))
    }
}

#[derive(Clone, Debug)]
struct WhisperConfig {
    encoder: AudioEncoderConfig,
    decoder: DecoderConfig,
}

impl Configured for WhisperConfig {
    fn sizes(&self) -> Sizes {
        self.decoder.sizes()
    }

    fn needs(&self) -> Vec<LayerNeed> {
        self.decoder.needs()
    }

    fn features(&self) -> Option<FeatureShape> {
        Some(FeatureShape { bins: self.encoder.bins, frames: self.encoder.frames() })
    }

    fn ropes(&self) -> Option<&Ropes> {
        None
    }

    fn tensor_names(&self) -> TensorNames {
        let mut names = self.decoder.tensor_names();
        let of_encoder = self.encoder.blocks.tensor_names();
        names.children.extend(of_encoder.children);
        names.blocks.extend(of_encoder.blocks);
        names
    }

    fn load(&self, weights: &mut dyn Weights, placement: &Placement) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(EncoderDecoder {
            encoder: AudioEncoder::load(&self.encoder, weights)?,
            decoder: Decoder::load(&self.decoder, weights, placement)?,
            config: self.clone(),
            kernels: placement.first().clone(),
        }))
    }
}

/// A decoder with an encoder, which runs once, before the first tokens.
#[derive(Clone, Debug)]
struct EncoderDecoder {
    encoder: AudioEncoder,
    decoder: Decoder,
    config: WhisperConfig,
    kernels: Kernels,
}

impl CausalModel for EncoderDecoder {
    fn needs(&self) -> Vec<LayerNeed> {
        self.decoder.needs()
    }

    fn vocab(&self) -> usize {
        self.decoder.vocab()
    }

    fn element_bytes(&self) -> usize {
        self.decoder.element_bytes()
    }

    fn weight_bytes(&self) -> WeightBytes {
        let decoder = self.decoder.weight_bytes();
        WeightBytes { held: decoder.held + self.encoder.bytes(), ..decoder }
    }

    fn exact_rows(&self) -> usize {
        self.decoder.exact_rows()
    }

    fn ties_embeddings(&self) -> bool {
        self.decoder.ties_embeddings()
    }

    fn can_be_captured(&self) -> bool {
        self.decoder.can_be_captured()
    }

    fn further_devices(&self) -> Vec<Device> {
        self.decoder.further_devices()
    }

    fn features(&self) -> Option<FeatureShape> {
        self.config.features()
    }

    fn max_positions(&self) -> Option<usize> {
        self.decoder.max_positions()
    }

    fn encoding_bytes(&self, rows: usize) -> usize {
        let element = self.element_bytes();
        let kept = self.config.encoder.positions * 2 * self.config.decoder.sizes.hidden * element;
        let kept = kept.saturating_mul(self.config.decoder.sizes.layers).saturating_mul(rows);
        self.config.encoder.working_bytes(rows, element).saturating_add(kept)
    }

    fn working_bytes(&self, rows: usize, tokens: usize) -> usize {
        self.decoder.working_bytes(rows, tokens)
    }

    fn head(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.decoder.head(hidden)
    }

    fn adapt(&mut self, source: &mut dyn LowRankSource, merges: bool) -> Result<()> {
        let mut linears = self.encoder.linears().into_iter().chain(self.decoder.linears());
        linears.try_for_each(|linear| linear.adapt(source, merges))
    }

    fn another(&self) -> Result<Box<dyn CausalModel>> {
        Ok(Box::new(self.clone()))
    }

    fn compute(&self, batch: &Batch, logits: Logits<'_>, pass: &mut Pass<'_>) -> Result<Tensor<3>> {
        if let Some(features) = &batch.features {
            let encoded = self.encoder.forward(features.clone(), &self.kernels)?;
            self.decoder.condition(&encoded, pass)?;
        }
        self.decoder.compute(batch, logits, pass)
    }
}
