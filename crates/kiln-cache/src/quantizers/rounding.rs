//! Rounding that is the same on every device.

use burn::tensor::{DType, Tensor};

/// Half of the numbers from 2^23 on: what is added to it loses its fraction, and ties go to the even neighbour.
const WHOLE: f32 = 1.5 * (1u32 << 23) as f32;

/// The nearest whole number, ties to even; for numbers below 2^22.
///
/// Not burn's `round`, which leaves ties to the device.
pub(super) fn half_to_even<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    (x + WHOLE) - WHOLE
}

/// Float32 numbers rounded to the nearest that `dtype` has, ties to even, as if it had no largest number.
///
/// Devices need not have the type.
pub fn rounded<const D: usize>(x: Tensor<D>, dtype: DType) -> Tensor<D> {
    // Bits of a number with the leading one, and the power of two of the smallest.
    let (bits, smallest) = match dtype {
        DType::F16 => (11, Some(24)),
        DType::BF16 => (8, None),
        _ => return x,
    };
    let near = shortened(x.clone(), bits);
    // A tie is as far from the number on its other side, and the even one of the two has a bit less.
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

/// The leading `bits` bits, rounded to nearest, ties to either side (Dekker, 1971, <https://doi.org/10.1007/BF01397083>).
fn shortened<const D: usize>(x: Tensor<D>, bits: u32) -> Tensor<D> {
    let large = x.clone() * (1u32 << (24 - bits)) as f32 + x.clone();
    large.clone() - (large - x)
}
