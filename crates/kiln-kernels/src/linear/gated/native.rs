//! Gates on the CPU, with SIMD: one pass over memory.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};

use super::{Gate, Gated};
use crate::{
    linear::activation::{activate, clamped_gates},
    runtime::native::{Storage, VectorKernel, Vectors, by_storage, computed, primitive},
};

/// Computes the gated activation.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn gated(kernel: Gated) -> Result<Tensor<3>, Gated> {
    by_storage!(kernel.gate.dtype(), E => Ok(gated_in::<E>(kernel)), else Err(kernel))
}

fn gated_in<E: Storage>(Gated { gate, up, by }: Gated) -> Tensor<3> {
    let [rows, tokens, width] = gate.dims();
    if rows * tokens * width == 0 {
        return gate;
    }
    let [gate, up] = [gate, up].map(primitive);
    let (mut gate_widened, mut up_widened) = (Vec::new(), Vec::new());
    let (gate, up) = (Vectors::of::<E>(&gate, &mut gate_widened), Vectors::of::<E>(&up, &mut up_widened));
    let gates = Gates { gate: &gate, up: &up, by, tokens, width };
    // Estimated operations per number.
    let y = computed::<E>(&gates, [rows * tokens, width], 16);
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, [rows, tokens, width])))
}

struct Gates<'a> {
    gate: &'a Vectors<'a>,
    up: &'a Vectors<'a>,
    by: Gate,
    tokens: usize,
    width: usize,
}

impl<E: Storage> VectorKernel<E> for Gates<'_> {
    #[inline(always)]
    fn compute(&self, vector: usize, numbers: &mut [f32]) {
        let Self { gate, up, by, tokens, width } = *self;
        let (row, token) = (vector / tokens, vector % tokens);
        numbers.copy_from_slice(&gate.at(row, token)[..width]);
        let up = &up.at(row, token)[..width];
        match by {
            Gate::Activated(activation) => {
                activate(numbers, activation);
                E::round(numbers);
                for (number, up) in numbers.iter_mut().zip(up) {
                    *number *= up;
                }
            }
            Gate::Clamped { alpha, limit } => clamped_gates(numbers, up, alpha, limit),
        }
    }
}
