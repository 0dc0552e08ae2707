//! Float16 numbers as the bits of integers, in plain operations. Rounding uses integers, because devices
//! differ in it.

use burn::tensor::{DType, Int, Tensor};

/// The largest float16 number.
pub(crate) const LARGEST: f32 = 65504.0;

/// The smallest positive float16 number.
pub(crate) const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// The rounding of a number that float16 cannot represent. No number becomes infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Down,
    Up,
    /// To the nearest, with ties to even.
    Nearest,
}

/// Converts finite float32 numbers to the bits of float16. The result is never a negative 0.
pub(crate) fn bits<const D: usize>(x: Tensor<D>, rounding: Rounding) -> Tensor<D, Int> {
    let negative = x.clone().lower_elem(0.0);
    // In units of the smallest number, halved until it is below 2048: products with powers of 2 are exact.
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
    // An extra digit is carried into the exponent.
    let bits = (halved * 1024.0 + digits).clamp_max(31743.0);
    let nonzero = bits.clone().greater_elem(0.0);
    let bits = bits.clone().mask_where(negative.bool_and(nonzero), bits + 32768.0);
    bits.int().cast(DType::I32)
}

/// Converts the lowest 16 bits to numbers.
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

#[cfg(feature = "cube")]
pub(crate) use cube::{DOWN, NEAREST, UP, finite, half_bits, half_number};

/// The functions of the shaders, for `#[cube]` functions.
#[cfg(feature = "cube")]
mod cube {
    use cubecl::prelude::*;

    use super::SMALLEST;

    /// The float32 bits of the largest float16 number.
    const LARGEST: u32 = 0x477f_e000;

    pub(crate) const DOWN: u32 = 0;
    pub(crate) const UP: u32 = 1;
    pub(crate) const NEAREST: u32 = 2;

    /// Clamps to the range of float16. NaN and subnormal float32 numbers become 0.
    #[cube]
    #[allow(clippy::manual_range_contains, reason = "kernels have no ranges")]
    pub(crate) fn finite<E: Numeric>(x: E) -> f32 {
        let bits = u32::reinterpret(f32::cast_from(x));
        let size = bits & 0x7fff_ffffu32;
        let none = size > 0x7f80_0000u32 || size < 0x0080_0000u32;
        f32::reinterpret(select(none, 0u32, min(size, LARGEST) | (bits & 0x8000_0000u32)))
    }

    /// The bits of a float16 number next to x; never a negative 0.
    #[cube]
    pub(crate) fn half_bits(x: f32, #[comptime] rounding: u32) -> u32 {
        let bits = u32::reinterpret(x);
        let size = min(bits & 0x7fff_ffffu32, LARGEST);
        let exponent = size >> 23u32;
        let digits = (size & 0x7f_ffffu32) | 0x80_0000u32;
        // Below 2^-14 the exponent stays the same.
        let small = exponent < 113u32;
        let shift = min(select(small, 126u32 - exponent, 13u32), 31u32);
        let whole = digits >> shift;
        let rest = digits & ((1u32 << shift) - 1u32);
        let mut more = 0u32;
        if comptime!(rounding == NEAREST) {
            let middle = 1u32 << (shift - 1u32);
            if rest > middle || (rest == middle && (whole & 1u32) == 1u32) {
                more = 1u32;
            }
        } else {
            // Away from 0.
            let away = select(bits < 0x8000_0000u32, comptime!(rounding), comptime!(1 - rounding));
            if rest > 0u32 {
                more = away;
            }
        }
        // An extra digit is carried into the exponent.
        let half = min(select(small, 0u32, (exponent - 113u32) << 10u32) + whole + more, 0x7bffu32);
        select(size == 0u32 || half == 0u32, 0u32, half | ((bits >> 16u32) & 0x8000u32))
    }

    /// Converts the lowest 16 bits to a number.
    #[cube]
    pub(crate) fn half_number(half: u32) -> f32 {
        let normal = f32::reinterpret(((half & 0x7fffu32) << 13u32) + 0x3800_0000u32);
        let small = f32::cast_from(half & 0x3ffu32) * SMALLEST;
        let number = select((half & 0x7c00u32) == 0u32, small, normal);
        select((half & 0x8000u32) != 0u32, -number, number)
    }
}
