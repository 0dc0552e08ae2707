//! `attention_decode`.

use cubecl::prelude::*;

use super::{
    Four, Info, LOWEST, Place, cap,
    combine::{Last, combine_in_last},
    few::{largest_of_lanes, sum_of_lanes},
    four, turn, write,
};
use crate::runtime::launch::LANES;

/// Lanes that read the vector of one key together.
const TOGETHER: usize = 4;

#[cube(launch, address_type = "dynamic")]
pub(super) fn decode<E: Float, R: Float, N: Size>(
    q: &Tensor<E>,
    keys: &Tensor<Vector<E, N>>,
    values: &Tensor<Vector<E, N>>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    y: &mut Tensor<R>,
    last: ComptimeOption<Last<'_, E>>,
    info: &Info,
    // Rows per workgroup, in fours.
    #[comptime] fours: usize,
    #[comptime] split: bool,
    #[define(E, R)] _elems: [ElemType; 2],
) {
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    attend::<E, R, N>(q, keys, values, positions, bound, y, info, fours, split);
    combine_in_last::<E, R>(last, &*y, positions, bound, info, fours);
}

/// [`decode`] for one query of each row, whose key and value are written into the buffers first.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<E: Float, R: Float, N: Size>(
    q: &Tensor<E>,
    keys: &mut Tensor<Vector<E, N>>,
    values: &mut Tensor<Vector<E, N>>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    y: &mut Tensor<R>,
    last: ComptimeOption<Last<'_, E>>,
    new_keys: &Tensor<Vector<E, N>>,
    new_values: &Tensor<Vector<E, N>>,
    info: &Info,
    #[comptime] fours: usize,
    #[comptime] split: bool,
    #[define(E, R)] _elems: [ElemType; 2],
) {
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    let place = Place::new(CUBE_POS, comptime!(4 * fours), positions, bound, info);
    let part = place.part(info);
    // No other workgroup reads them.
    if part.begin <= place.first && place.first < part.end {
        let slot = (usize::cast_from(place.first) + info.slots - info.origin) % info.slots;
        write_newest::<E, N>(keys, new_keys, &place, slot, positions, info);
        write_newest::<E, N>(values, new_values, &place, slot, positions, info);
    }
    sync_storage();
    attend::<E, R, N>(q, &*keys, &*values, positions, bound, y, info, fours, split);
    combine_in_last::<E, R>(last, &*y, positions, bound, info, fours);
}

/// Writes the vector of the newest token into a slot.
#[cube]
fn write_newest<E: Float, N: Size>(
    buffer: &mut Tensor<Vector<E, N>>,
    new: &Tensor<Vector<E, N>>,
    place: &Place,
    slot: usize,
    positions: &Tensor<i32>,
    info: &Info,
) {
    let width = buffer.vector_size();
    let to = (first_vector::<E, N>(&*buffer, place, positions, info) + slot * buffer.stride(2)) / width;
    let from = (place.batch * new.stride(0) + place.kv_head * new.stride(1)) / width;
    let mut c = UNIT_POS as usize;
    while c < info.head_dim / width {
        let at = to + c * buffer.stride(3);
        buffer[at] = new[from + c * new.stride(3)];
        c += LANES;
    }
}

/// The offset of the vectors of a row's slots for one key head.
#[cube]
fn first_vector<E: Float, N: Size>(
    buffer: &Tensor<Vector<E, N>>,
    place: &Place,
    positions: &Tensor<i32>,
    info: &Info,
) -> usize {
    let base = usize::cast_from(positions[2 * info.batch + place.batch]);
    place.batch * buffer.stride(0) + place.kv_head * buffer.stride(1) + base * buffer.stride(2)
}

#[cube]
fn attend<E: Float, R: Float, N: Size>(
    q: &Tensor<E>,
    keys: &Tensor<Vector<E, N>>,
    values: &Tensor<Vector<E, N>>,
    positions: &Tensor<i32>,
    bound: &Tensor<i32>,
    y: &mut Tensor<R>,
    info: &Info,
    #[comptime] fours: usize,
    #[comptime] split: bool,
) {
    let lane = UNIT_POS as usize;
    let place = Place::new(CUBE_POS, comptime!(4 * fours), positions, bound, info);
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
        if lane <= place.last_row - place.first_row {
            let number = place.vector(place.first_row + lane, info) * info.parts + info.before + place.split;
            let at = number * (info.head_dim + 2);
            y[at + info.head_dim + 1] = R::cast_from(0.0f32);
        }
    } else {
        attend_between::<E, R, N>(q, keys, values, positions, y, &place, begin, end, info, fours, split);
    }
}

/// Attends to the keys at positions from `begin` to `end`. Multiply-adds are explicit: a compiler may
/// choose others, and may choose differently for more rows.
#[cube]
fn attend_between<E: Float, R: Float, N: Size>(
    q: &Tensor<E>,
    keys: &Tensor<Vector<E, N>>,
    values: &Tensor<Vector<E, N>>,
    positions: &Tensor<i32>,
    y: &mut Tensor<R>,
    place: &Place,
    begin: i32,
    end: i32,
    info: &Info,
    #[comptime] fours: usize,
    #[comptime] split: bool,
) {
    let lane = UNIT_POS as usize;
    let dim = info.head_dim;
    let columns = dim.div_ceil(4);
    let (first_row, last_row) = (place.first_row, place.last_row);

    // Query numbers of the rows, per dimension.
    let mut rows = Shared::<[Four]>::new_slice(256usize);
    // Sums per lane; then scores, then weights of keys.
    let mut memory = Shared::<[Four]>::new_slice(512usize);
    let mut results = Shared::<[Four]>::new_slice(comptime!(16 * fours));

    let mut i = lane;
    while i < 4 * columns * fours {
        let d = i / fours;
        let mut numbers = Four::new(0.0);
        #[unroll]
        for r in 0..4usize {
            let row = first_row + i % fours * 4 + r;
            if row <= last_row && d < dim {
                let head = place.kv_head * info.group + row % info.group;
                let at = place.batch * q.stride(0)
                    + head * q.stride(1)
                    + row / info.group * q.stride(2)
                    + d * q.stride(3);
                numbers.insert(r, f32::cast_from(q[at]) * info.scale);
            }
        }
        rows[i] = numbers;
        i += LANES;
    }

    // For each row: the visible range, the largest score so far, and the sums of weights and of values over
    // the keys of this lane.
    let mut begins = Array::<i32>::new(comptime!(4 * fours));
    let mut ends = Array::<i32>::new(comptime!(4 * fours));
    let mut largest = Array::<Four>::new(fours);
    let mut sums = Array::<Four>::new(fours);
    let mut vectors = Array::<Four>::new(comptime!(4 * fours));
    #[unroll]
    for r in 0..comptime!(4 * fours) {
        ends[r] = place.first + i32::cast_from((first_row + r) / info.group);
        begins[r] = max(place.earliest, ends[r] - info.window + 1);
        vectors[r] = Four::new(0.0);
    }
    #[unroll]
    for j in 0..fours {
        largest[j] = Four::new(LOWEST);
        sums[j] = Four::new(0.0);
    }
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let key_vectors = first_vector::<E, N>(keys, place, positions, info);
    let value_vectors = first_vector::<E, N>(values, place, positions, info);
    sync_cube();

    // A lane takes keys at positions with the same remainder, wherever a part begins.
    let mut base = begin - begin % LANES as i32;
    while base < end {
        let count = min(usize::cast_from(end - base), LANES);
        // Keys before the first one of the part are not read.
        let skip = usize::cast_from(max(begin - base, 0));
        let slot = (usize::cast_from(base) + skip + info.slots - info.origin) % info.slots;

        // A lane reads its share of four keys. Indices past the last key read the last one.
        let mut at = Array::<usize>::new(4usize);
        #[unroll]
        for u in 0..4usize {
            let own = clamp(lane / TOGETHER + 64 * u, skip, count - 1) - skip;
            at[u] = key_vectors + turn(slot + own, info.slots) * keys.stride(2);
        }
        let mut products = Array::<Four>::new(comptime!(4 * fours));
        #[unroll]
        for i in 0..comptime!(4 * fours) {
            products[i] = Four::new(0.0);
        }
        let mut c = lane % TOGETHER;
        while c < columns {
            #[unroll]
            for u in 0..4usize {
                if count > 64 * u {
                    let key = four::<E, N>(keys, at[u], c, dim);
                    #[unroll]
                    for j in 0..fours {
                        #[unroll]
                        for d in 0..4usize {
                            let numbers = rows[(4 * c + d) * fours + j];
                            let sum = products[u * fours + j];
                            products[u * fours + j] = fma(Four::new(key.extract(d)), numbers, sum);
                        }
                    }
                }
            }
            c += TOGETHER;
        }
        let mut scores = Array::<Four>::new(fours);
        #[unroll]
        for step in 0..comptime!(2 * fours) {
            let keys_a_step = comptime!(128 / fours);
            if step * keys_a_step < count {
                #[unroll]
                for i in 0..comptime!(2 / fours) {
                    #[unroll]
                    for j in 0..fours {
                        memory[(i * LANES + lane) * fours + j] =
                            products[(step * (2 / fours) + i) * fours + j];
                    }
                }
                sync_cube();
                if lane / keys_a_step == step {
                    #[unroll]
                    for j in 0..fours {
                        let i = lane % keys_a_step * TOGETHER * fours + j;
                        scores[j] =
                            memory[i] + memory[i + fours] + memory[i + 2 * fours] + memory[i + 3 * fours];
                    }
                }
                sync_cube();
            }
        }

        // From here on, a lane has one key.
        let position = base + i32::cast_from(lane);
        let mut visible = Array::<bool>::new(comptime!(4 * fours));
        #[unroll]
        for j in 0..fours {
            if info.softcap != 0.0 {
                scores[j] = cap(scores[j], info.softcap);
            }
            let mut masked = scores[j];
            #[unroll]
            for r in 0..4usize {
                visible[4 * j + r] =
                    begins[4 * j + r] <= position && position <= ends[4 * j + r] && lane < count;
                if !visible[4 * j + r] {
                    masked.insert(r, LOWEST);
                }
            }
            memory[lane * fours + j] = masked;
        }
        largest_of_lanes(&memory, &mut results, lane, fours);
        #[unroll]
        for j in 0..fours {
            let most = max(largest[j], results[j]);
            let shrunk = (largest[j] - most).exp();
            largest[j] = most;
            let mut weights = (scores[j] - most).exp();
            #[unroll]
            for r in 0..4usize {
                vectors[4 * j + r] *= Four::new(shrunk.extract(r));
                if !visible[4 * j + r] {
                    weights.insert(r, 0.0);
                }
            }
            sums[j] = fma(sums[j], shrunk, weights);
            memory[lane * fours + j] = weights;
        }
        sync_cube();

        if share < shares {
            let mut key = share + (skip + shares - 1 - share) / shares * shares;
            while key < count {
                let at = value_vectors + turn(slot + key - skip, info.slots) * values.stride(2);
                let value = four::<E, N>(values, at, column, dim);
                #[unroll]
                for j in 0..fours {
                    let weight = memory[key * fours + j];
                    #[unroll]
                    for r in 0..4usize {
                        vectors[4 * j + r] = fma(value, Four::new(weight.extract(r)), vectors[4 * j + r]);
                    }
                }
                key += shares;
            }
        }
        sync_cube();
        base += LANES as i32;
    }

    #[unroll]
    for j in 0..fours {
        memory[lane * fours + j] = sums[j];
    }
    sum_of_lanes(&memory, &mut results, lane, fours);
    #[unroll]
    for j in 0..fours {
        #[unroll]
        for half in 0..2usize {
            // All lanes have read what was there before.
            sync_cube();
            memory[lane] = vectors[4 * j + 2 * half];
            memory[LANES + lane] = vectors[4 * j + 2 * half + 1];
            sync_cube();
            // Half of the lanes take one row, half the other.
            #[unroll]
            for other in 0..2usize {
                let r = 2 * half + other;
                let row = first_row + 4 * j + r;
                let c = lane % 128;
                if lane / 128 == other && c < columns && row <= last_row {
                    let mut vector = Four::new(0.0);
                    for i in 0..shares {
                        vector += memory[other * LANES + i * columns + c];
                    }
                    let number = place.vector(row, info) * info.parts + info.before + place.split;
                    write::<R>(
                        y,
                        number,
                        vector,
                        largest[j].extract(r),
                        results[j].extract(r),
                        c,
                        dim,
                        split,
                    );
                }
            }
        }
    }
}
