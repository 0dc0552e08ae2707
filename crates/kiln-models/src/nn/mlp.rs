//! Feed-forward blocks: with a gate, `down(act(gate(x)) · up(x))`, and without, `fc2(act(fc1(x)))`.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::{Activate, Activation, Gate, Gated, Kernels, Then};

use super::{
    linear::{Factors, Linear},
    norm::Normed,
};
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
    /// Factors of hidden states, of gate and values, and of the output.
    pub(crate) factors: Factors<2>,
    pub(crate) activation: Activation,
}

/// Most common names of the projections.
const NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl MlpConfig {
    /// Creates settings with three matrices, SiLU, and no biases.
    pub(crate) fn new(sizes: &Sizes) -> Self {
        let &Sizes { hidden, intermediate, .. } = sizes;
        Self {
            hidden,
            intermediate,
            bias: false,
            fused: false,
            names: NAMES,
            factors: Factors::NONE,
            activation: Activation::Silu,
        }
    }
}

/// Parses transformers' `name` of an activation, by default SiLU; `key` is its config field.
pub(crate) fn activation(config: &ConfigFile, key: &str, name: Option<&str>) -> Result<Activation> {
    let name = name.unwrap_or("silu");
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Activation::GeluTanh),
        "relu2" => Ok(Activation::ReluSquared),
        _ => {
            let known = "known: silu, swish, gelu, gelu_pytorch_tanh, gelu_new, gelu_fast, relu2";
            Err(config.error(&format!("`{key}` is `{name}`; {known}")))
        }
    }
}

/// The step between the projections of a feed-forward.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Between {
    /// The first projection has gates, followed by as many values.
    Gate(Gate),
    Activation(Activation),
}

impl Between {
    /// Applies the step to the result of the first projection.
    pub(crate) fn apply(self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        match self {
            Self::Gate(by) => {
                let half = x.dims()[2] / 2;
                let (gate, up) = (x.clone().narrow(2, 0, half), x.narrow(2, half, half));
                kernels.run(Gated { gate, up, by })
            }
            Self::Activation(activation) => kernels.run(Activate { x, activation }),
        }
    }
}

/// A feed-forward.
#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    /// The first projection: gate and values, stacked, or values alone.
    up_proj: Linear,
    between: Between,
    down_proj: Linear,
}

impl Mlp {
    pub(crate) fn new(up_proj: Linear, between: Between, down_proj: Linear) -> Self {
        Self { up_proj, between, down_proj }
    }

    /// Reads the projections of a feed-forward with a gate, in module `name`.
    pub(crate) fn gated(weights: &mut dyn Weights, name: &str, config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, fused, names, factors, activation } = config;
        let part = |part: &str| format!("{name}.{part}");
        let ([gate, up, down], both) = (names.map(part), part("gate_up_proj"));
        let parts: &[(&str, usize)] = match fused {
            false => &[(&gate, intermediate), (&up, intermediate)],
            true => &[(&both, 2 * intermediate)],
        };
        let up_proj = Linear::stacked(weights, parts, hidden, bias)?;
        let down_proj = Linear::load(weights, &down, [intermediate, hidden], bias)?;
        let up_proj = up_proj.times(factors.input, &factors.parts.map(|factor| (factor, intermediate)));
        let down_proj = down_proj.times(1.0, &[(factors.output, hidden)]);
        Ok(Self { up_proj, between: Between::Gate(activation.into()), down_proj })
    }

    /// Reads the projections with these names, of a feed-forward without a gate.
    pub(crate) fn plain(weights: &mut dyn Weights, names: [String; 2], config: &MlpConfig) -> Result<Self> {
        let &MlpConfig { hidden, intermediate, bias, activation, .. } = config;
        let [up, down] = names;
        let up_proj = Linear::load(weights, &up, [hidden, intermediate], bias)?;
        let down_proj = Linear::load(weights, &down, [intermediate, hidden], bias)?;
        Ok(Self { up_proj, between: Between::Activation(activation), down_proj })
    }

    /// The projections that an adapter may change.
    pub(crate) fn linears(&mut self) -> Vec<&mut Linear> {
        [&mut self.up_proj, &mut self.down_proj].into()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.up_proj.bytes() + self.down_proj.bytes()
    }

    /// Applies the feed-forward to `x`, and adds `residual` if there is one.
    ///
    /// # Shapes
    /// All tensors are `[batch, tokens, hidden]`.
    pub(crate) fn forward(&self, residual: Option<Tensor<3>>, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let inner = self.between.apply(self.up_proj.forward(x, kernels), kernels);
        self.down_proj.forward_onto(residual, inner, kernels)
    }

    /// Applies [`forward`](Self::forward) to vectors that are not normed yet.
    pub(crate) fn forward_normed(
        &self,
        residual: Option<Tensor<3>>,
        normed: Normed<'_>,
        kernels: &Kernels,
    ) -> Tensor<3> {
        let fused = match self.between {
            Between::Gate(Gate::Activated(activation)) => {
                self.up_proj.fused(&normed, Then::Gate(activation), kernels)
            }
            Between::Gate(Gate::Clamped { .. }) | Between::Activation(_) => None,
        };
        match fused {
            Some(inner) => self.down_proj.forward_onto(residual, inner, kernels),
            None => self.forward(residual, normed.compute(kernels), kernels),
        }
    }
}
