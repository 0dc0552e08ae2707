//! `attention_combine`, and the same done by the last workgroups of a launch.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::{DType, Tensor as BurnTensor},
};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Info, LOWEST, Place};
use crate::attention::sharing::Combined;
use crate::runtime::launch::{LANES, address_type, count, empty, primitive};

/// Parts that are read at once: their loads do not wait for each other.
const AT_ONCE: usize = 4;

/// Combines the results for parts of the keys: `[vectors, splits, head_dim + 2]`, laid out as in the shader.
#[cube(launch, address_type = "dynamic")]
fn combine<E: Float>(
    parts: &Tensor<f32>,
    sinks: ComptimeOption<&Tensor<f32>>,
    y: &mut Tensor<E>,
    vectors: usize,
    splits: usize,
    heads: usize,
    queries: usize,
    dim: usize,
    #[define(E)] _elem: ElemType,
) {
    let columns = dim.div_ceil(4);
    let i = CUBE_POS * LANES + UNIT_POS as usize;
    let vector = i / columns;
    if vector >= vectors {
        terminate!();
    }
    let head = vector / queries % heads;
    combine_four::<f32, E>(parts, sinks, y, vector, head, i % columns, splits, dim);
}

/// The destination of a launch whose last workgroups combine all parts.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Last<'a, E: Float> {
    y: &'a mut Tensor<E>,
    sinks: ComptimeOption<&'a Tensor<f32>>,
    /// Counters, one for each group of rows: 0 before and after the launch.
    tickets: &'a Tensor<Atomic<u32>>,
}

/// The argument of a launch with results of type `E`.
pub(super) fn last_of<E: Float>(combined: Option<&Combined>) -> ComptimeOptionArgs<Last<'static, E>> {
    let Some(Combined { y, sinks, tickets }) = combined else {
        return ComptimeOptionArgs::None;
    };
    let sinks = sinks.clone().map(CubeTensor::into_tensor_arg).into();
    let [y, tickets] = [y, tickets].map(|tensor| tensor.clone().into_tensor_arg());
    ComptimeOptionArgs::Some(LastLaunch::new(y, sinks, tickets))
}

/// Combines all parts of the rows of a workgroup, those of earlier launches too, if it is the last of this
/// launch to finish those rows.
#[cube]
pub(super) fn combine_in_last<E: Float, P: Float>(
    last: ComptimeOption<Last<'_, E>>,
    parts: &Tensor<P>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    info: &Info,
    #[comptime] fours: usize,
) {
    #[comptime]
    match last {
        ComptimeOption::Some(last) => {
            let place = Place::new(CUBE_POS, comptime!(4 * fours), positions, bound, info);
            let mut found = Shared::<[u32]>::new_slice(1usize);
            // A workgroup that finds the tickets of the others finds their parts, too: each fences its own
            // before it takes one, and the last one fences again before it reads.
            sync_storage();
            if UNIT_POS == 0 {
                let of_rows = CUBE_POS / info.tiles / info.splits * info.tiles + CUBE_POS % info.tiles;
                let before = last.tickets[of_rows].fetch_add(1);
                if before + 1 == u32::cast_from(info.splits) {
                    last.tickets[of_rows].store(0);
                }
                found[0] = before + 1;
            }
            if workgroup_uniform_load(&found[0]) == u32::cast_from(info.splits) {
                sync_storage();
                let columns = info.head_dim.div_ceil(4);
                let lane = UNIT_POS as usize;
                let row = place.first_row + lane / columns;
                if row <= place.last_row {
                    let vector = place.vector(row, info);
                    let head = vector / info.queries % (info.kv_heads * info.group);
                    let column = lane % columns;
                    combine_four::<P, E>(
                        parts,
                        last.sinks,
                        last.y,
                        vector,
                        head,
                        column,
                        info.parts,
                        info.head_dim,
                    );
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Combines four numbers of a vector: every `dim.div_ceil(4)`-th from `column` on.
#[cube]
fn combine_four<P: Float, E: Float>(
    parts: &Tensor<P>,
    sinks: ComptimeOption<&Tensor<f32>>,
    y: &mut Tensor<E>,
    vector: usize,
    head: usize,
    column: usize,
    splits: usize,
    dim: usize,
) {
    let columns = dim.div_ceil(4);
    let width = dim + 2;
    let first = vector * splits * width;

    let mut largest = f32::new(LOWEST);
    #[comptime]
    if let ComptimeOption::Some(sinks) = sinks {
        largest = sinks[head * sinks.stride(0)];
    }
    let sink = largest;
    let mut base = 0;
    while base < splits {
        let mut scores = Array::<f32>::new(AT_ONCE);
        #[unroll]
        for u in 0..AT_ONCE {
            let part = first + min(base + u, splits - 1) * width;
            let is_seen = f32::cast_from(parts[part + dim + 1]) != 0.0;
            scores[u] = select(is_seen, f32::cast_from(parts[part + dim]), LOWEST);
        }
        #[unroll]
        for u in 0..AT_ONCE {
            largest = max(largest, scores[u]);
        }
        base += AT_ONCE;
    }

    // One after the other, so that parts without a visible key change nothing.
    let mut numbers = Array::<f32>::new(4usize);
    let mut places = Array::<usize>::new(4usize);
    #[unroll]
    for k in 0..4usize {
        numbers[k] = 0.0;
        // Indices past the last number read the last one.
        places[k] = min(column + k * columns, dim - 1);
    }
    let mut total = f32::new(0.0);
    if comptime!(sinks.is_some()) {
        total = f32::exp(sink - largest);
    }
    let mut base = 0;
    while base < splits {
        let mut weights = Array::<f32>::new(AT_ONCE);
        let mut sums = Array::<f32>::new(AT_ONCE);
        let mut vectors = Array::<f32>::new(comptime!(4 * AT_ONCE));
        #[unroll]
        for u in 0..AT_ONCE {
            let part = first + min(base + u, splits - 1) * width;
            sums[u] = f32::cast_from(parts[part + dim + 1]);
            let is_seen = base + u < splits && sums[u] != 0.0;
            weights[u] = select(is_seen, f32::exp(f32::cast_from(parts[part + dim]) - largest), 0.0);
            #[unroll]
            for k in 0..4usize {
                vectors[4 * u + k] = f32::cast_from(parts[part + places[k]]);
            }
        }
        #[unroll]
        for u in 0..AT_ONCE {
            if weights[u] != 0.0 {
                total = fma(weights[u], sums[u], total);
                #[unroll]
                for k in 0..4usize {
                    numbers[k] = fma(weights[u], vectors[4 * u + k], numbers[k]);
                }
            }
        }
        base += AT_ONCE;
    }
    // A query that sees nothing gives 0.
    let scale = select(total == 0.0, 0.0, 1.0 / total);
    #[unroll]
    for k in 0..4usize {
        let d = column + k * columns;
        if d < dim {
            y[vector * dim + d] = E::cast_from(numbers[k] * scale);
        }
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
    let sinks = sinks.map(|sinks| primitive(sinks).into_tensor_arg());
    combine::launch(
        &y.client,
        count((vectors * shape[3].div_ceil(4)).div_ceil(LANES)),
        CubeDim::new_1d(LANES as u32),
        address_type([&parts, &y]),
        parts.into_tensor_arg(),
        sinks.into(),
        y.clone().into_tensor_arg(),
        vectors,
        splits,
        shape[1],
        shape[2],
        shape[3],
        dtype_to_storage_type(dtype),
    );
    BurnTensor::from_primitive::<Cube>(y)
}
