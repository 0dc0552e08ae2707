//! Functions that several kernels of states apply, for tensors and for numbers in native and `#[cube]` code.

use burn::tensor::Tensor;

/// `ln(1 + exp(x))`, for any x.
pub(super) fn softplus(x: Tensor<3>) -> Tensor<3> {
    x.clone().clamp_min(0.0) + (-x.abs()).exp().log1p()
}

#[cfg(feature = "cpu")]
pub(super) mod native {
    use kiln_products::functions::exp;

    /// `ln(1 + exp(x))`, to within a few roundings. Branchless, so that it is vectorized.
    #[inline(always)]
    pub(in crate::state) fn softplus(x: f32) -> f32 {
        let e = exp(-x.abs());
        // ln(1 + e) = 2 artanh(e / (2 + e)), for an argument of at most a third: terms beyond the 15th power
        // are below a rounding.
        let z = e / (2.0 + e);
        let square = z * z;
        let p = 1.0 / 15.0;
        let p = p * square + 1.0 / 13.0;
        let p = p * square + 1.0 / 11.0;
        let p = p * square + 1.0 / 9.0;
        let p = p * square + 1.0 / 7.0;
        let p = p * square + 1.0 / 5.0;
        let p = p * square + 1.0 / 3.0;
        let above = if x > 0.0 { x } else { 0.0 };
        above + 2.0 * (z + z * square * p)
    }
}

#[cfg(feature = "cube")]
pub(super) mod cube {
    use cubecl::prelude::*;

    /// `1 / (1 + exp(-x))`. Some GPUs return NaN for `exp(100)`.
    #[cube]
    pub(in crate::state) fn sigmoid(x: f32) -> f32 {
        1.0 / (1.0 + f32::exp(min(-x, 80.0)))
    }

    /// `ln(1 + exp(x))`, computed as in the shader.
    #[cube]
    pub(in crate::state) fn softplus(x: f32) -> f32 {
        let e = f32::exp(-min(f32::abs(x), 80.0));
        let z = e / (2.0 + e);
        let s = z * z;
        let mut p = s * comptime!(1.0 / 15.0f32) + comptime!(1.0 / 13.0f32);
        p = p * s + comptime!(1.0 / 11.0f32);
        p = p * s + comptime!(1.0 / 9.0f32);
        p = p * s + comptime!(1.0 / 7.0f32);
        p = p * s + comptime!(1.0 / 5.0f32);
        p = p * s + comptime!(1.0 / 3.0f32);
        max(x, 0.0) + 2.0 * (z + z * s * p)
    }
}
