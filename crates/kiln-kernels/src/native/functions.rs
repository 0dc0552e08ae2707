//! Functions of numbers, without branches, so that loops over them become vectors.

#![allow(clippy::needless_range_loop, reason = "several arrays share each index")]

use kiln_products::functions::exp;

use crate::Activation;

/// `x / (1 + exp(-x))`
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    let bound = if x < -80.0 { -80.0 } else { x };
    x / (1.0 + exp(-bound))
}

/// The activation of each number, in place.
#[inline(always)]
pub(crate) fn activate(numbers: &mut [f32], activation: Activation) {
    match activation {
        Activation::Silu => {
            for x in numbers {
                *x = silu(*x);
            }
        }
        Activation::Gelu => {
            for x in numbers {
                *x *= normal(*x);
            }
        }
        Activation::GeluTanh => {
            for x in numbers {
                // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
                let u = 2.0 * 0.797_884_6 * (*x * *x * 0.044_715 + 1.0) * *x;
                let bound = if u < -80.0 { -80.0 } else { u };
                *x /= 1.0 + exp(-bound);
            }
        }
    }
}

/// The normal distribution, `(1 + erf(x / √2)) / 2`, by 7.1.26 of Abramowitz and Stegun, which is off by 1.5e-7 at most.
#[inline(always)]
fn normal(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let sum =
        t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    let tail = 0.5 * sum * exp(-(z * z));
    if x >= 0.0 { 1.0 - tail } else { tail }
}

/// Partial sums, so that additions need not wait for each other.
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

/// The sum of the squares of what all numbers are apart from `mean`.
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
