//! `y = x Wᵀ + b`.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::Kernels;

use crate::{Part, Rows, Weights};

#[derive(Debug)]
pub(crate) struct Linear {
    /// `[out, in]`, as checkpoints store it
    weight: Rows,
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
        Self::stacked(weights, &[(name, output)], input, bias)
    }

    /// Reads several by name and output, which become one matrix: their results come side by side, and take one launch.
    pub(crate) fn stacked(
        weights: &mut dyn Weights,
        parts: &[(&str, usize)],
        input: usize,
        bias: bool,
    ) -> Result<Self> {
        let named = |kind: &str| -> Vec<Part> {
            parts.iter().map(|(name, output)| Part::new(format!("{name}.{kind}"), *output)).collect()
        };
        let weight = weights.rows(&named("weight"), input)?;
        let bias = bias.then(|| weights.vector(&named("bias"))).transpose()?;
        Ok(Self { weight, bias })
    }

    pub(crate) fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.shape().num_elements() * bias.dtype().size());
        self.weight.bytes() + bias
    }

    /// # Shapes
    /// `[batch, tokens, in]` to `[batch, tokens, out]`
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        self.weight.project(x, self.bias.as_ref(), None, kernels)
    }

    /// [`forward`](Self::forward), added to `residual` where there is one, of the shape of the result.
    pub(crate) fn forward_onto(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        kernels: &Kernels,
    ) -> Tensor<3> {
        self.weight.project(x, self.bias.as_ref(), residual, kernels)
    }
}
