//! The functions between the projections of a feed-forward block, for tensors and for numbers in native and
//! `#[cube]` code.

#[cfg(feature = "cpu")]
pub(crate) use self::native::{activate, clamped_gates};

use std::f64::consts::PI;

use burn::tensor::{
    Tensor,
    activation::{gelu, silu},
};

/// The function between the projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x Φ(x)` (Hendrycks and Gimpel, 2016)
    Gelu,
    /// An approximation of [`Gelu`](Self::Gelu): `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`
    GeluTanh,
    /// `max(x, 0)²` (So et al., 2021, <https://arxiv.org/abs/2109.08668>)
    ReluSquared,
}

impl Activation {
    /// All of them, in the order of the shaders' options.
    pub(crate) const ALL: [Self; 4] = [Self::Silu, Self::Gelu, Self::GeluTanh, Self::ReluSquared];
}

impl Activation {
    /// Applies the function to each element, in plain tensor operations.
    pub(crate) fn of(self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Silu => silu(x),
            Self::Gelu => gelu(x),
            Self::GeluTanh => {
                // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)): fewer operations, and no tanh of large numbers.
                let u = (x.clone().square() * 0.044715 + 1.0) * x.clone() * (2.0 / PI).sqrt();
                x / ((u * -2.0).exp() + 1.0)
            }
            Self::ReluSquared => x.clamp_min(0.0).square(),
        }
    }
}

#[cfg(feature = "cpu")]
mod native {
    use kiln_products::functions::exp;

    use super::Activation;
    use crate::runtime::native::silu;

    /// Applies the activation to each number, in place.
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
            Activation::ReluSquared => {
                for x in numbers {
                    let above = if *x > 0.0 { *x } else { 0.0 };
                    *x = above * above;
                }
            }
        }
    }

    /// Applies the clamped gate of [`Gate`](crate::linear::gated::Gate) to each number, in place.
    #[inline(always)]
    pub(crate) fn clamped_gates(numbers: &mut [f32], up: &[f32], alpha: f32, limit: f32) {
        for (x, up) in numbers.iter_mut().zip(up) {
            let gate = if *x > limit { limit } else { *x };
            let high = if *up > limit { limit } else { *up };
            let up = if high < -limit { -limit } else { high };
            let bound = if alpha * gate < -80.0 { -80.0 } else { alpha * gate };
            *x = gate / (1.0 + exp(-bound)) * (up + 1.0);
        }
    }

    /// The normal distribution, `(1 + erf(x / √2)) / 2`, by formula 7.1.26 of Abramowitz and Stegun, with an
    /// error of at most 1.5e-7.
    #[inline(always)]
    fn normal(x: f32) -> f32 {
        let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
        let t = 1.0 / (1.0 + 0.327_591_1 * z);
        let sum =
            t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
        let tail = 0.5 * sum * exp(-(z * z));
        if x >= 0.0 { 1.0 - tail } else { tail }
    }
}

#[cfg(feature = "cube")]
pub(crate) mod cube {
    use cubecl::prelude::*;

    use super::Activation;

    const ROOT_OF_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;

    /// √(2/π)
    const ROOT: f32 = 0.797_884_6;

    /// `1 / (1 + exp(-x))`. Some GPUs return NaN for `exp(100)`.
    #[cube]
    pub(crate) fn sigmoid(x: f32) -> f32 {
        1.0 / (1.0 + f32::exp(min(-x, 80.0)))
    }

    /// Applies the activation to a number.
    #[cube]
    pub(crate) fn activated(x: f32, #[comptime] activation: Activation) -> f32 {
        if comptime!(activation == Activation::Silu) {
            x * sigmoid(x)
        } else if comptime!(activation == Activation::Gelu) {
            x * 0.5 * (1.0 + cubecl::frontend::Erf::erf(x * ROOT_OF_HALF))
        } else if comptime!(activation == Activation::GeluTanh) {
            x * sigmoid(2.0 * (x * x * 0.044715 + 1.0) * x * ROOT)
        } else {
            max(x, 0.0) * max(x, 0.0)
        }
    }
}
