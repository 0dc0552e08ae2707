//! Gates on the CPU, in vectors: one pass over memory.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Tensor, TensorData, bf16, f16},
};
use pulp::{Simd, WithSimd};

use super::Gated;
use crate::{
    linear::activation::{Activation, activate},
    runtime::native::{Storage, Vectors, pieces, primitive, work},
};

/// # Errors
/// The inputs, for types that it is not made for.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn gated(kernel: Gated) -> Result<Tensor<3>, Gated> {
    match kernel.gate.dtype() {
        DType::F32 => Ok(gated_in::<f32>(kernel)),
        DType::F16 => Ok(gated_in::<f16>(kernel)),
        DType::BF16 => Ok(gated_in::<bf16>(kernel)),
        _ => Err(kernel),
    }
}

fn gated_in<E: Storage>(Gated { gate, up, activation }: Gated) -> Tensor<3> {
    let [rows, tokens, width] = gate.dims();
    if rows * tokens * width == 0 {
        return gate;
    }
    let [gate, up] = [gate, up].map(primitive);
    let (mut gate_widened, mut up_widened) = (Vec::new(), Vec::new());
    let (gate, up) = (Vectors::of::<E>(&gate, &mut gate_widened), Vectors::of::<E>(&up, &mut up_widened));
    let mut y = vec![E::default(); rows * tokens * width];
    // About as many operations a number.
    let products = 16 * y.len();
    let each = (rows * tokens).div_ceil(pieces(products));
    let piece = |(i, y)| Piece { gate: &gate, up: &up, activation, tokens, width, first: i * each, y };
    work(products, y.chunks_mut(each * width).enumerate().map(piece).collect());
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, width])))
}

/// Some vectors, from `first` on.
struct Piece<'a, E> {
    gate: &'a Vectors<'a>,
    up: &'a Vectors<'a>,
    activation: Activation,
    tokens: usize,
    width: usize,
    first: usize,
    y: &'a mut [E],
}

impl<E: Storage> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { gate, up, activation, tokens, width, first, y } = self;
        let mut numbers = vec![0.0; width];
        for (i, y) in y.chunks_mut(width).enumerate() {
            let (row, token) = ((first + i) / tokens, (first + i) % tokens);
            numbers.copy_from_slice(&gate.at(row, token)[..width]);
            activate(&mut numbers, activation);
            E::round(&mut numbers);
            for (number, up) in numbers.iter_mut().zip(&up.at(row, token)[..width]) {
                *number *= up;
            }
            E::narrow(&numbers, y);
        }
    }
}
