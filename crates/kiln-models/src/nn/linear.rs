//! A linear projection, `y = x Wᵀ + b`.

use burn::tensor::Tensor;
use kiln_kernels::{Kernels, NormedLinear, Then};

use super::norm::{Norm, Normed};
use crate::{Part, Rows, Weights};

#[derive(Clone, Debug)]
pub(crate) struct Linear {
    /// Weight `[out, in]`, as checkpoints store it.
    weight: Rows,
    bias: Option<Tensor<1>>,
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
        Ok(Self { weight, bias })
    }

    /// Creates a projection from `weight` `[out, in]` and `bias`.
    pub(crate) fn new(weight: Rows, bias: Option<Tensor<1>>) -> Self {
        Self { weight, bias }
    }

    pub(crate) fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.shape().num_elements() * bias.dtype().size());
        self.weight.bytes() + bias
    }

    /// Projects `x`.
    ///
    /// # Shapes
    /// `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        self.weight.project(x, self.bias.as_ref(), None, kernels)
    }

    /// Applies norm, [`forward`](Self::forward) and `then` in one launch; `None` if there is no such kernel.
    pub(crate) fn fused(&self, normed: &Normed<'_>, then: Then, kernels: &Kernels) -> Option<Tensor<3>> {
        let Some(Norm::Rms { weight: scale, eps, order }) = normed.norm else { return None };
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
        self.weight.project(x, self.bias.as_ref(), residual, kernels)
    }
}
