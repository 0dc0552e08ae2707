//! Rotary positions on the CPU, in one pass over memory.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use kiln_core::need::RotaryPairs;

use super::Rotary;
use crate::runtime::native::{Storage, VectorKernel, by_storage, computed, primitive};

/// Rotates `x`.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn rotated(kernel: Rotary) -> Result<Tensor<4>, Rotary> {
    by_storage!(kernel.x.dtype(), E => Ok(rotated_in::<E>(kernel)), else Err(kernel))
}

fn rotated_in<E: Storage>(Rotary { x, cos, sin, pairs: of }: Rotary) -> Tensor<4> {
    let (dims, [tables, _, pairs]) = (x.dims(), cos.dims());
    let head_dim = dims[3];
    if x.shape().num_elements() == 0 {
        return x;
    }
    let mut x = primitive(x);
    let strides = x.layout().strides();
    if strides[3] != 1 || strides.iter().any(|&stride| stride < 0) {
        x = x.to_contiguous();
    }
    let (start, mut strides) = (x.layout().start_offset(), [0; 3]);
    for (stride, of_x) in strides.iter_mut().zip(x.layout().strides()) {
        *stride = of_x.unsigned_abs();
    }
    // Rounded as in the reference.
    let [cos, sin] = [cos, sin].map(|table| {
        let table = primitive(table).to_contiguous();
        let mut wide = table.as_slice::<f32>().expect("tables are float32").to_vec();
        E::round(&mut wide);
        wide
    });
    let rotated =
        Rotated { x: &x.storage::<E>()[start..], strides, cos: &cos, sin: &sin, tables, pairs, of, dims };
    // A few operations per number.
    let y = computed(&rotated, [dims[..3].iter().product(), head_dim], 4);
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, dims)))
}

struct Rotated<'a, E> {
    x: &'a [E],
    /// Strides of rows, heads and tokens.
    strides: [usize; 3],
    cos: &'a [f32],
    sin: &'a [f32],
    tables: usize,
    pairs: usize,
    of: RotaryPairs,
    dims: [usize; 4],
}

impl<E: Storage> VectorKernel<E> for Rotated<'_, E> {
    #[inline(always)]
    fn compute(&self, at: usize, vector: &mut [f32]) {
        let Self { x, strides, cos, sin, tables, pairs, of, dims: [_, heads, tokens, head_dim] } = *self;
        let (row, head, token) = (at / tokens / heads, at / tokens % heads, at % tokens);
        let place = row * strides[0] + head * strides[1] + token * strides[2];
        E::widen(&x[place..][..head_dim], vector);
        let table = (row % tables * tokens + token) * pairs;
        let (cos, sin) = (&cos[table..][..pairs], &sin[table..][..pairs]);
        let rotate = |first: &mut f32, second: &mut f32, cos: f32, sin: f32| {
            (*first, *second) = (*first * cos - *second * sin, *second * cos + *first * sin);
        };
        match of {
            RotaryPairs::Halves => {
                let (firsts, seconds) = vector.split_at_mut(pairs);
                for (((first, second), cos), sin) in firsts.iter_mut().zip(seconds).zip(cos).zip(sin) {
                    rotate(first, second, *cos, *sin);
                }
            }
            RotaryPairs::Adjacent => {
                for (([first, second], cos), sin) in vector.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
                    rotate(first, second, *cos, *sin);
                }
            }
        }
    }
}
