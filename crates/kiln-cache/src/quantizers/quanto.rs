//! quanto: the smallest and the largest number of a group are exact (`MaxOptimizer` and `quantize_weight` of
//! optimum-quanto, <https://github.com/huggingface/optimum-quanto>).
//!
//! `scale = (max - min) / (2^bits - 1)`, `code = round((x - min) / scale)`, `x = scale · code + min`.

use burn::tensor::Tensor;

use super::{
    Backend, Format, Grouping, Quantized, Recipe, range,
    rounding::{half_to_even, rounded},
};

#[derive(Debug)]
pub(super) struct Quanto;

impl Format for Quanto {
    fn name(&self) -> &'static str {
        "quanto"
    }

    fn summary(&self) -> &'static str {
        "scales from the smallest and largest number, of a token's channels (axis 0) or a channel's tokens (axis -1)"
    }

    fn bits(&self) -> &'static [usize] {
        &[2, 4]
    }

    fn axes(&self) -> &'static [(i64, Grouping)] {
        &[(0, Grouping::Neighbours), (-1, Grouping::PerChannel)]
    }

    fn backend(&self) -> Option<&'static dyn Backend> {
        Some(&Quanto)
    }
}

impl Backend for Quanto {
    /// The zero point is what is added before scaling.
    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized {
        let round = |x| rounded(x, recipe.dtype);
        let [smallest, largest] = range(&x);
        let scale = round(round(largest - smallest.clone()) / recipe.largest());
        let shift = -smallest;
        let scaled = round(round(x + shift.clone()) / scale.clone());
        // Numbers that are all the same have no scale, and code 0.
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
