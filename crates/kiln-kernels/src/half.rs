//! Float16 numbers in the bits of integers, in plain operations: rounded by integers where devices would differ.

use burn::tensor::{DType, Int, Tensor};

/// The largest float16 number.
pub(crate) const LARGEST: f32 = 65504.0;

/// The smallest that is not 0.
pub(crate) const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// Where a number goes that float16 does not have. None becomes infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Down,
    Up,
    /// To the nearest, to the even one of two.
    Nearest,
}

/// The bits of float32 numbers, which are finite, as float16. There is no negative 0.
pub(crate) fn bits<const D: usize>(x: Tensor<D>, rounding: Rounding) -> Tensor<D, Int> {
    let negative = x.clone().lower_elem(0.0);
    // In the smallest units, then halved until it is below 2048: products with powers of 2 are exact.
    let mut digits = x.abs().clamp_max(LARGEST) * (1.0 / SMALLEST);
    let mut halved = digits.zeros_like();
    for power in [16, 8, 4, 2, 1] {
        let large = digits.clone().greater_equal_elem((1u64 << (10 + power)) as f32);
        let less = digits.clone() * (0.5f32).powi(power);
        digits = digits.mask_where(large.clone(), less);
        halved = halved.clone().mask_where(large, halved + power as f32);
    }
    let digits = match rounding {
        Rounding::Nearest => digits.round(),
        Rounding::Down => digits.clone().floor().mask_where(negative.clone(), digits.ceil()),
        Rounding::Up => digits.clone().ceil().mask_where(negative.clone(), digits.floor()),
    };
    // A digit too many is carried into the exponent.
    let bits = (halved * 1024.0 + digits).clamp_max(31743.0);
    let nonzero = bits.clone().greater_elem(0.0);
    let bits = bits.clone().mask_where(negative.bool_and(nonzero), bits + 32768.0);
    bits.int().cast(DType::I32)
}

/// The numbers that the lowest 16 bits are.
pub(crate) fn numbers<const D: usize>(bits: Tensor<D, Int>) -> Tensor<D> {
    let float = |integers: Tensor<D, Int>| integers.float().cast(DType::F32);
    let exponent = bits.clone().bitwise_right_shift_scalar(10).bitwise_and_scalar(31);
    let digits = float(bits.clone().bitwise_and_scalar(1023));
    let normal = exponent.clone().greater_elem(0);
    let mut number = digits.clone().mask_where(normal, digits + 1024.0) * SMALLEST;
    let doubled = exponent.clamp_min(1) - 1;
    for power in [16, 8, 4, 2, 1] {
        let set = doubled.clone().bitwise_and_scalar(power).greater_elem(0);
        number = number.clone().mask_where(set, number * (2f32).powi(power));
    }
    let negative = bits.bitwise_and_scalar(32768).greater_elem(0);
    number.clone().mask_where(negative, -number)
}
