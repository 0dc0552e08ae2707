//! KIVI: keys are scaled by channel over groups of tokens, values by token over groups of channels (Liu et al., 2024,
//! <https://arxiv.org/abs/2402.02750>).
//!
//! Some channels of keys are large for every token; a scale of their own keeps them from hiding the others.

use burn::tensor::Tensor;

use super::{Format, Grouping, Optimizer, Quantized, Recipe, quanto::Quanto, range, rounding::half_to_even};

/// Ranges that are tried: the whole one, and down to half of it.
const NARROWINGS: usize = 16;

#[derive(Debug)]
pub(super) struct Kivi;

impl Format for Kivi {
    fn name(&self) -> &'static str {
        "kivi"
    }

    fn summary(&self) -> &'static str {
        "scales keys by channel over tokens and values by token over channels"
    }

    fn bits(&self) -> &'static [usize] {
        &[2, 4, 8]
    }

    fn axes(&self) -> &'static [(i64, Grouping)] {
        &[(-1, Grouping::PerChannel), (0, Grouping::Neighbours)]
    }

    fn default_axes(&self) -> [i64; 2] {
        [-1, 0]
    }

    fn optimizers(&self) -> &'static [Optimizer] {
        &[Optimizer::Off, Optimizer::On]
    }

    /// History is never touched again.
    fn repacks(&self) -> bool {
        false
    }

    fn quantize(&self, x: Tensor<2>, recipe: &Recipe) -> Quantized {
        Quanto.quantize(x, recipe)
    }

    fn dequantize(&self, quantized: &Quantized, recipe: &Recipe) -> Tensor<2> {
        Quanto.dequantize(quantized, recipe)
    }

    /// Narrows the range as far as the squared error of the group shrinks. With two bits a few numbers at the ends cost
    /// all others half their precision; sums are those of the device, so words may differ between devices.
    fn refined(&self, x: Tensor<2>, recipe: &Recipe) -> Option<[Tensor<2>; 2]> {
        if recipe.optimizer == Optimizer::Off {
            return None;
        }
        let [smallest, largest] = range(&x);
        let middle = (smallest.clone() + largest.clone()) / 2.0;
        let half = (largest - smallest) / 2.0;
        let parameters = |part: f32| {
            let offset = middle.clone() - half.clone() * part;
            (half.clone() * (2.0 * part / recipe.largest()), offset)
        };
        let error = |scale: &Tensor<2>, offset: &Tensor<2>| {
            let constant = scale.clone().equal_elem(0.0);
            let codes = (x.clone() - offset.clone()) / scale.clone().mask_fill(constant, 1.0);
            let codes = half_to_even(codes.clamp(0.0, recipe.largest()));
            (codes * scale.clone() + offset.clone() - x.clone()).powi_scalar(2).sum_dim(1)
        };
        let (mut scale, mut offset) = parameters(1.0);
        let mut least = error(&scale, &offset);
        for step in 1..NARROWINGS {
            let (narrower, from) = parameters(1.0 - step as f32 / (2 * NARROWINGS) as f32);
            let other = error(&narrower, &from);
            let better = other.clone().lower(least.clone());
            scale = scale.mask_where(better.clone(), narrower);
            offset = offset.mask_where(better, from);
            least = least.min_pair(other);
        }
        Some([scale, offset])
    }
}
