//! Activations on the CPU, in vectors.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Tensor, TensorData, bf16, f16},
};
use pulp::{Simd, WithSimd};

use super::Activate;
use crate::{
    Activation,
    native::{Storage, exp, pieces, primitive, silu, work},
};

/// # Errors
/// The inputs, for types that it is not made for.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn activated(kernel: Activate) -> Result<Tensor<3>, Activate> {
    match kernel.x.dtype() {
        DType::F32 => Ok(activated_in::<f32>(kernel)),
        DType::F16 => Ok(activated_in::<f16>(kernel)),
        DType::BF16 => Ok(activated_in::<bf16>(kernel)),
        _ => Err(kernel),
    }
}

fn activated_in<E: Storage>(Activate { x, activation }: Activate) -> Tensor<3> {
    let dims = x.dims();
    let x = primitive(x).to_contiguous();
    let x: &[E] = x.as_slice().expect("the type was looked at");
    let mut y = vec![E::default(); x.len()];
    // About as many operations a number.
    let products = 16 * x.len();
    let each = x.len().div_ceil(pieces(products)).next_multiple_of(BLOCK).max(BLOCK);
    let piece = |(x, y)| Piece { x, y, activation };
    work(products, x.chunks(each).zip(y.chunks_mut(each)).map(piece).collect());
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, dims)))
}

struct Piece<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
    activation: Activation,
}

/// Numbers that are widened at once.
const BLOCK: usize = 256;

impl<E: Storage> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut numbers = [0.0; BLOCK];
        for (x, y) in self.x.chunks(BLOCK).zip(self.y.chunks_mut(BLOCK)) {
            let numbers = &mut numbers[..x.len()];
            E::widen(x, numbers);
            match self.activation {
                Activation::Silu => numbers.iter_mut().for_each(|x| *x = silu(*x)),
                Activation::Gelu => numbers.iter_mut().for_each(|x| *x *= normal(*x)),
                Activation::GeluTanh => numbers.iter_mut().for_each(|x| {
                    // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u))
                    let u = 2.0 * 0.797_884_6 * (*x * *x * 0.044_715 + 1.0) * *x;
                    let bound = if u < -80.0 { -80.0 } else { u };
                    *x /= 1.0 + exp(-bound);
                }),
            }
            E::narrow(numbers, y);
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
