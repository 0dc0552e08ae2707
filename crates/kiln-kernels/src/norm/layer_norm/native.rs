//! The norm on the CPU: one pass over memory, in which a row stays in the first cache.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Tensor, TensorData, bf16, f16},
};
use pulp::{Simd, WithSimd};

use super::LayerNorm;
use crate::runtime::native::{Storage, Vectors, pieces, primitive, sum, sum_of_squares, work};

/// # Errors
/// The inputs, for types that it is not made for.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn normed(kernel: LayerNorm) -> Result<Tensor<3>, LayerNorm> {
    match kernel.x.dtype() {
        DType::F32 => Ok(normed_in::<f32>(kernel)),
        DType::F16 => Ok(normed_in::<f16>(kernel)),
        DType::BF16 => Ok(normed_in::<bf16>(kernel)),
        _ => Err(kernel),
    }
}

fn normed_in<E: Storage>(LayerNorm { x, weight, bias, eps }: LayerNorm) -> Tensor<3> {
    let [rows, tokens, hidden] = x.dims();
    if rows * tokens * hidden == 0 {
        return x;
    }
    let x = primitive(x);
    let [weight, bias] = [weight, bias].map(|vector| {
        let mut wide = vec![0.0; hidden];
        let vector = primitive(vector).to_contiguous();
        E::widen(vector.as_slice().expect("the type was looked at"), &mut wide);
        wide
    });
    let mut widened = Vec::new();
    let x = Vectors::of::<E>(&x, &mut widened);
    let mut y = vec![E::default(); rows * tokens * hidden];
    let vectors = rows * tokens;
    // A few operations a number.
    let products = 8 * y.len();
    let each = vectors.div_ceil(pieces(products));
    let piece =
        |(i, y)| Piece { x: &x, weight: &weight, bias: &bias, eps: eps as f32, tokens, first: i * each, y };
    work(products, y.chunks_mut(each * hidden).enumerate().map(piece).collect());
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, hidden])))
}

/// Some vectors, from `first` on.
struct Piece<'a, E> {
    x: &'a Vectors<'a>,
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    tokens: usize,
    first: usize,
    y: &'a mut [E],
}

impl<E: Storage> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { x, weight, bias, eps, tokens, first, y } = self;
        let hidden = weight.len();
        let mut normed = vec![0.0; hidden];
        for (i, y) in y.chunks_mut(hidden).enumerate() {
            let vector = first + i;
            let x = &x.at(vector / tokens, vector % tokens)[..hidden];
            let mean = sum(x) / hidden as f32;
            let variance = sum_of_squares(x, mean) / hidden as f32;
            let scale = 1.0 / (variance + eps).sqrt();
            for ((normed, x), (weight, bias)) in normed.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
                *normed = (x - mean) * scale * weight + bias;
            }
            E::narrow(&normed, y);
        }
    }
}
