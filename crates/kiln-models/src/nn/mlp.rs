//! The gated feed-forward block: `down(act(gate(x)) · up(x))`.

use std::f64::consts::PI;

use burn::tensor::{
    DType, Tensor,
    activation::{gelu, silu},
};
use kiln_core::Result;
use kiln_kernels::Kernels;

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

/// The function between the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x Φ(x)` (Hendrycks and Gimpel, 2016)
    Gelu,
    /// Its approximation, `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`
    GeluTanh,
}

impl Activation {
    /// The one that `name` in field `key` means, by transformers' names.
    pub(crate) fn named(config: &ConfigFile, key: &str, name: &str) -> Result<Self> {
        match name {
            "silu" | "swish" => Ok(Self::Silu),
            "gelu" => Ok(Self::Gelu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Self::GeluTanh),
            _ => {
                let known = "known: silu, swish, gelu, gelu_pytorch_tanh, gelu_new";
                Err(config.error(&format!("`{key}` is `{name}`; {known}")))
            }
        }
    }

    fn forward(self, x: Tensor<3>) -> Tensor<3> {
        // The reference computes each in float32 and rounds once.
        let dtype = x.dtype();
        match self {
            Self::Silu => silu(x),
            Self::Gelu => gelu(x.cast(DType::F32)).cast(dtype),
            Self::GeluTanh => {
                let x = x.cast(DType::F32);
                // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)): fewer operations, and no tanh of large numbers.
                let u = (x.clone().square() * 0.044715 + 1.0) * x.clone() * (2.0 / PI).sqrt();
                (x / ((u * -2.0).exp() + 1.0)).cast(dtype)
            }
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
        self.down_proj.forward(self.activation.forward(gate) * up, kernels)
    }
}
