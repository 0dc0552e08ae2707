//! RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016).

use burn::tensor::{DType, Device, Tensor};
use kiln_core::Result;
use kiln_kernels::{Kernels, LayerNorm, NormOrder, RmsNorm};

use crate::{Part, Weights};

/// The kind of all norms in a model.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NormKind {
    Rms {
        eps: f64,
        order: NormOrder,
    },
    Layer {
        eps: f64,
        /// Whether there is a bias in addition to the weight.
        bias: bool,
    },
}

impl NormKind {
    /// Returns the RMSNorm of most models.
    pub(crate) fn rms(eps: f64) -> Self {
        Self::Rms { eps, order: NormOrder::CastThenScale }
    }
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there are a few in each block")]
pub(crate) enum Norm {
    Rms { weight: Tensor<1>, eps: f64, order: NormOrder },
    Layer { weight: Tensor<1>, bias: Tensor<1>, eps: f64 },
}

impl Norm {
    /// Reads `name.weight`, and `name.bias` if there is one.
    pub(crate) fn load(weights: &mut dyn Weights, name: &str, len: usize, kind: NormKind) -> Result<Self> {
        let mut vector = |part: &str| weights.vector(&[Part::new(format!("{name}.{part}"), len)]);
        let weight = vector("weight")?;
        Ok(match kind {
            NormKind::Rms { eps, order } => Self::Rms { weight, eps, order },
            NormKind::Layer { eps, bias } => {
                let bias = if bias { vector("bias")? } else { weight.zeros_like() };
                Self::Layer { weight, bias, eps }
            }
        })
    }

    /// Creates an RMSNorm without weights: it scales by 1.
    pub(crate) fn plain(len: usize, eps: f64, options: (&Device, DType)) -> Self {
        Self::Rms { weight: Tensor::ones([len], options), eps, order: NormOrder::CastThenScale }
    }

    /// Returns the type of the weight.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Rms { weight, .. } | Self::Layer { weight, .. } => weight.dtype(),
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Self::Rms { weight, .. } | Self::Layer { weight, .. } => weight.device(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let bytes = |vector: &Tensor<1>| vector.shape().num_elements() * vector.dtype().size();
        match self {
            Self::Rms { weight, .. } => bytes(weight),
            Self::Layer { weight, bias, .. } => bytes(weight) + bytes(bias),
        }
    }

    /// Norms `x`.
    ///
    /// # Shapes
    /// `[batch, tokens, len]`, unchanged.
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        match self {
            Self::Rms { weight, eps, order } => {
                kernels.run(RmsNorm { x, weight: weight.clone(), eps: *eps, order: *order })
            }
            Self::Layer { weight, bias, eps } => {
                kernels.run(LayerNorm { x, weight: weight.clone(), bias: bias.clone(), eps: *eps })
            }
        }
    }
}

/// Vectors that are not normed yet. A projection fuses the norm if it can.
#[derive(Clone, Debug)]
pub(crate) struct Normed<'a> {
    /// `None` for vectors that are projected as they are.
    pub(crate) norm: Option<&'a Norm>,
    /// Vectors `[batch, tokens, len]`.
    pub(crate) x: Tensor<3>,
}

impl Normed<'_> {
    /// Computes the norm.
    pub(crate) fn compute(self, kernels: &Kernels) -> Tensor<3> {
        match self.norm {
            Some(norm) => norm.forward(self.x, kernels),
            None => self.x,
        }
    }
}
