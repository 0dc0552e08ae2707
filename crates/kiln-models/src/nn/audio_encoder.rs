//! The encoder of Whisper: two convolutions over frames of sound, sinusoidal positions, blocks in which every position sees all
//! others.

use burn::tensor::{DType, Tensor};
use kiln_core::Result;
use kiln_kernels::{Activate, Activation, Kernels};

use super::{
    block::{Block, BlockConfig, FeedForwardConfig, MixerConfig},
    decoder::DecoderConfig,
    linear::Linear,
    names::Names,
    norm::Norm,
};
use crate::{Part, Sizes, Weights};

/// What a checkpoint says of the encoder.
#[derive(Clone, Debug)]
pub(crate) struct AudioEncoderConfig {
    /// Numbers of a frame.
    pub(crate) bins: usize,
    /// Of the result: frames are twice as many.
    pub(crate) positions: usize,
    pub(crate) activation: Activation,
    /// Of its blocks.
    pub(crate) blocks: DecoderConfig,
}

impl AudioEncoderConfig {
    /// One of these sizes, with blocks as the decoder has them, but for attention to an encoder.
    pub(crate) fn new(bins: usize, sizes: Sizes, eps: f64, activation: Activation) -> Self {
        let positions = sizes.positions;
        let block = BlockConfig {
            feed_forward: Some(FeedForwardConfig::Plain),
            ..BlockConfig::alone(MixerConfig::Attention { window: None })
        };
        let decoder = DecoderConfig::of_encoder(sizes, eps, activation);
        let names = Names { model: "model.encoder", ..decoder.names };
        let blocks = DecoderConfig { blocks: vec![block; decoder.sizes.layers], names, ..decoder };
        Self { bins, positions, activation, blocks }
    }

    pub(crate) fn frames(&self) -> usize {
        2 * self.positions
    }

    /// Bytes that it takes for `rows` rows, in elements of `element` bytes.
    pub(crate) fn working_bytes(&self, rows: usize, element: usize) -> usize {
        let Self { bins, positions, blocks, .. } = self;
        let convolutions = 2 * positions * (4 * bins + 5 * blocks.sizes.hidden) * element;
        let in_blocks = positions * blocks.sizes.token_bytes(element);
        rows.saturating_mul(convolutions.max(in_blocks))
    }
}

#[derive(Debug)]
pub(crate) struct AudioEncoder {
    /// Each over three neighbours. The second takes every other.
    convolutions: [Linear; 2],
    /// `[positions, hidden]`
    embed_positions: Tensor<2>,
    layers: Vec<Block>,
    norm: Norm,
    config: AudioEncoderConfig,
}

impl AudioEncoder {
    pub(crate) fn load(config: &AudioEncoderConfig, weights: &mut dyn Weights) -> Result<Self> {
        let AudioEncoderConfig { bins, positions, blocks, .. } = config;
        let Names { model, norm, .. } = blocks.names;
        let hidden = blocks.sizes.hidden;
        let norm = Norm::load(weights, &format!("{model}.{norm}"), hidden, blocks.norm)?;
        let mut convolution = |name: &str, channels: usize| -> Result<Linear> {
            let name = format!("{model}.{name}");
            let bias = weights.vector(&[Part::new(format!("{name}.bias"), hidden)])?;
            let weight = weights.float32(&format!("{name}.weight"), &[hidden, channels, 3])?;
            // As one matrix: the numbers of a neighbour are next to each other.
            let weight =
                weight.reshape([hidden, channels, 3]).swap_dims(1, 2).reshape([hidden, 3 * channels]);
            Ok(Linear::new(weight.cast(norm.dtype()), bias))
        };
        let convolutions = [convolution("conv1", *bins)?, convolution("conv2", hidden)?];
        let table = weights.float32(&format!("{model}.embed_positions.weight"), &[*positions, hidden])?;
        let embed_positions = table.reshape([*positions, hidden]).cast(norm.dtype());
        let block = |(i, block): (usize, &BlockConfig)| {
            Block::load(weights, &format!("{model}.layers.{i}"), block, blocks)
        };
        let layers = blocks.blocks.iter().enumerate().map(block).collect::<Result<_>>()?;
        Ok(Self { convolutions, embed_positions, layers, norm, config: config.clone() })
    }

    pub(crate) fn bytes(&self) -> usize {
        let convolutions: usize = self.convolutions.iter().map(Linear::bytes).sum();
        let layers: usize = self.layers.iter().map(|layer| layer.bytes().held).sum();
        let table = self.embed_positions.shape().num_elements() * self.embed_positions.dtype().size();
        convolutions + table + layers + self.norm.bytes()
    }

    /// # Shapes
    /// `[rows, bins, frames]` to `[rows, positions, hidden]`, with half as many positions as frames
    pub(crate) fn forward(&self, features: Tensor<3>, kernels: &Kernels) -> Result<Tensor<3>> {
        let dtype = self.norm.dtype();
        let [narrow, strided] = &self.convolutions;
        let activation = self.config.activation;
        let activate = |x| kernels.run(Activate { x, activation });
        let x = features.cast(dtype).swap_dims(1, 2);
        let x = activate(narrow.forward(neighbours(x), kernels));
        let x = activate(strided.forward(every_other(x), kernels));
        let mut x = x + self.embed_positions.clone().unsqueeze::<3>();
        for layer in &self.layers {
            x = layer.encode(x, kernels)?;
            if dtype == DType::F16 {
                // As the reference does: the largest number less 1000, so that what is added to it stays a number.
                x = x.clamp(-64_504.0, 64_504.0);
            }
        }
        Ok(self.norm.forward(x, kernels))
    }
}

/// With a frame of zeros before the first and one behind the last.
fn padded(x: Tensor<3>) -> Tensor<3> {
    let [rows, _, width] = x.dims();
    let zeros = Tensor::zeros([rows, 1, width], (&x.device(), x.dtype()));
    Tensor::cat(vec![zeros.clone(), x, zeros], 1)
}

/// Of each frame, that before it, itself, and that behind it: `[rows, frames, 3 width]`.
fn neighbours(x: Tensor<3>) -> Tensor<3> {
    let frames = x.dims()[1];
    let x = padded(x);
    Tensor::cat((0..3).map(|i| x.clone().narrow(1, i, frames)).collect(), 2)
}

/// [`neighbours`] of every other frame, the first among them: `[rows, frames / 2, 3 width]`.
fn every_other(x: Tensor<3>) -> Tensor<3> {
    let [rows, frames, width] = x.dims();
    let x = padded(x);
    let two = x.clone().narrow(1, 0, frames).reshape([rows, frames / 2, 2 * width]);
    let third = x.narrow(1, 2, frames).reshape([rows, frames / 2, 2 * width]).narrow(2, 0, width);
    Tensor::cat(vec![two, third], 2)
}
