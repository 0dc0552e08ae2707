//! The gated feed-forward block: `down(act(gate(x)) · up(x))`.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::{Activation, Kernels};

use super::linear::Linear;
use crate::{ConfigFile, Rows, Sizes, Weights};

/// What architectures say of a feed-forward block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpConfig {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) bias: bool,
    /// Whether both projections into the block are one matrix, `gate_up_proj`.
    pub(crate) fused: bool,
    pub(crate) activation: Activation,
}

impl MlpConfig {
    /// Three matrices, SiLU, no biases.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, intermediate, .. } = sizes;
        Self { hidden, intermediate, bias: false, fused: false, activation: Activation::Silu }
    }
}

/// The activation that `name` in field `key` means, by transformers' names.
pub(crate) fn activation(config: &ConfigFile, key: &str, name: &str) -> Result<Activation> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        _ => {
            let known = "known: silu, swish, gelu, gelu_pytorch_tanh, gelu_new";
            Err(config.error(&format!("`{key}` is `{name}`; {known}")))
        }
    }
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one a block, and never moved")]
enum Projections {
    Two { gate_proj: Linear, up_proj: Linear },
    One { gate_up_proj: Rows },
}

#[derive(Debug)]
pub(crate) struct GatedMlp {
    projections: Projections,
    down_proj: Linear,
    activation: Activation,
}

impl GatedMlp {
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, fused, activation } = config;
        let linear = |weights: &mut dyn Weights, part: &str, sizes| {
            Linear::load(weights, &format!("{name}.{part}"), sizes, bias)
        };
        let projections = match fused {
            false => Projections::Two {
                gate_proj: linear(weights, "gate_proj", [hidden, intermediate])?,
                up_proj: linear(weights, "up_proj", [hidden, intermediate])?,
            },
            true => {
                let shape = [2 * intermediate, hidden];
                Projections::One {
                    gate_up_proj: weights.rows(&format!("{name}.gate_up_proj.weight"), shape)?,
                }
            }
        };
        let down_proj = linear(weights, "down_proj", [intermediate, hidden])?;
        Ok(Self { projections, down_proj, activation })
    }

    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let (gate, up) = match &self.projections {
            Projections::Two { gate_proj, up_proj } => {
                (gate_proj.forward(x.clone(), kernels), up_proj.forward(x, kernels))
            }
            Projections::One { gate_up_proj } => {
                let both = gate_up_proj.project(x, kernels);
                let half = both.dims()[2] / 2;
                (both.clone().narrow(2, 0, half), both.narrow(2, half, half))
            }
        };
        self.down_proj.forward(kernels.gated(gate, up, self.activation), kernels)
    }
}
