//! RMSNorm (Zhang and Sennrich, 2019), in Llama's order of casts.

use burn::tensor::Tensor;
use kiln_core::Result;
use kiln_kernels::{Kernels, NormOrder};

use crate::Weights;

#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor<1>,
    eps: f64,
    order: NormOrder,
}

impl RmsNorm {
    /// Reads `name.weight`.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        len: usize,
        eps: f64,
        order: NormOrder,
    ) -> Result<Self> {
        Ok(Self { weight: weights.vector(&format!("{name}.weight"), len)?, eps, order })
    }

    /// # Shapes
    /// `[batch, tokens, len]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        kernels.rms_norm(x, self.weight.clone(), self.eps, self.order)
    }
}
