//! Rounding that is the same on every device.

use burn::tensor::{DType, Tensor};

/// The middle of the float32 range from 2^23 to 2^24, where numbers are whole: a number added to it loses its
/// fraction, and ties go to the even neighbor.
const WHOLE: f32 = 1.5 * (1u32 << 23) as f32;

/// Rounds to the nearest whole number, ties to even; for numbers below 2^22.
///
/// Burn's `round` is not used, because it leaves ties to the device.
pub(super) fn half_to_even<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    (x + WHOLE) - WHOLE
}

/// Rounds float32 numbers to the nearest number of `dtype`, ties to even, as if `dtype` had no largest
/// number.
///
/// The device need not support `dtype`.
pub fn rounded<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    // Bits of a number including the leading one, and the negated exponent of the smallest number.
    let (bits, smallest) = match dtype {
        DType::F16 => (11, Some(24)),
        DType::BF16 => (8, None),
        _ => return x,
    };
    let near = shortened(x.clone(), bits);
    // In a tie the neighbor on the other side is equally far away, and the even one of the two has one bit
    // less.
    let other = x.clone() * 2.0 - near.clone();
    let tie = shortened(other.clone(), bits).equal(other.clone());
    let odd = shortened(near.clone(), bits - 1).not_equal(near.clone());
    let near = near.mask_where(tie.bool_and(odd), other);
    match smallest {
        Some(power) => {
            let unit = (1u32 << power) as f32;
            let small = x.clone().abs().lower_elem(2f32.powi(10 - power));
            near.mask_where(small, half_to_even(x * unit) / unit)
        }
        None => near,
    }
}

/// Rounds to the leading `bits` bits, to nearest, ties to either side (Dekker, 1971,
/// <https://doi.org/10.1007/BF01397083>).
fn shortened<const D: usize>(x: Tensor<D>, bits: u32) -> Tensor<D> {
    let large = x.clone() * (1u32 << (24 - bits)) as f32 + x.clone();
    large.clone() - (large - x)
}
