//! The gated feed-forward block: `down(act(gate(x)) · up(x))`.

use burn::tensor::{Tensor, activation::silu};
use kiln_core::Result;
use kiln_kernels::Kernels;

use super::linear::Linear;
use crate::{ConfigFile, Sizes, Weights};

/// What architectures say of a feed-forward block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpConfig {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
}

impl MlpConfig {
    /// SiLU, no biases.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, intermediate, .. } = sizes;
        Self { hidden, intermediate, bias: false, activation: Activation::Silu }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activation {
    Silu,
}

impl Activation {
    /// The one that `name` in field `key` means, by transformers' names.
    pub(crate) fn named(config: &ConfigFile, key: &str, name: &str) -> Result<Self> {
        match name {
            "silu" | "swish" => Ok(Self::Silu),
            _ => Err(config.error(&format!("`{key}` is `{name}`; known: silu"))),
        }
    }

    fn forward(self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Silu => silu(x),
        }
    }
}

#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Activation,
}

impl GatedMlp {
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, activation } = config;
        let mut linear = |part: &str, sizes| Linear::load(weights, &format!("{name}.{part}"), sizes, bias);
        Ok(Self {
            gate_proj: linear("gate_proj", [hidden, intermediate])?,
            up_proj: linear("up_proj", [hidden, intermediate])?,
            down_proj: linear("down_proj", [intermediate, hidden])?,
            activation,
        })
    }

    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let gate = self.activation.forward(self.gate_proj.forward(x.clone(), kernels));
        self.down_proj.forward(gate * self.up_proj.forward(x, kernels), kernels)
    }
}
