//! `attention_combine`.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Tensor as BurnTensor},
};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::LOWEST;
use crate::runtime::launch::{LANES, address_type, count, empty, primitive};

/// Combines the results for parts of the keys: `[vectors, splits, head_dim + 2]`, laid out as in the shader.
#[cube(launch, address_type = "dynamic")]
fn combine<E: Float>(
    parts: &Tensor<f32>,
    sinks: &Tensor<f32>,
    y: &mut Tensor<E>,
    vectors: usize,
    splits: usize,
    heads: usize,
    queries: usize,
    dim: usize,
    #[comptime] has_sinks: bool,
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
    let at = vector * splits * (dim + 2);

    let mut sink = f32::new(LOWEST);
    if comptime!(has_sinks) {
        sink = sinks[vector / queries % heads * sinks.stride(0)];
    }
    let mut most = sink;
    let mut i = lane;
    while i < splits {
        let part = at + i * (dim + 2) + dim;
        if parts[part + 1] != 0.0 {
            most = max(most, parts[part]);
        }
        i += LANES;
    }
    all_largest[lane] = most;
    let mut left = CUBE_DIM as usize / 2;
    while left > 0 {
        sync_cube();
        if lane < left {
            all_largest[lane] = max(all_largest[lane], all_largest[lane + left]);
        }
        left /= 2;
    }
    sync_cube();
    let largest = all_largest[0];

    // One after the other, so that parts without a visible key change nothing.
    let mut number = f32::new(0.0);
    let mut total = f32::new(0.0);
    if comptime!(has_sinks) {
        total = f32::exp(sink - largest);
    }
    for round in 0..splits.div_ceil(LANES) {
        let base = round * LANES;
        let count = min(splits - base, LANES);
        let mut weight = f32::new(0.0);
        let mut sum = f32::new(0.0);
        if lane < count {
            let part = at + (base + lane) * (dim + 2) + dim;
            sum = parts[part + 1];
            if sum != 0.0 {
                weight = f32::exp(parts[part] - largest);
                sum *= weight;
            }
        }
        weights[lane] = weight;
        sums[lane] = sum;
        sync_cube();
        if lane < dim {
            for i in 0..count {
                if weights[i] != 0.0 {
                    number += weights[i] * parts[at + (base + i) * (dim + 2) + lane];
                    total += sums[i];
                }
            }
        }
        sync_cube();
    }
    if lane < dim {
        // A query that sees nothing gives 0.
        let scale = select(total == 0.0, 0.0, 1.0 / total);
        y[vector * dim + lane] = E::cast_from(number * scale);
    }
}

/// Combines all parts into the result.
pub(super) fn combine_parts(
    parts: CubeTensor,
    sinks: Option<BurnTensor<1>>,
    dtype: DType,
    shape: [usize; 4],
) -> BurnTensor<4> {
    let [vectors, splits] = [0, 1].map(|dim| parts.meta.shape()[dim]);
    let y = empty(&parts, shape, dtype);
    let has_sinks = sinks.is_some();
    let sinks = sinks.map_or_else(|| empty(&parts, [1], DType::F32), primitive);
    combine::launch(
        &y.client,
        count(vectors),
        CubeDim::new_1d(LANES as u32),
        address_type([&parts, &y]),
        parts.into_tensor_arg(),
        sinks.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        vectors,
        splits,
        shape[1],
        shape[2],
        shape[3],
        has_sinks,
        dtype_to_storage_type(dtype),
    );
    BurnTensor::from_primitive::<Cube>(y)
}
