//! RMSNorm (Zhang and Sennrich, 2019).

use burn::tensor::{DType, Tensor};
use kiln_core::Result;
use kiln_kernels::{Kernels, NormOrder};

use crate::Weights;

/// How all norms of a model are computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormKind {
    pub(crate) eps: f64,
    pub(crate) order: NormOrder,
}

#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor<1>,
    kind: NormKind,
}

impl RmsNorm {
    /// Reads `name.weight`.
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, len: usize, kind: NormKind) -> Result<Self> {
        Ok(Self { weight: weights.vector(&format!("{name}.weight"), len)?, kind })
    }

    /// What the weight is held in.
    pub(crate) fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    /// # Shapes
    /// `[batch, tokens, len]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        kernels.rms_norm(x, self.weight.clone(), self.kind.eps, self.kind.order)
    }

    /// Norms each head on its own.
    ///
    /// # Shapes
    /// `[batch, tokens, heads, len]`, unchanged
    pub(crate) fn forward_heads(&self, x: Tensor<4>, kernels: &Kernels) -> Tensor<4> {
        let [batch, tokens, heads, len] = x.dims();
        let rows = x.reshape([batch, tokens * heads, len]);
        self.forward(rows, kernels).reshape([batch, tokens, heads, len])
    }
}
