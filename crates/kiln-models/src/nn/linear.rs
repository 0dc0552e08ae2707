//! A linear projection, `y = x Wᵀ + b`.

use std::{ops::Range, sync::Arc};

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::model::{LowRank, LowRankSource};
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
    /// Modules of the checkpoint that are stacked here, with their numbers of results.
    modules: Arc<[(String, usize)]>,
    /// Changes of the matrix that are products of their own.
    changes: Vec<Change>,
}

/// A low-rank change of a matrix.
#[derive(Clone, Debug)]
struct Change {
    /// `[rank, in]`
    a: Rows,
    /// `[out, rank]`
    b: Rows,
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
        let modules = parts.iter().map(|(name, output)| ((*name).to_owned(), *output)).collect();
        Ok(Self { modules, ..Self::new(weight, bias) })
    }

    /// Creates a projection from `weight` `[out, in]` and `bias`.
    pub(crate) fn new(weight: Rows, bias: Option<Tensor<1>>) -> Self {
        Self { weight, bias, factors: None, modules: Arc::new([]), changes: Vec::new() }
    }

    /// Changes the matrix by what `source` has for its modules. `merges`: a dense matrix is replaced.
    ///
    /// # Errors
    /// The errors of [`LowRankSource::take`].
    pub(crate) fn adapt(&mut self, source: &mut dyn LowRankSource, merges: bool) -> kiln_core::Result<()> {
        let inputs = self.weight.columns();
        let outputs: usize = self.modules.iter().map(|(_, rows)| rows).sum();
        let (mut first, mut found) = (0, Vec::new());
        for (module, rows) in &*self.modules {
            if let Some(change) = source.take(module, [*rows, inputs])? {
                found.push((first, change));
            }
            first += rows;
        }
        let rank: usize = found.iter().map(|(_, change)| change.rank).sum();
        let Some(device) = self.weight.device().filter(|_| rank > 0) else { return Ok(()) };
        // Each module sees its own numbers alone.
        let (mut a, mut b) = (Vec::with_capacity(rank * inputs), vec![0.0; outputs * rank]);
        let mut before = 0;
        for (first, LowRank { rank: own, a: of_module, b: rows }) in found {
            a.extend(of_module);
            for (i, row) in rows.chunks(own).enumerate() {
                b[(first + i) * rank + before..][..own].copy_from_slice(row);
            }
            before += own;
        }
        let on_device = |numbers: Vec<f32>, shape: [usize; 2]| {
            Tensor::<2>::from_data(TensorData::new(numbers, shape), (&device, DType::F32))
        };
        let (a, b) = (on_device(a, [rank, inputs]), on_device(b, [outputs, rank]));
        match self.weight.plus_product(&b, &a).filter(|_| merges) {
            Some(sum) => self.weight = sum,
            None => {
                let dtype = self.dtype();
                self.changes.push(Change { a: a.cast(dtype).into(), b: b.cast(dtype).into() });
            }
        }
        Ok(())
    }

    /// Adds the results of all changes to `y`.
    fn changed(&self, y: Tensor<3>, x: &Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        self.changes.iter().fold(y, |y, Change { a, b }| {
            let low = a.project(x.clone(), None, None, kernels);
            b.project(low, None, Some(y), kernels)
        })
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
        let changes: usize = self.changes.iter().map(|Change { a, b }| a.bytes() + b.bytes()).sum();
        self.weight.bytes() + bias + factors + changes
    }

    /// See [`Kernels::exact_rows`].
    pub(crate) fn exact_rows(&self, kernels: &Kernels) -> usize {
        let changes = self.changes.iter().flat_map(|Change { a, b }| [a, b]);
        let all = changes.chain([&self.weight]).flat_map(Rows::matrices);
        all.map(|matrix| kernels.exact_rows(matrix)).min().unwrap_or(usize::MAX)
    }

    /// Projects `x`.
    ///
    /// # Shapes
    /// `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub(crate) fn forward(&self, x: Tensor<3>, kernels: &Kernels) -> Tensor<3> {
        let y = self.weight.project(x.clone(), self.bias.as_ref(), None, kernels);
        let y = self.changed(y, &x, kernels);
        match &self.factors {
            Some(factors) => {
                let dtype = y.dtype();
                (y.cast(DType::F32) * factors.clone()).cast(dtype)
            }
            None => y,
        }
    }

    /// Applies norm, [`forward`](Self::forward) and `then` in one kernel; `None` if there is none.
    pub(crate) fn fused(&self, normed: &Normed<'_>, then: Then, kernels: &Kernels) -> Option<Tensor<3>> {
        self.weight.whole()?;
        self.fused_blocks(normed, |_| Some(then.clone()), kernels)?.pop()
    }

    /// Applies norm, [`forward`](Self::forward) and an operation after it in one kernel for each block of the
    /// weight; `None` if there is none. `then` is given the results of a block, counted through all
    /// of them; `None`: it cannot follow that block.
    pub(crate) fn fused_blocks(
        &self,
        normed: &Normed<'_>,
        then: impl Fn(Range<usize>) -> Option<Then>,
        kernels: &Kernels,
    ) -> Option<Vec<Tensor<3>>> {
        let (Some(Norm::Rms { weight: scale, eps, order }), None) = (normed.norm, &self.factors) else {
            return None;
        };
        if !self.changes.is_empty() {
            return None;
        }
        let mut start = 0;
        let blocks = self.weight.matrices().iter().map(|block| {
            let (first, rows) = (start, block.rows());
            start += rows;
            let fused = NormedLinear {
                x: normed.x.clone(),
                scale: scale.clone(),
                eps: *eps,
                order: *order,
                weight: block.clone(),
                bias: self.bias.as_ref().map(|bias| bias.clone().narrow(0, first, rows)),
                then: then(first..start)?,
            };
            fused.is_fused(kernels).then_some(fused)
        });
        let blocks: Vec<_> = blocks.collect::<Option<_>>()?;
        Some(blocks.into_iter().map(|block| kernels.run(block)).collect())
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
            (residual, None) => {
                let y = self.weight.project(x.clone(), self.bias.as_ref(), residual, kernels);
                self.changed(y, &x, kernels)
            }
        }
    }
}
