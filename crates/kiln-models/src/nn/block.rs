//! A block: a mixer, which looks at other tokens, and a feed-forward, which does not.

use burn::tensor::Tensor;
use kiln_core::{Result, model_cache::Pass};
use kiln_kernels::Kernels;

use super::{attention::Attention, decoder::DecoderConfig, mlp::GatedMlp, norm::RmsNorm, places::Places};
use crate::Weights;

/// What looks at other tokens.
#[derive(Debug)]
enum Mixer {
    Attention(Attention),
}

/// What a token goes through by itself.
#[derive(Debug)]
enum FeedForward {
    Gated(GatedMlp),
}

#[derive(Debug)]
pub(crate) struct Block {
    input_norm: RmsNorm,
    mixer: Mixer,
    /// Of what the mixer adds, where there are norms after.
    mixer_norm: Option<RmsNorm>,
    feed_forward_input_norm: RmsNorm,
    feed_forward: FeedForward,
    feed_forward_norm: Option<RmsNorm>,
}

impl Block {
    /// Reads the weights of block `name`.
    pub(crate) fn load(
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
        let mixer_norm = norm_after("post_attention_layernorm")?;
        let feed_forward_norm = norm_after("post_feedforward_layernorm")?;
        let before_feed_forward =
            if config.norms_after { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        let attention = format!("{name}.self_attn");
        Ok(Self {
            mixer_norm,
            feed_forward_norm,
            input_norm: norm(weights, "input_layernorm")?,
            mixer: Mixer::Attention(Attention::load(
                weights,
                &attention,
                &config.attention,
                config.norm,
                window,
            )?),
            feed_forward_input_norm: norm(weights, before_feed_forward)?,
            feed_forward: FeedForward::Gated(GatedMlp::load(weights, &format!("{name}.mlp"), &config.mlp)?),
        })
    }

    /// What it makes of `x`; `layer` is its number, by which it reaches its memory.
    ///
    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        layer: usize,
        places: &mut Places<'_>,
        pass: &mut Pass<'_>,
        kernels: &Kernels,
    ) -> Result<Tensor<3>> {
        let normed = self.input_norm.forward(x.clone(), kernels);
        let mix = |residual| match &self.mixer {
            Mixer::Attention(attention) => {
                attention.forward(residual, normed, places, pass.attention(layer)?, kernels)
            }
        };
        let x = match &self.mixer_norm {
            None => mix(Some(x))?,
            Some(norm) => x + norm.forward(mix(None)?, kernels),
        };
        let normed = self.feed_forward_input_norm.forward(x.clone(), kernels);
        let feed = |residual| match &self.feed_forward {
            FeedForward::Gated(gated) => gated.forward(residual, normed, kernels),
        };
        Ok(match &self.feed_forward_norm {
            None => feed(Some(x)),
            Some(norm) => x + norm.forward(feed(None), kernels),
        })
    }

    /// Bytes of its weights.
    pub(crate) fn bytes(&self) -> usize {
        let norms = [&self.input_norm, &self.feed_forward_input_norm];
        let norms = norms.into_iter().chain(&self.mixer_norm).chain(&self.feed_forward_norm);
        let mixer = match &self.mixer {
            Mixer::Attention(attention) => attention.bytes(),
        };
        let feed_forward = match &self.feed_forward {
            FeedForward::Gated(gated) => gated.bytes(),
        };
        norms.map(RmsNorm::bytes).sum::<usize>() + mixer + feed_forward
    }
}
