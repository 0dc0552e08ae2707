//! The norm on the CPU: one pass over memory, in which a row stays in the first cache.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Tensor, TensorData, bf16, f16},
};
use pulp::{Simd, WithSimd};

use super::{NormOrder, RmsNorm};
use crate::runtime::native::{Storage, Vectors, pieces, primitive, sum_of_squares, work};

/// # Errors
/// The inputs, for types that it is not made for.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn normed(kernel: RmsNorm) -> Result<Tensor<3>, RmsNorm> {
    match kernel.x.dtype() {
        DType::F32 => Ok(normed_in::<f32>(kernel)),
        DType::F16 => Ok(normed_in::<f16>(kernel)),
        DType::BF16 => Ok(normed_in::<bf16>(kernel)),
        _ => Err(kernel),
    }
}

fn normed_in<E: Storage>(RmsNorm { x, weight, eps, order }: RmsNorm) -> Tensor<3> {
    let [rows, tokens, hidden] = x.dims();
    if rows * tokens * hidden == 0 {
        return x;
    }
    let (x, weight) = (primitive(x), primitive(weight).to_contiguous());
    let (mut widened, mut weight_widened) = (Vec::new(), Vec::new());
    let x = Vectors::of::<E>(&x, &mut widened);
    let weight = E::in_floats(weight.as_slice().expect("the type was looked at"), &mut weight_widened);
    let mut y = vec![E::default(); rows * tokens * hidden];
    // A few operations a number.
    let products = 4 * y.len();
    let each = (rows * tokens).div_ceil(pieces(products));
    let piece = |(i, y)| Piece { x: &x, weight, eps: eps as f32, order, tokens, first: i * each, y };
    work(products, y.chunks_mut(each * hidden).enumerate().map(piece).collect());
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, hidden])))
}

/// Some vectors, from `first` on.
struct Piece<'a, E> {
    x: &'a Vectors<'a>,
    weight: &'a [f32],
    eps: f32,
    order: NormOrder,
    tokens: usize,
    first: usize,
    y: &'a mut [E],
}

impl<E: Storage> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { x, weight, eps, order, tokens, first, y } = self;
        let hidden = weight.len();
        let mut normed = vec![0.0; hidden];
        for (i, y) in y.chunks_mut(hidden).enumerate() {
            let vector = first + i;
            let x = &x.at(vector / tokens, vector % tokens)[..hidden];
            let rms = (sum_of_squares(x, 0.0) / hidden as f32 + eps).sqrt();
            for (normed, x) in normed.iter_mut().zip(x) {
                *normed = x / rms;
            }
            match order {
                NormOrder::CastThenScale => {
                    E::round(&mut normed);
                    for (normed, weight) in normed.iter_mut().zip(weight) {
                        *normed *= weight;
                    }
                }
                NormOrder::ScaleThenCast => {
                    for (normed, weight) in normed.iter_mut().zip(weight) {
                        *normed *= weight + 1.0;
                    }
                }
            }
            E::narrow(&normed, y);
        }
    }
}
