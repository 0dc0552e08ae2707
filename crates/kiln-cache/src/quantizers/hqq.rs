//! HQQ: zero points refined by a solver, so that large elements cost less (Badri and Shaji, 2023,
//! <https://mobiusml.github.io/hqq_blog/>; `Quantizer` of hqq).
//!
//! `scale = (2^bits - 1) / (max - min)`, `zero = -min · scale`, `code = round(x · scale + zero)`,
//! `x = (code - zero) / scale`; all in float32.

use burn::tensor::Tensor;

use super::{
    Backend, CacheFormat, Grouping, Optimizer, Quantized, Recipe, range,
    rounding::{half_to_even, rounded},
};

/// Larger scales are lowered to this, because they are stored as float16.
const LARGEST_SCALE: f32 = 2e4;

/// Ranges up to this count as zero, from hqq 0.2.7 on.
const SMALLEST_RANGE: f32 = 1e-4;

const ITERATIONS: usize = 20;

pub(super) static HQQ: CacheFormat = CacheFormat {
    name: "hqq",
    summary: "zero points refined by a solver; scales of a channel's tokens (axis 0) or a token's channels (axis 1)",
    bits: &[1, 2, 3, 4, 8],
    axes: &[(0, Grouping::Strided), (1, Grouping::Neighbours)],
    default_axes: [0, 0],
    optimizers: &[Optimizer::On, Optimizer::Off, Optimizer::Legacy],
    backend: Some(&Hqq),
    refined,
};

fn refined(x: Tensor<2>, recipe: &Recipe) -> Option<[Tensor<2>; 2]> {
    if recipe.optimizer == Optimizer::Off {
        return None;
    }
    let [scale, zero] = solve(&x, recipe, Until::EachGrows);
    let scale = scale.recip();
    Some([scale.clone(), -zero * scale])
}

#[derive(Debug)]
struct Hqq;

impl Backend for Hqq {
    /// Stores the inverse of the scale.
    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized {
        let [scale, zero] = solve(&x, recipe, Until::AllGrow);
        let codes = codes(&x, &scale, &zero, recipe).int();
        let kept = |x| rounded(x, recipe.dtype);
        Quantized { codes, scale: kept(scale.recip()), zero: kept(zero) }
    }

    fn dequantize(&self, quantized: &Quantized, recipe: &Recipe) -> Tensor<2> {
        let Quantized { codes, scale, zero } = quantized.clone();
        let codes = codes.float().cast(scale.dtype());
        rounded(rounded(codes - zero, recipe.dtype) * scale, recipe.dtype)
    }
}

fn codes(x: &Tensor<2>, scale: &Tensor<2>, zero: &Tensor<2>, recipe: &Recipe) -> Tensor<2> {
    half_to_even((x.clone() * scale.clone() + zero.clone()).clamp(0.0, recipe.largest()))
}

/// When the solver stops: when the mean error of all groups grows, as in hqq, or for each group when its own
/// error grows, so that rows of a batch do not depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Until {
    AllGrow,
    EachGrows,
}

/// Finds the scale, which elements are multiplied by, and the zero point of each group.
fn solve(x: &Tensor<2>, recipe: &Recipe, until: Until) -> [Tensor<2>; 2] {
    let [smallest, largest] = range(x);
    let range = largest - smallest.clone();
    // Two roundings, because that is how torch divides a number by a tensor.
    let scale = range.clone().recip() * recipe.largest();
    let scale = match recipe.optimizer {
        Optimizer::On => scale.mask_fill(range.lower_equal_elem(SMALLEST_RANGE), 1.0),
        Optimizer::Off | Optimizer::Legacy => scale.mask_fill(range.equal_elem(0.0), LARGEST_SCALE),
    };
    let scale = scale.clamp_max(LARGEST_SCALE);
    let mut zero = -smallest * scale.clone();
    if recipe.optimizer == Optimizer::Off {
        return [scale, zero];
    }

    // Minimizes the sum of |error|^0.7 by half-quadratic splitting. The device decides when to stop: nothing
    // is read back.
    const NORM: f32 = 0.7;
    let mut beta = 10.0;
    let mut best = Tensor::<2>::full([1, 1], f32::MAX, (&x.device(), x.dtype()));
    let mut going = best.clone().greater_elem(0.0);
    for _ in 0..ITERATIONS {
        let codes = codes(x, &scale, &zero, recipe);
        let error = x.clone() - (codes.clone() - zero.clone()) / scale.clone();
        let size = error.clone().abs();
        let none = size.clone().equal_elem(0.0);
        let shrink = size.clone().mask_fill(none, 1.0).powf_scalar(NORM - 1.0) / beta;
        let outliers = (size.clone() - shrink).clamp_min(0.0) * error.sign();
        let next = (codes - (x.clone() - outliers) * scale.clone()).mean_dim(1);
        zero = zero.clone().mask_where(going.clone().expand(zero.dims()), next);
        let mean = match until {
            Until::AllGrow => size.mean().reshape([1, 1]),
            Until::EachGrows => size.mean_dim(1),
        };
        let shrinks = mean.clone().lower(best.clone().expand(mean.dims()));
        going = going.expand(mean.dims()).bool_and(shrinks);
        best = best.expand(mean.dims()).min_pair(mean);
        if recipe.optimizer == Optimizer::Legacy {
            beta *= 1.01;
        }
    }
    [scale, zero]
}
