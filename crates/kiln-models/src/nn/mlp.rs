//! The gated feed-forward block: `down(silu(gate(x)) · up(x))`.

use burn::tensor::{Tensor, activation::silu};
use kiln_core::Result;
use kiln_kernels::Kernels;

use super::linear::Linear;
use crate::Weights;

#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl GatedMlp {
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        hidden: usize,
        intermediate: usize,
        bias: bool,
    ) -> Result<Self> {
        let mut linear = |part: &str, sizes| Linear::load(weights, &format!("{name}.{part}"), sizes, bias);
        Ok(Self {
            gate_proj: linear("gate_proj", [hidden, intermediate])?,
            up_proj: linear("up_proj", [hidden, intermediate])?,
            down_proj: linear("down_proj", [intermediate, hidden])?,
        })
    }

    /// # Shapes
    /// `[batch, tokens, hidden]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let gate = silu(self.gate_proj.forward(x.clone(), kernels));
        self.down_proj.forward(gate * self.up_proj.forward(x, kernels), kernels)
    }
}
