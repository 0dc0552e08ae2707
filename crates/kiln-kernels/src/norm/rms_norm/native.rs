//! The norm on the CPU: one pass over memory, in which a row stays in the L1 cache.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};

use super::{NormOrder, RmsNorm};
use crate::runtime::native::{
    Storage, VectorKernel, Vectors, by_storage, computed, primitive, sum_of_squares,
};

/// Computes the norm.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn normed(kernel: RmsNorm) -> Result<Tensor<3>, RmsNorm> {
    by_storage!(kernel.x.dtype(), E => Ok(normed_in::<E>(kernel)), else Err(kernel))
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
    let normed = Normed { x: &x, weight, eps: eps as f32, order, tokens };
    // A few operations per number.
    let y = computed::<E>(&normed, [rows * tokens, hidden], 4);
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, hidden])))
}

struct Normed<'a> {
    x: &'a Vectors<'a>,
    weight: &'a [f32],
    eps: f32,
    order: NormOrder,
    tokens: usize,
}

impl<E: Storage> VectorKernel<E> for Normed<'_> {
    #[inline(always)]
    fn compute(&self, vector: usize, normed: &mut [f32]) {
        let Self { x, weight, eps, order, tokens } = *self;
        let hidden = weight.len();
        let x = &x.at(vector / tokens, vector % tokens)[..hidden];
        let rms = (sum_of_squares(x, 0.0) / hidden as f32 + eps).sqrt();
        for (normed, x) in normed.iter_mut().zip(x) {
            *normed = x / rms;
        }
        match order {
            NormOrder::CastThenScale => {
                E::round(normed);
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
    }
}
