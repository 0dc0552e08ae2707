//! The norm on the CPU: one pass over memory, in which a row stays in the L1 cache.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};

use super::LayerNorm;
use crate::runtime::native::{
    Storage, VectorKernel, Vectors, by_storage, computed, primitive, sum, sum_of_squares,
};

/// Computes the norm.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn normed(kernel: LayerNorm) -> Result<Tensor<3>, LayerNorm> {
    by_storage!(kernel.x.dtype(), E => Ok(normed_in::<E>(kernel)), else Err(kernel))
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
    let normed = Normed { x: &x, weight: &weight, bias: &bias, eps: eps as f32, tokens };
    // A few operations per number.
    let y = computed::<E>(&normed, [rows * tokens, hidden], 8);
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, hidden])))
}

struct Normed<'a> {
    x: &'a Vectors<'a>,
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    tokens: usize,
}

impl<E: Storage> VectorKernel<E> for Normed<'_> {
    #[inline(always)]
    fn compute(&self, vector: usize, normed: &mut [f32]) {
        let Self { x, weight, bias, eps, tokens } = *self;
        let hidden = weight.len();
        let x = &x.at(vector / tokens, vector % tokens)[..hidden];
        let mean = sum(x) / hidden as f32;
        let variance = sum_of_squares(x, mean) / hidden as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((normed, x), (weight, bias)) in normed.iter_mut().zip(x).zip(weight.iter().zip(bias)) {
            *normed = (x - mean) * scale * weight + bias;
        }
    }
}
