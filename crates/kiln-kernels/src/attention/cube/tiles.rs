//! `attention_tiles` for NVIDIA's tensor cores: blocks of 32 keys, which are loaded by all warps of a
//! workgroup. A warp takes 16 rows. Scores, and what they become, pass through memory of its own.

use std::f32::consts::LN_2;

use burn::tensor::Device;
use burn_cubecl::tensor::CubeTensor;
use cubecl::{cmma, prelude::*};

use super::{Four, Info, LOWEST, Place, cap, turn, write};
use crate::{
    attention::Attention,
    runtime::{
        kernel::Kernel,
        launch::{comes_in, write_permutation},
        tensor_cores::{ALIGNMENT, EIGHT, Eight, SIZE, WARP, matrix, multiplies, zeros},
    },
};

/// Rows of a workgroup: [`SIZE`] for each warp.
const ROWS: usize = 64;

/// Lanes of a workgroup.
pub(super) const LANES: usize = ROWS / SIZE * WARP;

/// Keys in memory.
const KEYS: usize = 32;

/// Distance of the scores of two rows, in fours, and of their weights, in eights. With one vector between
/// them, they are in different banks.
const SCORES: usize = KEYS / 4 + 1;
const WEIGHTS: usize = KEYS / EIGHT + 1;

/// The longest vectors that registers have room for.
const LONGEST: usize = 128;

/// A weight is `exp(score - bar)`. `FIRST` is the largest weight's exponent when the bar of its row is set,
/// and no exponent exceeds `MOST`: a larger one sets a new bar. Weights are therefore at most 2^14, which
/// float16 holds, and those down to 2^-21 of the largest are normal numbers.
const FIRST: f32 = 7.0 * LN_2;
const MOST: f32 = 14.0 * LN_2;

/// Less than every score, and more than [`LOWEST`], the score of hidden keys.
const NO_BAR: f32 = -1e30;

/// Whether tensor cores multiply queries, keys and values.
pub(super) fn takes(tensors: [&CubeTensor; 3], device: &Device) -> bool {
    let [q, ..] = tensors;
    let is_taken = |dim: usize| dim.is_multiple_of(SIZE) && dim <= LONGEST;
    q.meta.shape().last().is_some_and(|&dim| is_taken(dim))
        && tensors.into_iter().all(|tensor| comes_in(EIGHT, tensor))
        && multiplies(Attention::NAME, q, q.dtype, device)
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn attention_tiles<E: Float, R: Float>(
    q: &Tensor<Eight<E>>,
    keys: &Tensor<Eight<E>>,
    values: &Tensor<Eight<E>>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    y: &mut Tensor<R>,
    info: &Info,
    #[comptime] dim: usize,
    #[comptime] split: bool,
    #[define(E, R)] _elems: [ElemType; 2],
) {
    write_permutation(comptime!(if split { format!("{dim}-split") } else { format!("{dim}") }));
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let (warp, lane) = (unit / WARP, unit % WARP);
    // Eights in a vector, matrices along it, and eights from one vector in memory to the next.
    let (eights, along, pitch) = comptime!((dim / EIGHT, dim / SIZE, dim / EIGHT + 1));
    let place = Place::new(CUBE_POS, ROWS, positions, bound, info);
    let (first_row, last_row) = (place.first_row, place.last_row);
    let part = place.part(info);
    let (begin, end) = (part.begin, part.end);
    if comptime!(split) && begin >= end {
        // No visible key: the weight is 0.
        if unit <= last_row - first_row {
            let number = place.vector(first_row + unit, info) * info.parts + info.before + place.split;
            y[number * comptime!(dim + 2) + comptime!(dim + 1)] = R::cast_from(0.0f32);
        }
        terminate!();
    }

    // Queries first. Then keys, and as many values.
    let mut vectors = Shared::<[Eight<E>]>::new_aligned_slice(comptime!(2 * KEYS * pitch), ALIGNMENT);
    let of_values = comptime!(KEYS * pitch);
    // Scores first, then sums that are rescaled or written as the result.
    let mut scores = Shared::<[Four]>::new_aligned_slice(comptime!(ROWS * SCORES), ALIGNMENT);
    let mut weights = Shared::<[Eight<E>]>::new_aligned_slice(comptime!(ROWS * WEIGHTS), ALIGNMENT);
    let own_scores = warp * comptime!(SIZE * SCORES);
    let own_weights = warp * comptime!(SIZE * WEIGHTS);

    #[unroll]
    for i in 0..comptime!(ROWS * eights / LANES) {
        let eight = unit + comptime!(i * LANES);
        let row = min(first_row + eight / eights, last_row);
        let head = place.kv_head * info.group + row % info.group;
        let at = place.batch * q.stride(0) + head * q.stride(1) + row / info.group * q.stride(2);
        vectors[eight / eights * pitch + eight % eights] = q[at / EIGHT + eight % eights];
    }
    sync_cube();
    let mut queries = Sequence::<cmma::Matrix<Eight<E>>>::new();
    let mut results = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for i in 0..along {
        let from = warp * comptime!(SIZE * pitch) + comptime!(i * (SIZE / EIGHT));
        let (ident, layout) = comptime!((cmma::MatrixIdent::A, cmma::MatrixLayout::RowMajor));
        queries.push(matrix::<E>(&vectors, from, pitch, ident, layout));
        results.push(zeros());
    }
    sync_cube();

    // Two lanes share a row. Of 32 scores, each has 16.
    let row = lane / 2;
    let half = lane % 2;
    let of_row = first_row + warp * SIZE + row;
    let own_row = (warp * SIZE + row) * SCORES;
    let query = place.first + i32::cast_from(of_row / info.group);
    let first_seen = max(place.earliest, query - info.window + 1);
    let last_seen = min(query, end - 1);
    // The first and the last key that all rows see.
    let last_query = place.first + i32::cast_from(last_row / info.group);
    let whole_from = max(place.earliest, last_query - info.window + 1);
    let whole_to = min(place.first + i32::cast_from(first_row / info.group), end - 1);
    let mut bar = f32::new(NO_BAR);
    // Of the weights of this lane.
    let mut sum = f32::new(0.0);

    // The slot of the first key, the number of keys after it, and the first slot of the row.
    let slot = (usize::cast_from(begin) + info.slots - info.origin) % info.slots;
    let last = usize::cast_from(max(end - 1 - begin, 0));
    let own = usize::cast_from(positions[2 * info.batch + place.batch]);
    let from_keys = place.batch * keys.stride(0) + place.kv_head * keys.stride(1) + own * keys.stride(2);
    let from_values =
        place.batch * values.stride(0) + place.kv_head * values.stride(1) + own * values.stride(2);
    let key_cursor = Cursor { from: from_keys, stride: keys.stride(2), slot, last, slots: info.slots };
    let value_cursor = Cursor { from: from_values, stride: values.stride(2), slot, last, slots: info.slots };

    // Keys are loaded one block ahead of values.
    let mut next_keys = Array::<Eight<E>>::new(comptime!((KEYS * eights).div_ceil(LANES)));
    let mut next_values = Array::<Eight<E>>::new(comptime!((KEYS * eights).div_ceil(LANES)));
    read::<E>(&mut next_keys, keys, &key_cursor, 0usize.runtime(), eights);
    put::<E>(&mut vectors, 0usize, &next_keys, eights);
    read::<E>(&mut next_keys, keys, &key_cursor, KEYS.runtime(), eights);
    read::<E>(&mut next_values, values, &value_cursor, 0usize.runtime(), eights);
    sync_cube();

    let mut base = begin;
    let mut done = 0usize.runtime();
    while base < end {
        #[unroll]
        for across in 0..comptime!(KEYS / SIZE) {
            let products = zeros();
            #[unroll]
            for i in 0..along {
                // The columns of the transposed keys.
                let from = comptime!(across * SIZE * pitch + i * (SIZE / EIGHT));
                let (ident, layout) = comptime!((cmma::MatrixIdent::B, cmma::MatrixLayout::ColMajor));
                let some = matrix::<E>(&vectors, from.runtime(), pitch, ident, layout);
                cmma::execute(&queries[i], &some, &products, &products);
            }
            store(&mut scores, own_scores + comptime!(across * SIZE / 4), &products);
        }
        // All warps have read the keys, and the values before these.
        sync_cube();
        put::<E>(&mut vectors, 0usize, &next_keys, eights);
        put::<E>(&mut vectors, of_values, &next_values, eights);

        let mut fours = Array::<Four>::new(4usize);
        let mut most = f32::new(LOWEST);
        #[unroll]
        for i in 0..4usize {
            let mut four = scores[own_row + 4 * half + i] * Four::new(info.scale);
            if info.softcap != 0.0 {
                four = cap(four, info.softcap);
            }
            // All rows see most blocks whole.
            if base < whole_from || base + comptime!(KEYS as i32 - 1) > whole_to {
                #[unroll]
                for j in 0..4usize {
                    let position = base + i32::cast_from(16 * half + comptime!(4 * i + j));
                    if position < first_seen || position > last_seen {
                        four.insert(j, LOWEST);
                    }
                }
            }
            #[unroll]
            for j in 0..4usize {
                most = max(most, four.extract(j));
            }
            fours[i] = four;
        }
        // Functions of a warp are for the lanes that are there: all, after a barrier.
        sync_plane();
        most = max(most, plane_shuffle_xor(most, 1u32));
        let mut shrunk = f32::new(1.0);
        let mut is_raised = false.runtime();
        if most > bar + MOST {
            // Without a bar, sums are 0.
            is_raised = bar > NO_BAR;
            shrunk = (bar - (most - FIRST)).exp();
            bar = most - FIRST;
        }
        let mut added = Four::new(0.0);
        #[unroll]
        for pair in 0..2usize {
            let mut eight = Eight::<E>::new(E::from_int(0));
            #[unroll]
            for i in 0..2usize {
                let four = (fours[2 * pair + i] - Four::new(bar)).exp();
                added += four;
                #[unroll]
                for j in 0..4usize {
                    eight.insert(comptime!(4 * i + j), E::cast_from(four.extract(j)));
                }
            }
            weights[own_weights + row * WEIGHTS + 2 * half + pair] = eight;
        }
        sum = sum * shrunk + added.dot(Four::new(1.0));
        sync_plane();
        if plane_any(is_raised) {
            #[unroll]
            for i in 0..along {
                store(&mut scores, own_scores, &results[i]);
                sync_plane();
                #[unroll]
                for c in 0..2usize {
                    let at = own_row + 2 * half + c;
                    scores[at] *= Four::new(shrunk);
                }
                sync_plane();
                let to = own_scores + comptime!((SIZE - 1) * SCORES + SIZE / 4);
                cmma::load_with_layout(
                    &mut results[i],
                    scores.slice(own_scores, to),
                    comptime!(4 * SCORES as u32),
                    cmma::MatrixLayout::RowMajor,
                );
                sync_plane();
            }
        }
        // The next keys, these values, and weights are there.
        sync_cube();
        read::<E>(&mut next_values, values, &value_cursor, done + KEYS, eights);
        read::<E>(&mut next_keys, keys, &key_cursor, done + comptime!(2 * KEYS), eights);
        #[unroll]
        for k in 0..comptime!(KEYS / SIZE) {
            let from = own_weights + comptime!(k * (SIZE / EIGHT));
            let (ident, layout) = comptime!((cmma::MatrixIdent::A, cmma::MatrixLayout::RowMajor));
            let those = matrix::<E>(&weights, from, WEIGHTS, ident, layout);
            #[unroll]
            for i in 0..along {
                let from = comptime!(KEYS * pitch + k * SIZE * pitch + i * (SIZE / EIGHT));
                let (ident, layout) = comptime!((cmma::MatrixIdent::B, cmma::MatrixLayout::RowMajor));
                let some = matrix::<E>(&vectors, from.runtime(), pitch, ident, layout);
                let result = &results[i];
                cmma::execute(&those, &some, result, result);
            }
        }
        base += comptime!(KEYS as i32);
        done += KEYS;
    }

    sync_plane();
    sum += plane_shuffle_xor(sum, 1u32);
    #[unroll]
    for i in 0..along {
        sync_plane();
        store(&mut scores, own_scores, &results[i]);
        sync_plane();
        if of_row <= last_row {
            let number = place.vector(of_row, info) * info.parts + info.before + place.split;
            #[unroll]
            for c in 0..2usize {
                let four = scores[own_row + 2 * half + c];
                write::<R>(y, number, four, bar, sum, 4 * i + 2 * half + c, dim, split);
            }
        }
    }
}

/// The vectors that a workgroup reads of a tensor.
#[derive(CubeType)]
struct Cursor {
    /// Numbers before the vector of slot 0, and between two slots.
    from: usize,
    stride: usize,
    /// The slot of the first vector, the number of vectors after it, and that of slots.
    slot: usize,
    last: usize,
    slots: usize,
}

/// Reads what a lane loads of the vectors from `first` on. Those after the last one are replaced by the last
/// one, for which no row has a weight.
#[cube]
fn read<E: Float>(
    to: &mut Array<Eight<E>>,
    tensor: &Tensor<Eight<E>>,
    cursor: &Cursor,
    first: usize,
    #[comptime] eights: usize,
) {
    #[unroll]
    for i in 0..comptime!((KEYS * eights).div_ceil(LANES)) {
        let eight = min(UNIT_POS as usize + comptime!(i * LANES), comptime!(KEYS * eights - 1));
        let slot = turn(cursor.slot + min(first + eight / eights, cursor.last), cursor.slots);
        to[i] = tensor[(cursor.from + slot * cursor.stride) / EIGHT + eight % eights];
    }
}

/// Writes what a lane [read] to memory.
#[cube]
fn put<E: Float>(
    memory: &mut Shared<[Eight<E>]>,
    #[comptime] to: usize,
    from: &Array<Eight<E>>,
    #[comptime] eights: usize,
) {
    #[unroll]
    for i in 0..comptime!((KEYS * eights).div_ceil(LANES)) {
        let eight = UNIT_POS as usize + comptime!(i * LANES);
        if comptime!((i + 1) * LANES <= KEYS * eights) || eight < comptime!(KEYS * eights) {
            memory[to + eight / eights * comptime!(eights + 1) + eight % eights] = from[i];
        }
    }
}

/// Writes sums to memory, in rows of scores.
#[cube]
fn store(memory: &mut Shared<[Four]>, from: usize, sums: &cmma::Matrix<f32>) {
    let to = from + comptime!((SIZE - 1) * SCORES + SIZE / 4);
    let stride = comptime!(4 * SCORES as u32);
    cmma::store(memory.slice_mut(from, to), sums, stride, cmma::MatrixLayout::RowMajor);
}
