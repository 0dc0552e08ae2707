//! Feed-forward blocks: with a gate, `down(act(gate(x)) · up(x))`, and without, `fc2(act(fc1(x)))`.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::{Activate, Activation, Gate, Gated, Kernels, Then};

use super::{linear::Linear, norm::Normed};
use crate::{ConfigFile, Sizes, Weights};

/// Settings of a feed-forward block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpConfig {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) bias: bool,
    /// Whether both input projections are stored as one matrix, `gate_up_proj`.
    pub(crate) fused: bool,
    /// Names of the projections to the gate and to the values, and of the output projection.
    pub(crate) names: [&'static str; 3],
    pub(crate) activation: Activation,
}

/// Most common names of the projections.
const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl MlpConfig {
    /// Creates settings with three matrices, SiLU, and no biases.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, intermediate, .. } = sizes;
        Self { hidden, intermediate, bias: false, fused: false, names: NAMES, activation: Activation::Silu }
    }
}

/// Parses transformers' `name` of an activation, by default SiLU; `key` is its config field.
pub(crate) fn activation(config: &ConfigFile, key: &str, name: Option<&str>) -> Result<Activation> {
    let name = name.unwrap_or("silu");
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        _ => {
            let known = "known: silu, swish, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast";
            Err(config.error(&format!("`{key}` is `{name}`; {known}")))
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct GatedMlp {
    /// `gate_proj` and `up_proj`, stacked.
    gate_up_proj: Linear,
    down_proj: Linear,
    by: Gate,
}

impl GatedMlp {
    pub(crate) fn new(gate_up_proj: Linear, down_proj: Linear, by: Gate) -> Self {
        Self { gate_up_proj, down_proj, by }
    }

    pub(crate) fn load(weights: &mut dyn Weights, name: &str, config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, fused, names, activation } = config;
        let part = |part: &str| format!("{name}.{part}");
        let ([gate, up, down], both) = (names.map(part), part("gate_up_proj"));
        let parts: &[(&str, usize)] = match fused {
            false => &[(&gate, intermediate), (&up, intermediate)],
            true => &[(&both, 2 * intermediate)],
        };
        let gate_up_proj = Linear::stacked(weights, parts, hidden, bias)?;
        let down_proj = Linear::load(weights, &down, [intermediate, hidden], bias)?;
        Ok(Self { gate_up_proj, down_proj, by: activation.into() })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.gate_up_proj.bytes() + self.down_proj.bytes()
    }

    /// Applies the feed-forward to `x`, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn forward(&self, residual: Option<Tensor<3>>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        self.down_proj.forward_onto(residual, self.gated(x, kernels), kernels)
    }

    /// Applies [`forward`](Self::forward) to vectors that are not normed yet.
    pub(crate) fn forward_normed(
        &self,
        residual: Option<Tensor<3>>,
        normed: Normed<'_>,
        kernels: &Kernels,
    ) -> Tensor<3> {
        let fused = match self.by {
            Gate::Activated(activation) => self.gate_up_proj.fused(&normed, Then::Gate(activation), kernels),
            Gate::Clamped { .. } => None,
        };
        let gated = fused.unwrap_or_else(|| self.gated(normed.compute(kernels), kernels));
        self.down_proj.forward_onto(residual, gated, kernels)
    }

    /// Computes the input of the second projection.
    fn gated(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let both = self.gate_up_proj.forward(x, kernels);
        let half = both.dims()[2] / 2;
        let (gate, up) = (both.clone().narrow(2, 0, half), both.narrow(2, half, half));
        kernels.run(Gated { gate, up, by: self.by })
    }
}

/// Two projections without a gate.
#[derive(Debug)]
pub(crate) struct PlainMlp {
    fc1: Linear,
    fc2: Linear,
    activation: Activation,
}

impl PlainMlp {
    /// Reads the projections with these names.
    pub(crate) fn load(weights: &mut dyn Weights, names: [String; 2], config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, activation, .. } = config;
        let [fc1, fc2] = names;
        let fc1 = Linear::load(weights, &fc1, [hidden, intermediate], bias)?;
        let fc2 = Linear::load(weights, &fc2, [intermediate, hidden], bias)?;
        Ok(Self { fc1, fc2, activation })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.fc1.bytes() + self.fc2.bytes()
    }

    /// Applies the feed-forward to `x`, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn forward(&self, residual: Option<Tensor<3>>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let x = self.fc1.forward(x, kernels);
        self.fc2.forward_onto(residual, kernels.run(Activate { x, activation: self.activation }), kernels)
    }
}
