//! `attention_prefill`.

use cubecl::prelude::*;

use super::{Four, Info, LOWEST, Place, cap, four, turn, write};
use crate::runtime::launch::LANES;

const ROWS: usize = 64;
const KEYS: usize = 64;

/// Weights of four rows for 16 keys, and one vector more, so that the fours are in different banks.
const WEIGHTS: usize = 17;

/// Offset of the values, which come after the weights.
const VALUES: usize = 16 * WEIGHTS;

#[cube(launch, address_type = "dynamic")]
pub(super) fn prefill<E: Float, R: Float, N: Size>(
    q: &Tensor<Vector<E, N>>,
    keys: &Tensor<Vector<E, N>>,
    values: &Tensor<Vector<E, N>>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    y: &mut Tensor<R>,
    info: &Info,
    // Number of parts of 64 dimensions in a vector.
    #[comptime] parts: usize,
    #[comptime] split: bool,
    #[define(E, R)] _elems: [ElemType; 2],
) {
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let dim = info.head_dim;
    let columns = dim.div_ceil(4);
    let place = Place::new(CUBE_POS, ROWS, positions, bound, info);
    let (first_row, last_row) = (place.first_row, place.last_row);

    // First queries and keys [4 fours of dimensions, 64]. Then the largest scores of each lane. Then, for 16
    // keys, weights [16 fours of rows, 16 keys] and values [16 keys, 32 fours of dimensions].
    let mut memory = Shared::<[Four]>::new_slice(comptime!(VALUES + 2 * LANES));
    let mut bounds = Shared::<[i32]>::new_slice(2usize);
    if lane == 0 {
        let part = place.part(info);
        bounds[0] = part.begin;
        bounds[1] = part.end;
    }
    let begin = workgroup_uniform_load(&bounds[0]);
    let end = workgroup_uniform_load(&bounds[1]);
    if comptime!(split) && begin >= end {
        // No visible key: the weight is 0.
        if lane <= last_row - first_row {
            let number = place.vector(first_row + lane, info) * info.parts + info.before + place.split;
            y[number * (dim + 2) + dim + 1] = R::cast_from(0.0f32);
        }
        terminate!();
    }

    // A lane keeps four rows throughout: their scores for four keys, and four dimensions of every 64.
    let quartet = lane / 16;
    let sixteenth = lane % 16;
    let mut begins = Array::<i32>::new(4usize);
    let mut ends = Array::<i32>::new(4usize);
    #[unroll]
    for r in 0..4usize {
        let query = place.first + i32::cast_from((first_row + 4 * quartet + r) / info.group);
        begins[r] = max(place.earliest, query - info.window + 1);
        ends[r] = min(query, end - 1);
    }
    let mut largest = Four::new(LOWEST);
    // Sums over the keys of this lane.
    let mut sums = Four::new(0.0);
    let mut vectors = Array::<Four>::new(comptime!(4 * parts));
    #[unroll]
    for i in 0..comptime!(4 * parts) {
        vectors[i] = Four::new(0.0);
    }

    // This lane loads a part of the query of one row, of a key, and of values.
    let loaded_row = min(first_row + lane / 4, last_row);
    let loaded_head = place.kv_head * info.group + loaded_row % info.group;
    let query_vector =
        place.batch * q.stride(0) + loaded_head * q.stride(1) + loaded_row / info.group * q.stride(2);
    let base = usize::cast_from(positions[2 * info.batch + place.batch]);
    let key_vectors = place.batch * keys.stride(0) + place.kv_head * keys.stride(1) + base * keys.stride(2);
    let value_vectors =
        place.batch * values.stride(0) + place.kv_head * values.stride(1) + base * values.stride(2);

    let mut base = begin;
    while base < end {
        let count = min(usize::cast_from(end - base), KEYS);
        let slot = (usize::cast_from(base) + info.slots - info.origin) % info.slots;

        // Scores for four keys.
        let mut scores = Array::<Four>::new(4usize);
        #[unroll]
        for k in 0..4usize {
            scores[k] = Four::new(0.0);
        }
        let mut c = 0;
        while c < columns {
            let column = c + lane % 4;
            let mut query = Four::new(0.0);
            let mut key = Four::new(0.0);
            if column < columns {
                query = four::<E, N>(q, query_vector, column, dim) * Four::new(info.scale);
                if lane / 4 < count {
                    let at = key_vectors + turn(slot + lane / 4, info.slots) * keys.stride(2);
                    key = four::<E, N>(keys, at, column, dim);
                }
            }
            memory[lane % 4 * ROWS + lane / 4] = query;
            memory[LANES + lane % 4 * KEYS + lane / 4] = key;
            sync_cube();
            #[unroll]
            for i in 0..4usize {
                let mut queries = Array::<Four>::new(4usize);
                #[unroll]
                for r in 0..4usize {
                    queries[r] = memory[i * ROWS + 4 * quartet + r];
                }
                #[unroll]
                for k in 0..4usize {
                    let key = memory[LANES + i * KEYS + sixteenth + 16 * k];
                    let mut products = Four::new(0.0);
                    #[unroll]
                    for r in 0..4usize {
                        products.insert(r, key.dot(queries[r]));
                    }
                    scores[k] += products;
                }
            }
            sync_cube();
            c += 4;
        }

        let mut visible = Array::<bool>::new(16usize);
        let mut most = Four::new(LOWEST);
        #[unroll]
        for k in 0..4usize {
            if info.softcap != 0.0 {
                scores[k] = cap(scores[k], info.softcap);
            }
            let position = base + i32::cast_from(sixteenth + 16 * k);
            let mut masked = scores[k];
            #[unroll]
            for r in 0..4usize {
                visible[4 * k + r] = begins[r] <= position && position <= ends[r];
                if !visible[4 * k + r] {
                    masked.insert(r, LOWEST);
                }
            }
            most = max(most, masked);
        }
        memory[lane] = most;
        sync_cube();
        most = largest;
        #[unroll]
        for i in 0..16usize {
            most = max(most, memory[quartet * 16 + i]);
        }
        let shrunk = (largest - most).exp();
        largest = most;
        sums *= shrunk;
        #[unroll]
        for k in 0..4usize {
            // The weights.
            let mut weights = (scores[k] - most).exp();
            #[unroll]
            for r in 0..4usize {
                if !visible[4 * k + r] {
                    weights.insert(r, 0.0);
                }
            }
            sums += weights;
            scores[k] = weights;
        }
        #[unroll]
        for i in 0..parts {
            #[unroll]
            for r in 0..4usize {
                vectors[4 * i + r] *= Four::new(shrunk.extract(r));
            }
        }
        sync_cube();

        #[unroll]
        for sixteen in 0..4usize {
            if 16 * sixteen < count {
                memory[quartet * WEIGHTS + sixteenth] = scores[sixteen];
                #[unroll]
                for pair in 0..comptime!(parts.div_ceil(2)) {
                    // A lane has as many fours as there are parts in memory.
                    let key = 16 * sixteen + quartet;
                    let at = value_vectors + turn(slot + key, info.slots) * values.stride(2);
                    #[unroll]
                    for part in 0..2usize {
                        if comptime!(2 * pair + part < parts) {
                            let column = 16 * (2 * pair + part) + sixteenth;
                            let mut value = Four::new(0.0);
                            if column < columns && key < count {
                                value = four::<E, N>(values, at, column, dim);
                            }
                            memory[VALUES + (2 * quartet + part) * 16 + sixteenth] = value;
                        }
                    }
                    sync_cube();
                    for k in 0..16usize {
                        let weight = memory[quartet * WEIGHTS + k];
                        #[unroll]
                        for part in 0..2usize {
                            if comptime!(2 * pair + part < parts) {
                                let value = memory[VALUES + (2 * k + part) * 16 + sixteenth];
                                #[unroll]
                                for r in 0..4usize {
                                    vectors[4 * (2 * pair + part) + r] +=
                                        value * Four::new(weight.extract(r));
                                }
                            }
                        }
                    }
                    sync_cube();
                }
            }
        }
        base += KEYS as i32;
    }

    memory[lane] = sums;
    sync_cube();
    sums = Four::new(0.0);
    #[unroll]
    for i in 0..16usize {
        sums += memory[quartet * 16 + i];
    }
    #[unroll]
    for i in 0..parts {
        let column = 16 * i + sixteenth;
        if column < columns {
            #[unroll]
            for r in 0..4usize {
                let row = first_row + 4 * quartet + r;
                if row <= last_row {
                    let number = place.vector(row, info) * info.parts + info.before + place.split;
                    write::<R>(
                        y,
                        number,
                        vectors[4 * i + r],
                        largest.extract(r),
                        sums.extract(r),
                        column,
                        dim,
                        split,
                    );
                }
            }
        }
    }
}
