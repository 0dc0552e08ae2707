//! `attention_combine`.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Tensor as BurnTensor},
};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::LOWEST;
use crate::launch::{LANES, address_type, count, empty};

/// Puts together what came of parts of the keys: `[vectors, splits, head_dim + 2]`, as the shader has it.
#[cube(launch, address_type = "dynamic")]
fn combine<E: Float>(
    parts: &Tensor<f32>,
    y: &mut Tensor<E>,
    vectors: usize,
    splits: usize,
    dim: usize,
    #[define(E)] _elem: ElemType,
) {
    let vector = CUBE_POS;
    if vector >= vectors {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut all_largest = Shared::<[f32]>::new_slice(LANES);
    let mut sums = Shared::<[f32]>::new_slice(LANES);
    let mut weights = Shared::<[f32]>::new_slice(LANES);
    let mut numbers = Shared::<[f32]>::new_slice(LANES);
    let at = vector * splits * (dim + 2);

    // There are no more parts than lanes.
    let mut most = f32::new(LOWEST);
    let mut sum = f32::new(0.0);
    if lane < splits {
        let i = at + lane * (dim + 2) + dim;
        sum = parts[i + 1];
        if sum != 0.0 {
            most = parts[i];
        }
    }
    all_largest[lane] = most;
    sync_cube();
    let mut largest = f32::new(LOWEST);
    for i in 0..splits {
        largest = max(largest, all_largest[i]);
    }
    let weight = select(sum == 0.0, 0.0, f32::exp(most - largest));
    weights[lane] = weight;
    sums[lane] = weight * sum;
    sync_cube();

    // Lanes share the parts where there are more lanes than numbers.
    let shares = LANES / dim;
    let mut number = f32::new(0.0);
    if lane < shares * dim {
        let mut i = lane / dim;
        while i < splits {
            if weights[i] != 0.0 {
                number += weights[i] * parts[at + i * (dim + 2) + lane % dim];
            }
            i += shares;
        }
    }
    numbers[lane] = number;
    sync_cube();
    if lane < dim {
        for i in 1..shares {
            number += numbers[i * dim + lane];
        }
        let mut total = f32::new(0.0);
        for i in 0..splits {
            total += sums[i];
        }
        // What sees nothing is 0.
        y[vector * dim + lane] = E::cast_from(select(total == 0.0, 0.0, number / total));
    }
}

/// The result of all parts.
pub(super) fn combine_parts(parts: CubeTensor, dtype: DType, shape: [usize; 4]) -> BurnTensor<4> {
    let [vectors, splits] = [0, 1].map(|dim| parts.meta.shape()[dim]);
    let y = empty(&parts, shape, dtype);
    combine::launch(
        &y.client,
        count(vectors),
        CubeDim::new_1d(LANES as u32),
        address_type([&parts, &y]),
        parts.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        vectors,
        splits,
        shape[3],
        dtype_to_storage_type(dtype),
    );
    BurnTensor::from_primitive::<Cube>(y)
}
