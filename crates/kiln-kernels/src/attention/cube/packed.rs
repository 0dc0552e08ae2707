//! `attention_packed`.

use cubecl::prelude::*;

use super::{
    Four, LOWEST, cap, chunk_of,
    few::{largest_of_lanes, sum_of_lanes},
    turn,
};
use crate::runtime::{half::half_number, launch::LANES};

/// Lanes that read the vector of one key together.
const TOGETHER: usize = 4;

/// Numbers of the rows for each dimension, followed by some zeros.
const ROOM: usize = 304;

/// Codes of a word that are unrolled. More would take all registers.
const UNROLLED: usize = 10;

/// Parameters that are the same for all workgroups.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PackedInfo {
    kv_heads: usize,
    /// Query heads per key head.
    group: usize,
    queries: usize,
    slots: usize,
    head_dim: usize,
    origin: usize,
    start: i32,
    window: i32,
    scale: f32,
    /// 0 if there is no cap.
    softcap: f32,
    /// Rows in the batch.
    batch: usize,
    /// Workgroups for all rows, and parts of the keys.
    tiles: usize,
    splits: usize,
    workgroups: usize,
    /// Number of parts in total; the parts of recent keys follow these.
    parts: usize,
    /// Parts begin at multiples of this position.
    chunk: i32,
    key_channels: usize,
    key_together: usize,
    key_group: usize,
    value_channels: usize,
    value_together: usize,
    value_group: usize,
}

/// The packing of keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Codes {
    pub(crate) along_tokens: bool,
    pub(crate) bits: u32,
}

/// Returns the code at `place` in a word, in the first bits of a mantissa: `1 + code / 2^bits`. This avoids a
/// conversion, which is slow on some GPUs. So scales are for 2^bits steps, and offsets for code -2^bits. All
/// of this is exact, because scales have few bits.
#[cube]
fn code(word: u32, place: u32, #[comptime] bits: u32) -> f32 {
    let (from_bit, to_bit) = (place * bits, comptime!(23 - bits).runtime());
    let larger = max(from_bit, to_bit);
    // One of the two shifts is by 0.
    let moved = (word << (larger - from_bit)) >> (larger - to_bit);
    f32::reinterpret((moved & comptime!(((1u32 << bits) - 1) << (23 - bits))) | 0x3f80_0000u32)
}

/// Returns the scale in a word, for 2^bits steps.
#[cube]
fn scale_of(halves: u32, #[comptime] bits: u32) -> f32 {
    half_number(halves & 0xffffu32) * comptime!((1u32 << bits) as f32)
}

/// The first channel in a piece of a value.
#[cube]
fn channel_of(column: usize, info: &PackedInfo, #[comptime] codes: usize, #[comptime] piece: usize) -> usize {
    let pieces = comptime!(codes / piece);
    let word = column / pieces;
    word / info.value_together * info.value_channels
        + word % info.value_together * codes
        + column % pieces * piece
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn decode_codes<E: Float>(
    q: &Tensor<E>,
    keys: &Tensor<u32>,
    key_scales: &Tensor<u32>,
    values: &Tensor<u32>,
    value_scales: &Tensor<u32>,
    positions: &Tensor<i32>,
    // The first position that is not packed.
    beyond_packed: &Tensor<i32>,
    y: &mut Tensor<f32>,
    info: &PackedInfo,
    // Rows per workgroup, in fours.
    #[comptime] fours: usize,
    #[comptime] key_codes: Codes,
    #[comptime] value_codes: Codes,
    // Values per word that a lane takes.
    #[comptime] piece: usize,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= info.workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let dim = info.head_dim;
    let key_words = keys.shape(3);
    let (key_bits, value_bits) = comptime!((key_codes.bits, value_codes.bits));
    let (key_each, value_each) =
        comptime!(((32 / key_codes.bits) as usize, (32 / value_codes.bits) as usize));
    let pieces = comptime!(value_each / piece);

    let split = workgroup / info.tiles % info.splits;
    let kv_head = workgroup / info.tiles / info.splits % info.kv_heads;
    let batch = workgroup / info.tiles / info.splits / info.kv_heads;
    let first_row = (info.tiles - 1 - workgroup % info.tiles) * comptime!(4 * fours);
    let last_row = min(first_row + comptime!(4 * fours), info.group * info.queries) - 1;
    let first_head = (batch * info.kv_heads + kv_head) * info.group;

    // Slots hold only so many positions, and padding is hidden.
    let all_end = beyond_packed[0];
    let first = positions[batch];
    let earliest = max(max(info.start, positions[info.batch + batch]), all_end - i32::cast_from(info.slots));

    let mut rows = Shared::<[Four]>::new_slice(ROOM);
    let mut rows_of_words = Shared::<[Four]>::new_slice(64usize);
    let mut memory = Shared::<[Four]>::new_slice(512usize);
    let mut results = Shared::<[Four]>::new_slice(comptime!(16 * fours));
    let mut part = Shared::<[i32]>::new_slice(2usize);
    if lane == 0 {
        let begin = max(earliest, first + i32::cast_from(first_row / info.group) - info.window + 1);
        let own = chunk_of(begin, all_end, split, info.splits, info.chunk);
        part[0] = own.begin;
        part[1] = own.end;
    }
    let begin = workgroup_uniform_load(&part[0]);
    let end = workgroup_uniform_load(&part[1]);
    if begin >= end {
        // No visible key: the weight is 0.
        if lane <= last_row - first_row {
            let row = first_row + lane;
            let vector = (first_head + row % info.group) * info.queries + row / info.group;
            y[(vector * info.parts + split) * (dim + 2) + dim + 1] = 0.0;
        }
        terminate!();
    }

    let mut i = lane;
    while i < ROOM {
        let d = i / fours;
        let mut numbers = Four::new(0.0);
        #[unroll]
        for r in 0..4usize {
            let row = first_row + i % fours * 4 + r;
            if row <= last_row && d < dim {
                let at = batch * q.stride(0)
                    + (kv_head * info.group + row % info.group) * q.stride(1)
                    + row / info.group * q.stride(2)
                    + d * q.stride(3);
                numbers.insert(r, f32::cast_from(q[at]) * info.scale);
            }
        }
        rows[i] = numbers;
        i += LANES;
    }
    sync_cube();
    #[allow(clippy::collapsible_if, reason = "the first is decided when the kernel is compiled")]
    if comptime!(!key_codes.along_tokens) {
        if lane < key_words * fours {
            let word = lane / fours;
            let together = word / info.key_together;
            let from = together * info.key_channels + word % info.key_together * key_each;
            let beyond = min(min((together + 1) * info.key_channels, dim), from + key_each);
            let mut sum = Four::new(0.0);
            let mut d = from;
            while d < beyond {
                sum += rows[d * fours + lane % fours];
                d += 1;
            }
            rows_of_words[lane] = sum;
        }
    }

    let mut begins = Array::<i32>::new(comptime!(4 * fours));
    let mut largest = Array::<Four>::new(fours);
    let mut sums = Array::<Four>::new(fours);
    let mut offsets = Array::<Four>::new(fours);
    let mut vectors = Array::<Four>::new(comptime!(piece * fours));
    #[unroll]
    for r in 0..comptime!(4 * fours) {
        let position = first + i32::cast_from((first_row + r) / info.group);
        begins[r] = max(earliest, position - info.window + 1);
    }
    #[unroll]
    for j in 0..fours {
        largest[j] = Four::new(LOWEST);
        sums[j] = Four::new(0.0);
        offsets[j] = Four::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(piece * fours) {
        vectors[i] = Four::new(0.0);
    }
    let key_vectors = batch * keys.stride(0) + kv_head * keys.stride(1);
    let key_groups = batch * key_scales.stride(0) + kv_head * key_scales.stride(1);
    let value_vectors = batch * values.stride(0) + kv_head * values.stride(1);
    let value_groups = batch * value_scales.stride(0) + kv_head * value_scales.stride(1);
    // Columns are pieces of the words of a value.
    let columns = values.shape(3) * pieces;
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let word = column / pieces;
    let skipped = u32::cast_from(column % pieces * piece) * value_bits;
    let channel = channel_of(column, info, value_each, piece);
    sync_cube();

    // A lane takes keys at positions with the same remainder, wherever a part begins. Its four keys are in
    // one group.
    let mut base = begin - begin % LANES as i32;
    while base < end {
        let count = min(usize::cast_from(end - base), LANES);
        // Keys before the first one of the part are not read.
        let skip = usize::cast_from(max(begin - base, 0));
        let slot = (usize::cast_from(base) + skip + info.slots - info.origin) % info.slots;

        // A lane reads its share of four neighbouring keys. Indices past the last key read the last one.
        let quartet = lane / TOGETHER * 4;
        let mut products = Array::<Four>::new(comptime!(4 * fours));
        #[unroll]
        for i in 0..comptime!(4 * fours) {
            products[i] = Four::new(0.0);
        }
        if quartet < count {
            let mut at = Array::<usize>::new(4usize);
            #[unroll]
            for u in 0..4usize {
                at[u] = turn(slot + clamp(quartet + u, skip, count - 1) - skip, info.slots);
            }
            let run = key_words.div_ceil(TOGETHER);
            let mut w = lane % TOGETHER * run;
            let stop = min(w + run, key_words);
            if comptime!(key_codes.along_tokens) {
                let group = key_groups + at[0] / info.key_group * key_scales.stride(2);
                while w < stop {
                    let mut words = Array::<u32>::new(4usize);
                    #[unroll]
                    for u in 0..4usize {
                        words[u] = keys[key_vectors + at[u] * keys.stride(2) + w];
                    }
                    #[unroll(key_each <= UNROLLED)]
                    for i in 0..key_each {
                        let d = w * key_each + i;
                        let halves = key_scales[group + min(d, dim - 1)];
                        let scale = scale_of(halves, key_bits);
                        let offset = half_number(halves >> 16u32) - scale;
                        #[unroll]
                        for u in 0..4usize {
                            let number = fma(code(words[u], i as u32, key_bits), scale, offset);
                            #[unroll]
                            for j in 0..fours {
                                products[u * fours + j] += rows[d * fours + j] * Four::new(number);
                            }
                        }
                    }
                    w += 1;
                }
            } else {
                while w < stop {
                    // The words of a group. Offsets count for channels in the group only, which may end
                    // inside a word.
                    let group = w / info.key_together;
                    let until = min((group + 1) * info.key_together, stop);
                    let mut d = group * info.key_channels + w % info.key_together * key_each;
                    let mut halves = Array::<u32>::new(4usize);
                    let mut scales = Array::<f32>::new(4usize);
                    #[unroll]
                    for u in 0..4usize {
                        halves[u] = key_scales[key_groups + at[u] * key_scales.stride(2) + group];
                        scales[u] = scale_of(halves[u], key_bits);
                    }
                    let mut sums_of_rows = Array::<Four>::new(fours);
                    #[unroll]
                    for j in 0..fours {
                        sums_of_rows[j] = Four::new(0.0);
                    }
                    while w < until {
                        let mut words = Array::<u32>::new(4usize);
                        #[unroll]
                        for u in 0..4usize {
                            words[u] = keys[key_vectors + at[u] * keys.stride(2) + w];
                        }
                        #[unroll(key_each <= UNROLLED)]
                        for i in 0..key_each {
                            #[unroll]
                            for u in 0..4usize {
                                let number = fma(code(words[u], i as u32, key_bits), scales[u], -scales[u]);
                                #[unroll]
                                for j in 0..fours {
                                    products[u * fours + j] += rows[(d + i) * fours + j] * Four::new(number);
                                }
                            }
                        }
                        #[unroll]
                        for j in 0..fours {
                            sums_of_rows[j] += rows_of_words[w * fours + j];
                        }
                        d += key_each;
                        w += 1;
                    }
                    #[unroll]
                    for u in 0..4usize {
                        let offset = Four::new(half_number(halves[u] >> 16u32));
                        #[unroll]
                        for j in 0..fours {
                            products[u * fours + j] += sums_of_rows[j] * offset;
                        }
                    }
                }
            }
        }
        let mut scores = Array::<Four>::new(fours);
        #[unroll]
        for j in 0..fours {
            scores[j] = Four::new(0.0);
        }
        #[unroll]
        for step in 0..comptime!(2 * fours) {
            let keys_a_step = comptime!(128 / fours);
            if step * keys_a_step < count {
                if quartet / keys_a_step == step {
                    #[unroll]
                    for u in 0..4usize {
                        #[unroll]
                        for j in 0..fours {
                            let to = (quartet % keys_a_step + u) * TOGETHER + lane % TOGETHER;
                            memory[to * fours + j] = products[u * fours + j];
                        }
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
                visible[4 * j + r] = begins[4 * j + r] <= position && lane < count;
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
            offsets[j] *= shrunk;
            #[unroll]
            for i in 0..piece {
                vectors[i * fours + j] *= shrunk;
            }
            let mut weights = (scores[j] - most).exp();
            #[unroll]
            for r in 0..4usize {
                if !visible[4 * j + r] {
                    weights.insert(r, 0.0);
                }
            }
            sums[j] = sums[j] * shrunk + weights;
            memory[lane * fours + j] = weights;
        }
        sync_cube();

        if share < shares {
            let mut key = share + (skip + shares - 1 - share) / shares * shares;
            while key < count {
                let at = turn(slot + key - skip, info.slots);
                let codes = values[value_vectors + at * values.stride(2) + word] >> skipped;
                if comptime!(value_codes.along_tokens) {
                    let group = value_groups + at / info.value_group * value_scales.stride(2);
                    #[unroll]
                    for i in 0..piece {
                        let halves = value_scales[group + min(channel + i, dim - 1)];
                        let scale = scale_of(halves, value_bits);
                        let offset = half_number(halves >> 16u32) - scale;
                        let value = fma(code(codes, i as u32, value_bits), scale, offset);
                        #[unroll]
                        for j in 0..fours {
                            vectors[i * fours + j] += memory[key * fours + j] * Four::new(value);
                        }
                    }
                } else {
                    let group = word / info.value_together;
                    let halves = value_scales[value_groups + at * value_scales.stride(2) + group];
                    let scale = scale_of(halves, value_bits);
                    let offset = Four::new(half_number(halves >> 16u32) - scale);
                    let scale = Four::new(scale);
                    #[unroll]
                    for j in 0..fours {
                        let weight = memory[key * fours + j];
                        offsets[j] += weight * offset;
                        let scaled = weight * scale;
                        #[unroll]
                        for i in 0..piece {
                            vectors[i * fours + j] += scaled * Four::new(code(codes, i as u32, value_bits));
                        }
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
        for i in 0..piece {
            // All lanes have read what was there before.
            sync_cube();
            memory[lane] = vectors[i * fours + j] + offsets[j];
            sync_cube();
            if lane < columns {
                let mut vector = Four::new(0.0);
                for k in 0..shares {
                    vector += memory[k * columns + lane];
                }
                let d = channel_of(lane, info, value_each, piece) + i;
                let beyond = min((lane / pieces / info.value_together + 1) * info.value_channels, dim);
                #[unroll]
                for r in 0..4usize {
                    let row = first_row + 4 * j + r;
                    if row <= last_row {
                        let number = (first_head + row % info.group) * info.queries + row / info.group;
                        let to = (number * info.parts + split) * (dim + 2);
                        if d < beyond {
                            y[to + d] = vector.extract(r);
                        }
                        if d == 0 {
                            y[to + dim] = largest[j].extract(r);
                            y[to + dim + 1] = results[j].extract(r);
                        }
                    }
                }
            }
        }
    }
}
