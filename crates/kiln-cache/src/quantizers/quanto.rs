//! quanto: the codes span the range from the smallest to the largest element of a group, both of which are
//! exact up to rounding (`MaxOptimizer` and `quantize_weight` of optimum-quanto,
//! <https://github.com/huggingface/optimum-quanto>).
//!
//! `scale = (max - min) / (2^bits - 1)`, `code = round((x - min) / scale)`, `x = scale · code + min`.

use burn::tensor::Tensor;

use super::{
    Backend, CacheFormat, Grouping, Optimizer, Quantized, Recipe, range,
    rounding::{half_to_even, rounded},
};

pub(super) static QUANTO: CacheFormat = CacheFormat {
    name: "quanto",
    summary: "scales from the smallest and largest number, of a token's channels (axis 0) or a channel's tokens (axis -1)",
    bits: &[2, 4],
    axes: &[(0, Grouping::Neighbours), (-1, Grouping::PerChannel)],
    default_axes: [0, 0],
    optimizers: &[Optimizer::Off],
    backend: Some(&Quanto),
    refined: |_, _| None,
};

/// The arithmetic of optimum-quanto, with each step rounded to the type of the recipe.
#[derive(Debug)]
struct Quanto;

impl Backend for Quanto {
    /// The zero point is `-min`, in the unit of `x`: it is added before the division by the scale.
    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized {
        let round = |x| rounded(x, recipe.dtype);
        let [smallest, largest] = range(&x);
        let scale = round(round(largest - smallest.clone()) / recipe.largest());
        let shift = -smallest;
        let scaled = round(round(x + shift.clone()) / scale.clone());
        // Groups of equal elements have scale 0, and get code 0.
        let constant = scale.clone().equal_elem(0.0).expand(scaled.dims());
        let codes = half_to_even(scaled.mask_fill(constant, 0.0).clamp(0.0, recipe.largest()));
        Quantized { codes: codes.int(), scale, zero: shift }
    }

    fn dequantize(&self, quantized: &Quantized, recipe: &Recipe) -> Tensor<2> {
        let Quantized { codes, scale, zero } = quantized.clone();
        let codes = codes.float().cast(scale.dtype());
        rounded(rounded(codes * scale, recipe.dtype) - zero, recipe.dtype)
    }
}
