//! A decoder of equal blocks, as most language models are: what its architecture says of it, its weights, its pass.

use burn::tensor::{DType, Device, Tensor};
use half::{bf16, f16};
use kiln_core::{
    Result,
    batch::Batch,
    layer::{KvLayer, RowPosition},
    model::{CausalModel, Logits},
    model_cache::{Pass, RowPart},
    need::{AttentionNeed, LayerNeed},
};
use kiln_kernels::{Kernels, NormOrder};

use super::{
    attention::{Attention, AttentionConfig},
    mlp::{GatedMlp, MlpConfig},
    norm::{NormKind, RmsNorm},
    places::Places,
    rope::Ropes,
};
use crate::{Configured, Part, Rows, Sizes, Weights, config::Common};

/// All that architectures say of a decoder.
#[derive(Clone, Debug)]
pub(crate) struct DecoderConfig {
    pub(crate) sizes: Sizes,
    pub(crate) ropes: Ropes,
    pub(crate) norm: NormKind,
    /// Whether what attention and feed-forward add is normed, too.
    pub(crate) norms_after: bool,
    /// Embeddings are multiplied by it, rounded to their type.
    pub(crate) embedding_scale: Option<f32>,
    pub(crate) attention: AttentionConfig,
    /// For each block the latest tokens that it sees, `None` for all of them.
    pub(crate) windows: Vec<Option<usize>>,
    pub(crate) mlp: MlpConfig,
    /// Whether activations stay within float16.
    pub(crate) fits_float16: bool,
    /// Logits `x` become `final_softcap · tanh(x / final_softcap)`.
    pub(crate) final_softcap: Option<f64>,
}

impl DecoderConfig {
    /// What most do: norms before attention and feed-forward alone, SiLU, no biases, no windows.
    pub(crate) fn new(Common { sizes, eps }: Common, ropes: Ropes) -> Self {
        Self {
            attention: AttentionConfig::new(&sizes),
            windows: vec![None; sizes.layers],
            mlp: MlpConfig::new(&sizes),
            norm: NormKind { eps, order: NormOrder::CastThenScale },
            norms_after: false,
            embedding_scale: None,
            fits_float16: true,
            final_softcap: None,
            sizes: Sizes { positions: ropes.full.stretched(sizes.positions), ..sizes },
            ropes,
        }
    }

    /// What all Gemmas have in common.
    pub(crate) fn gemma(common: Common, ropes: Ropes) -> Self {
        let mut decoder = Self::new(common, ropes);
        decoder.norm.order = NormOrder::ScaleThenCast;
        decoder.embedding_scale = Some((decoder.sizes.hidden as f64).sqrt() as f32);
        decoder
    }
}

impl Configured for DecoderConfig {
    fn sizes(&self) -> Sizes {
        self.sizes.clone()
    }

    fn fits_float16(&self) -> bool {
        self.fits_float16
    }

    fn needs(&self) -> Vec<LayerNeed> {
        let Sizes { kv_heads, head_dim, .. } = self.sizes;
        let need = |&window| {
            let rotary = Some(self.ropes.of(window).need());
            LayerNeed::Attention(AttentionNeed { kv_heads, head_dim, window, rotary })
        };
        self.windows.iter().map(need).collect()
    }

    fn ropes(&self) -> Option<&Ropes> {
        Some(&self.ropes)
    }

    fn load(&self, weights: &mut dyn Weights, kernels: &Kernels) -> Result<Box<dyn CausalModel>> {
        let Sizes { hidden, vocab, tied, .. } = self.sizes;
        let embed_tokens = weights.rows(&[Part::new("model.embed_tokens.weight", vocab)], hidden)?;
        let block = |(i, &window): (usize, &Option<usize>)| {
            Block::load(weights, &format!("model.layers.{i}"), window, self)
        };
        let layers: Result<_> = self.windows.iter().enumerate().map(block).collect();
        Ok(Box::new(Decoder {
            layers: layers?,
            norm: RmsNorm::load(weights, "model.norm", hidden, self.norm)?,
            lm_head: match tied {
                true => embed_tokens.clone(),
                false => weights.rows(&[Part::new("lm_head.weight", vocab)], hidden)?,
            },
            embed_tokens,
            config: self.clone(),
            kernels: kernels.clone(),
        }))
    }
}

#[derive(Debug)]
struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    /// `post_attention_layernorm` where there are norms after
    attention_norm: Option<RmsNorm>,
    /// `pre_feedforward_layernorm` where there are norms after, else `post_attention_layernorm`
    mlp_input_norm: RmsNorm,
    mlp: GatedMlp,
    /// `post_feedforward_layernorm`
    mlp_norm: Option<RmsNorm>,
}

impl Block {
    fn load(
        weights: &mut dyn Weights,
        name: &str,
        window: Option<usize>,
        config: &DecoderConfig,
    ) -> Result<Self> {
        let norm = |weights: &mut dyn Weights, part: &str| {
            RmsNorm::load(weights, &format!("{name}.{part}"), config.sizes.hidden, config.norm)
        };
        let mut norm_after = |part: &str| match config.norms_after {
            true => norm(weights, part).map(Some),
            false => Ok(None),
        };
        let attention_norm = norm_after("post_attention_layernorm")?;
        let mlp_norm = norm_after("post_feedforward_layernorm")?;
        let before_mlp =
            if config.norms_after { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        Ok(Self {
            attention_norm,
            mlp_norm,
            input_layernorm: norm(weights, "input_layernorm")?,
            self_attn: Attention::load(
                weights,
                &format!("{name}.self_attn"),
                &config.attention,
                config.norm,
                window,
            )?,
            mlp_input_norm: norm(weights, before_mlp)?,
            mlp: GatedMlp::load(weights, &format!("{name}.mlp"), &config.mlp)?,
        })
    }

    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    fn forward(
        &self,
        x: Tensor<3>,
        places: &mut Places<'_>,
        parts: Vec<RowPart<'_, dyn KvLayer>>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let normed = self.input_layernorm.forward(x.clone(), kernels);
        let x = match &self.attention_norm {
            None => self.self_attn.forward(Some(x), normed, places, parts, kernels)?,
            Some(norm) => {
                x + norm.forward(self.self_attn.forward(None, normed, places, parts, kernels)?, kernels)
            }
        };
        let normed = self.mlp_input_norm.forward(x.clone(), kernels);
        Ok(match &self.mlp_norm {
            None => self.mlp.forward(Some(x), normed, kernels),
            Some(norm) => x + norm.forward(self.mlp.forward(None, normed, kernels), kernels),
        })
    }
}

#[derive(Debug)]
struct Decoder {
    embed_tokens: Rows,
    layers: Vec<Block>,
    norm: RmsNorm,
    lm_head: Rows,
    config: DecoderConfig,
    kernels: Kernels,
}

impl CausalModel for Decoder {
    fn needs(&self) -> Vec<LayerNeed> {
        self.config.needs()
    }

    fn vocab(&self) -> usize {
        self.config.sizes.vocab
    }

    fn element_bytes(&self) -> usize {
        self.norm.dtype().size()
    }

    fn working_bytes(&self, rows: usize, tokens: usize) -> usize {
        self.config.sizes.working_bytes(rows, tokens, self.element_bytes())
    }

    fn rotary_tables(
        &self,
        rows: &[RowPosition],
        steps: usize,
        device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        let ropes = self.config.ropes.all();
        ropes.map(|rope| rope.step_tables(rows, steps, device)).collect()
    }

    fn compute(&self, batch: &Batch, logits: Logits, pass: &mut Pass<'_>) -> Result<Tensor<3>> {
        let kernels = &self.kernels;
        let mut places = Places::new(batch, &self.config.ropes);
        let mut x = self.embed_tokens.select(batch.tokens.clone());
        if let Some(scale) = self.config.embedding_scale {
            let scale = rounded(scale, x.dtype());
            x = x * scale;
        }
        for (i, block) in self.layers.iter().enumerate() {
            x = block.forward(x, &mut places, pass.attention(i)?, kernels)?;
        }
        let x = match logits {
            Logits::Last => x.narrow(1, batch.len() - 1, 1),
            Logits::All => x,
        };
        let logits =
            self.lm_head.project(self.norm.forward(x, kernels), None, None, kernels).cast(DType::F32);
        Ok(match self.config.final_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        })
    }
}

/// `value` as a tensor of type `dtype` would hold it.
fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedding_scale_is_rounded_as_the_reference_rounds_it() {
        let scale = (3072f64).sqrt() as f32;
        assert_eq!(rounded(scale, DType::BF16), 55.5);
        assert_eq!(rounded(scale, DType::F16), 55.4375);
        assert_eq!(rounded(scale, DType::F32), scale);
    }
}
