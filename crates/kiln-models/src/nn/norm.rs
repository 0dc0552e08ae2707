//! RMSNorm (Zhang and Sennrich, 2019).

use burn::tensor::{DType, Device, Tensor};
use kiln_core::Result;
use kiln_kernels::{Kernels, NormOrder};

use crate::{Part, Weights};

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
        Ok(Self { weight: weights.vector(&[Part::new(format!("{name}.weight"), len)])?, kind })
    }

    /// One without weights: it scales by 1.
    pub(crate) fn plain(len: usize, kind: NormKind, options: (&Device, DType)) -> Self {
        Self { weight: Tensor::ones([len], options), kind }
    }

    /// What the weight is held in.
    pub(crate) fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.weight.shape().num_elements() * self.weight.dtype().size()
    }

    /// # Shapes
    /// `[batch, tokens, len]`, unchanged
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let NormKind { eps, order, .. } = self.kind;
        kernels.run(kiln_kernels::RmsNorm { x, weight: self.weight.clone(), eps, order })
    }
}
