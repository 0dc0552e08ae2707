//! A linear projection, `y = x Wᵀ + b`.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_kernels::{Kernels, NormedLinear, Then};

use super::norm::{Norm, Normed};
use crate::{Part, Rows, Weights};

#[derive(Clone, Debug)]
pub(crate) struct Linear {
    /// Weight `[out, in]`, as checkpoints store it.
    weight: Rows,
    bias: Option<Tensor<1>>,
    /// Factors of the results, in float32, `[1, 1, out]`.
    factors: Option<Tensor<3>>,
}

/// Factors around a projection with `N` parts, such as queries, keys and values, and of the projection after
/// it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factors<const N: usize> {
    /// Factor of the vectors that are projected.
    pub(crate) input: f64,
    /// Factors of the results of each part.
    pub(crate) parts: [f64; N],
    /// Factor of the results of the second projection.
    pub(crate) output: f64,
}

impl<const N: usize> Factors<N> {
    pub(crate) const NONE: Self = Self { input: 1.0, parts: [1.0; N], output: 1.0 };
}

impl From<Rows> for Linear {
    /// Creates a projection without a bias.
    fn from(weight: Rows) -> Self {
        Self::new(weight, None)
    }
}

impl Linear {
    /// Reads `name.weight`, and `name.bias` if `bias` is set.
    pub(crate) fn load(
        weights: &mut dyn Weights,
        name: &str,
        [input, output]: [usize; 2],
        bias: bool,
    ) -> kiln_core::Result<Self> {
        Self::stacked(weights, &[(name, output)], input, bias)
    }

    /// Reads several projections, given by name and output size, as one matrix. Their results are adjacent
    /// and take one launch.
    pub(crate) fn stacked(
        weights: &mut dyn Weights,
        parts: &[(&str, usize)],
        input: usize,
        bias: bool,
    ) -> kiln_core::Result<Self> {
        Self::stacked_where(weights, parts, input, |_| bias)
    }

    /// Reads [`stacked`](Self::stacked) projections of which some have a bias. The others get a bias of 0.
    pub(crate) fn stacked_where(
        weights: &mut dyn Weights,
        parts: &[(&str, usize)],
        input: usize,
        has_bias: impl Fn(&str) -> bool,
    ) -> kiln_core::Result<Self> {
        let named = |kind: &str, parts: &[(&str, usize)]| -> Vec<Part> {
            parts.iter().map(|(name, output)| Part::new(format!("{name}.{kind}"), *output)).collect()
        };
        let weight = weights.rows(&named("weight", parts), input)?;
        let mut biases = Vec::new();
        for run in parts.chunk_by(|(a, _), (b, _)| has_bias(a) == has_bias(b)) {
            biases.push(match has_bias(run[0].0) {
                true => Ok(weights.vector(&named("bias", run))?),
                false => Err(run.iter().map(|(_, output)| output).sum::<usize>()),
            });
        }
        let options = biases.iter().find_map(|bias| bias.as_ref().ok().map(|b| (b.device(), b.dtype())));
        let bias = options.map(|(device, dtype)| {
            let zeros = |len| Tensor::zeros([len], (&device, dtype));
            let mut biases: Vec<Tensor<1>> =
                biases.into_iter().map(|bias| bias.unwrap_or_else(zeros)).collect();
            if biases.len() == 1 { biases.remove(0) } else { Tensor::cat(biases, 0) }
        });
        Ok(Self::new(weight, bias))
    }

    /// Creates a projection from `weight` `[out, in]` and `bias`.
    pub(crate) fn new(weight: Rows, bias: Option<Tensor<1>>) -> Self {
        Self { weight, bias, factors: None }
    }

    /// Multiplies vectors by `input` before the projection, and the results by the factors in `parts`, given
    /// with numbers of results.
    pub(crate) fn times(self, input: f64, parts: &[(f64, usize)]) -> Self {
        if input == 1.0 && parts.iter().all(|(factor, _)| *factor == 1.0) {
            return self;
        }
        let Some(device) = self.weight.device() else { return self };
        let all =
            parts.iter().flat_map(|&(factor, width)| std::iter::repeat_n((input * factor) as f32, width));
        let all: Vec<f32> = all.collect();
        let shape = [1, 1, all.len()];
        let factors = Tensor::from_data(TensorData::new(all, shape), (&device, DType::F32));
        Self { bias: self.bias.map(|bias| bias / input), factors: Some(factors), ..self }
    }

    pub(crate) fn device(&self) -> Option<Device> {
        self.weight.device()
    }

    /// The type of the vectors that are projected.
    pub(crate) fn dtype(&self) -> DType {
        self.weight.dtype()
    }

    pub(crate) fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.shape().num_elements() * bias.dtype().size());
        let factors =
            self.factors.as_ref().map_or(0, |factors| factors.shape().num_elements() * size_of::<f32>());
        self.weight.bytes() + bias + factors
    }

    /// Projects `x`.
    ///
    /// # Shapes
    /// `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let y = self.weight.project(x, self.bias.as_ref(), None, kernels);
        match &self.factors {
            Some(factors) => {
                let dtype = y.dtype();
                (y.cast(DType::F32) * factors.clone()).cast(dtype)
            }
            None => y,
        }
    }

    /// Applies norm, [`forward`](Self::forward) and `then` in one launch; `None` if there is no such kernel.
    pub(crate) fn fused(&self, normed: &Normed<'_>, then: Then, kernels: &Kernels) -> Option<Tensor<3>> {
        let (Some(Norm::Rms { weight: scale, eps, order }), None) = (normed.norm, &self.factors) else {
            return None;
        };
        let fused = NormedLinear {
            x: normed.x.clone(),
            scale: scale.clone(),
            eps: *eps,
            order: *order,
            weight: self.weight.whole()?.clone(),
            bias: self.bias.clone(),
            then,
        };
        fused.is_fused(kernels).then(|| kernels.run(fused))
    }

    /// Computes [`forward`](Self::forward) and adds `residual`, which has the shape of the result, if there
    /// is one.
    pub(crate) fn forward_onto(
        &self,
        residual: Option<Tensor<3>>,
        x: Tensor<3>,
        kernels: &Kernels,
    ) -> Tensor<3> {
        match (residual, &self.factors) {
            (Some(residual), Some(_)) => residual + self.forward(x, kernels),
            (None, Some(_)) => self.forward(x, kernels),
            (residual, None) => self.weight.project(x, self.bias.as_ref(), residual, kernels),
        }
    }
}
