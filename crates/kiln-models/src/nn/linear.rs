//! `y = x Wᵀ + b`.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::Kernels;

use crate::Weights;

#[derive(Debug)]
pub(crate) struct Linear {
    /// `[out, in]`, as checkpoints store it
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Linear {
    /// Reads `name.weight` and, if there is to be one, `name.bias`.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        [input, output]: [usize; 2],
        bias: bool,
    ) -> Result<Self> {
        let weight = weights.matrix(&format!("{name}.weight"), [output, input])?;
        let bias = match bias {
            true => Some(weights.vector(&format!("{name}.bias"), output)?),
            false => None,
        };
        Ok(Self { weight, bias })
    }

    /// # Shapes
    /// `[batch, tokens, in]` to `[batch, tokens, out]`
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        kernels.linear(x, self.weight.clone(), self.bias.clone())
    }
}
