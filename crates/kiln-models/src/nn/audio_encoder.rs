//! The encoder of Whisper: two convolutions over audio frames, sinusoidal positions, and blocks in which
//! every position sees all others.

use burn::tensor::{DType, Tensor};
use kiln_core::{Error, Result};
use kiln_kernels::{Activate, Activation, Kernels};

use super::{
    attention::Reach,
    block::{Block, BlockConfig},
    decoder::DecoderConfig,
    linear::Linear,
    names::Names,
    norm::Norm,
};
use crate::{Part, Sizes, Weights};

/// Settings of the encoder.
#[derive(Clone, Debug)]
pub(crate) struct AudioEncoderConfig {
    /// Numbers per frame.
    pub(crate) bins: usize,
    /// Number of output positions; there are twice as many frames.
    pub(crate) positions: usize,
    pub(crate) activation: Activation,
    /// Settings of the blocks.
    pub(crate) blocks: DecoderConfig,
}

impl AudioEncoderConfig {
    /// Creates the settings for these sizes. The blocks match the decoder's, without attention to an encoder.
    pub(crate) fn new(bins: usize, sizes: Sizes, eps: f64, activation: Activation) -> Self {
        let positions = sizes.positions;
        let decoder = DecoderConfig::of_encoder(sizes, eps, activation);
        let names = Names { model: "model.encoder", ..decoder.names };
        let mut blocks = DecoderConfig { names, ..decoder };
        blocks.attention_mut().for_each(|attention| attention.cross_attention = false);
        Self { bins, positions, activation, blocks }
    }

    pub(crate) fn frames(&self) -> usize {
        2 * self.positions
    }

    /// Estimates the bytes that the encoder needs for `rows` rows, with elements of `element` bytes.
    pub(crate) fn working_bytes(&self, rows: usize, element: usize) -> usize {
        let Self { bins, positions, blocks, .. } = self;
        let convolutions = 2 * positions * (4 * bins + 5 * blocks.sizes.hidden) * element;
        let in_blocks = positions * blocks.sizes.token_bytes(element);
        rows.saturating_mul(convolutions.max(in_blocks))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct AudioEncoder {
    /// Two convolutions over three neighbouring frames. The second has a stride of 2.
    convolutions: [Linear; 2],
    /// Learned positions `[positions, hidden]`.
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
        for attention in blocks.attention() {
            attention.check(None)?;
            if attention.reach != Reach::All || attention.head_norms.is_some() || attention.cross_attention {
                let why = "has an encoder with windows, norms of heads or an encoder of its own".to_owned();
                return Err(Error::Setting { name: "config", why });
            }
        }
        let norm = Norm::load(weights, &format!("{model}.{norm}"), hidden, blocks.norm)?;
        let mut convolution = |name: &str, channels: usize| -> Result<Linear> {
            let name = format!("{model}.{name}");
            let bias = weights.vector(&[Part::new(format!("{name}.bias"), hidden)])?;
            let weight = weights.float32(&format!("{name}.weight"), &[hidden, channels, 3])?;
            // As one matrix, where the numbers of a neighbour are contiguous.
            let weight =
                weight.reshape([hidden, channels, 3]).swap_dims(1, 2).reshape([hidden, 3 * channels]);
            Ok(Linear::new(weight.cast(norm.dtype()).into(), Some(bias)))
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

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        self.layers.iter_mut().flat_map(Block::linears).collect()
    }

    pub(crate) fn bytes(&self) -> usize {
        let convolutions: usize = self.convolutions.iter().map(Linear::bytes).sum();
        let layers: usize = self.layers.iter().map(|layer| layer.bytes().held).sum();
        let table = self.embed_positions.shape().num_elements() * self.embed_positions.dtype().size();
        convolutions + table + layers + self.norm.bytes()
    }

    /// Encodes audio features.
    ///
    /// # Shapes
    /// `[rows, bins, frames]` to `[rows, positions, hidden]`, with half as many positions as frames.
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
                // Like the reference: the largest number less 1000, so that later sums stay finite.
                x = x.clamp(-64_504.0, 64_504.0);
            }
        }
        Ok(self.norm.forward(x, kernels))
    }
}

/// Pads with a frame of zeros at the start and one at the end.
fn padded(x: Tensor<3>) -> Tensor<3> {
    let [rows, _, width] = x.dims();
    let zeros = Tensor::zeros([rows, 1, width], (&x.device(), x.dtype()));
    Tensor::cat(vec![zeros.clone(), x, zeros], 1)
}

/// Joins each frame with its predecessor and its successor: `[rows, frames, 3 width]`.
fn neighbours(x: Tensor<3>) -> Tensor<3> {
    let frames = x.dims()[1];
    let x = padded(x);
    Tensor::cat((0..3).map(|i| x.clone().narrow(1, i, frames)).collect(), 2)
}

/// Returns [`neighbours`] for every other frame, starting with the first: `[rows, frames / 2, 3 width]`.
fn every_other(x: Tensor<3>) -> Tensor<3> {
    let [rows, frames, width] = x.dims();
    let x = padded(x);
    let two = x.clone().narrow(1, 0, frames).reshape([rows, frames / 2, 2 * width]);
    let third = x.narrow(1, 2, frames).reshape([rows, frames / 2, 2 * width]).narrow(2, 0, width);
    Tensor::cat(vec![two, third], 2)
}
