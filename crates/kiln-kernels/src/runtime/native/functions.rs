//! Branchless functions of numbers, so that loops over them are vectorized.

#![allow(clippy::needless_range_loop, reason = "several arrays share each index")]

use kiln_products::functions::exp;

/// Converts the bits of a float16 number.
#[inline(always)]
pub(crate) fn float_of_half(bits: u16) -> f32 {
    /// The smallest normal number.
    const NORMAL: f32 = 1.0 / (1 << 14) as f32;

    let digits = u32::from(bits & 0x7fff) << 13;
    let normal = f32::from_bits(digits + 0x3800_0000);
    // Subnormal numbers have no implicit leading 1, and have the exponent of the smallest normal numbers. All
    // of it is exact.
    let finite = if normal < NORMAL { 2.0 * normal - NORMAL } else { normal };
    // Infinity or NaN.
    let size = if bits & 0x7c00 == 0x7c00 { f32::from_bits(digits | 0x7f80_0000) } else { finite };
    f32::from_bits(size.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// `x / (1 + exp(-x))`
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    let bound = if x < -80.0 { -80.0 } else { x };
    x / (1.0 + exp(-bound))
}

/// Number of partial sums, so that additions do not wait for each other.
const LANES: usize = 32;

/// The sum of all numbers.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            sums[i] += chunk[i];
        }
    }
    rest.iter().fold(sums.iter().sum(), |sum, &x| sum + x)
}

/// The sum of the squared differences between the numbers and `mean`.
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32], mean: f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            sums[i] += (chunk[i] - mean) * (chunk[i] - mean);
        }
    }
    rest.iter().fold(sums.iter().sum(), |sum, &x| sum + (x - mean) * (x - mean))
}

#[cfg(test)]
mod tests {
    use burn::tensor::f16;

    #[test]
    fn float16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (widened, want) = (super::float_of_half(bits), f16::from_bits(bits).to_f32());
            assert!(
                widened.to_bits() == want.to_bits() || widened.is_nan() && want.is_nan(),
                "{bits:#06x}: {widened}, not {want}"
            );
        }
    }
}
