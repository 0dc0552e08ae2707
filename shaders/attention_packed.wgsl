// A part of softmax(scale * q k) v for a few queries: the part over packed keys and values, which are codes.
// The loops are those of attention_decode. attention_combine adds its parts to those of the recent keys. With
// attention.wgsl and attention_few.wgsl.

alias elem = f32;
const KEYS_ALONG_TOKENS = false;
const KEY_BITS = 4u;
const VALUES_ALONG_TOKENS = false;
// Number of values per lane in a word.
const VALUE_BITS = 4u;
const PIECE = 8u / FOURS;
// Number of vec4s of rows per workgroup.
const FOURS = 1u;

struct Info {
    // [batch, heads, queries, head_dim]
    q_strides: vec4<u32>,
    // Both are [batch, kv_heads, slots, words]; words of a token are contiguous.
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    // Both are [batch, kv_heads, slots, groups] or [batch, kv_heads, groups, head_dim]; the last dimension is
    // contiguous.
    key_scale_strides: vec4<u32>,
    value_scale_strides: vec4<u32>,
    kv_heads: u32,
    // Number of query heads per KV head.
    group: u32,
    queries: u32,
    slots: u32,
    head_dim: u32,
    // The key of position p is in slot (p - origin) mod slots.
    origin: u32,
    start: i32,
    window: i32,
    scale: f32,
    // 0: no softcap.
    softcap: f32,
    // Number of rows in the batch.
    batch: u32,
    // Number of workgroups for all rows, and number of parts of the keys.
    tiles: u32,
    splits: u32,
    workgroups: u32,
    // Number of all parts. The parts of recent keys come after these.
    parts: u32,
    // Parts begin at multiples of this position.
    chunk: i32,
    // Number of words per vector; channels in a unit that begins at a word, and words per unit; elements per
    // group.
    key_words: u32,
    key_channels: u32,
    key_together: u32,
    key_group: u32,
    value_words: u32,
    value_channels: u32,
    value_together: u32,
    value_group: u32,
}

@group(0) @binding(0) var<storage, read_write> q: array<elem>;
@group(0) @binding(1) var<storage, read_write> keys: array<u32>;
@group(0) @binding(2) var<storage, read_write> key_scales: array<u32>;
@group(0) @binding(3) var<storage, read_write> values: array<u32>;
@group(0) @binding(4) var<storage, read_write> value_scales: array<u32>;
// [3, batch]: the position of the first query of each row, and the first position that the row may see.
@group(0) @binding(5) var<storage, read_write> positions: array<i32>;
// The first position that is not packed.
@group(0) @binding(6) var<storage, read_write> beyond_packed: array<i32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
@group(0) @binding(8) var<uniform> info: Info;

const SMALLEST = 5.9604644775390625e-8;
const KEY_CODES = 32u / KEY_BITS;
const VALUE_CODES = 32u / VALUE_BITS;
const PIECES = VALUE_CODES / PIECE;

// Elements of the rows: at most 256, followed by zeros for the unused codes of words.
const ROOM = 304u;
// Sums of the elements of the rows per word.
var<workgroup> rows_of_words: array<vec4<f32>, 64>;
// The float16 numbers in the low halves of words.
fn half_numbers(halves: vec4<u32>) -> vec4<f32> {
    let normal = bitcast<vec4<f32>>(((halves & vec4(0x7fffu)) << vec4(13u)) + vec4(0x38000000u));
    let small = vec4<f32>(halves & vec4(0x3ffu)) * SMALLEST;
    let numbers = select(normal, small, (halves & vec4(0x7c00u)) == vec4(0u));
    return select(numbers, -numbers, (halves & vec4(0x8000u)) != vec4(0u));
}

// Codes as the first bits of a mantissa: 1 + code / 2^bits. This avoids a conversion, which is slow on some
// GPUs. Scales are therefore multiplied by 2^bits, and offsets belong to code -2^bits. All of this is exact
// because scales have few bits.
fn codes_at(words: vec4<u32>, place: u32, bits: u32) -> vec4<f32> {
    let from_bit = place * bits;
    let to_bit = 23u - bits;
    let larger = max(from_bit, to_bit);
    // One of the two shifts is by 0.
    let moved = (words << vec4(larger - from_bit)) >> vec4(larger - to_bit);
    return bitcast<vec4<f32>>((moved & vec4(((1u << bits) - 1u) << to_bit)) | vec4(0x3f800000u));
}
const KEY_STEPS = f32(1u << KEY_BITS);
const VALUE_STEPS = f32(1u << VALUE_BITS);

// The scale and the offset of a word.
fn affine(word: u32, steps: f32) -> vec2<f32> {
    let numbers = half_numbers(vec4(word, word >> 16u, 0u, 0u));
    let scale = numbers.x * steps;
    return vec2(scale, numbers.y - scale);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let workgroup = group.x + group.y * groups.x;
    if workgroup >= info.workgroups {
        return;
    }
    let place = place_of(workgroup);
    // Slots hold no more positions than there are, and padding is hidden.
    let packed_end = beyond_packed[0];
    let visible_from = positions[info.batch + place.batch];
    let earliest = max(max(info.start, visible_from), packed_end - i32(info.slots));
    if lane == 0u {
        let begin = max(earliest, positions[place.batch] + i32(place.first_row / info.group) - info.window + 1);
        shared_part = part_of(place, begin, packed_end, info.value_words * PIECES);
    }
    let part = workgroupUniformLoad(&shared_part);
    let dim = part.head_dim;
    if part.begin >= part.end {
        // There are no visible keys: the weight is 0.
        if lane <= place.last_row - place.first_row {
            y[(vector_of(place, place.first_row + lane) * info.parts + place.split) * (dim + 2u) + dim + 1u] = 0.0;
        }
        return;
    }
    load_rows(place, ROOM, lane, dim);
    workgroupBarrier();
    if !KEYS_ALONG_TOKENS && lane < info.key_words * FOURS {
        let word = lane / FOURS;
        let together = word / info.key_together;
        let from_channel = together * info.key_channels + word % info.key_together * KEY_CODES;
        let beyond = min(min((together + 1u) * info.key_channels, dim), from_channel + KEY_CODES);
        var sum = vec4(0.0);
        for (var d = from_channel; d < beyond; d++) {
            sum += rows[d * FOURS + lane % FOURS];
        }
        rows_of_words[lane] = sum;
    }

    // Per row: the positions that it sees and the largest score so far. Then the sums of weights, of weights
    // times offsets, and of weighted values over this lane's keys.
    var begins: array<vec4<i32>, FOURS>;
    var largest: array<vec4<f32>, FOURS>;
    var sums: array<vec4<f32>, FOURS>;
    var offsets: array<vec4<f32>, FOURS>;
    // Sums for the first four codes of the lane's piece, and for the others.
    var low: array<mat4x4<f32>, FOURS>;
    var high: array<mat4x4<f32>, FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        let row = vec4(place.first_row + 4u * j) + vec4(0u, 1u, 2u, 3u);
        begins[j] = max(vec4(earliest), vec4(positions[place.batch]) + vec4<i32>(row / info.group) - info.window + 1);
        largest[j] = vec4(LOWEST);
    }
    let key_vectors = dot(vec2(place.batch, place.kv_head), info.key_strides.xy);
    let key_groups = dot(vec2(place.batch, place.kv_head), info.key_scale_strides.xy);
    let value_vectors = dot(vec2(place.batch, place.kv_head), info.value_strides.xy);
    let value_groups = dot(vec2(place.batch, place.kv_head), info.value_scale_strides.xy);
    let columns = part.columns;
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let word = column / PIECES;
    let together = word / info.value_together;
    let skipped = column % PIECES * PIECE;
    let channel = channels_of(column, dim).x;
    workgroupBarrier();

    for (var base = part.begin - part.begin % i32(LANES); base < part.end; base += i32(LANES)) {
        let count = min(u32(part.end - base), LANES);
        // Keys before the part are not read.
        let skip = u32(max(part.begin - base, 0));
        let slot = (u32(base) + skip + info.slots - info.origin) % info.slots;

        // A lane reads its share of four neighboring keys, which are in one group. Keys past the last one are
        // replaced by the last one.
        let quartet = lane / TOGETHER * 4u;
        // One column per key.
        var products: array<mat4x4<f32>, FOURS>;
        if quartet < count {
            let own = clamp(vec4(quartet) + vec4(0u, 1u, 2u, 3u), vec4(skip), vec4(count - 1u)) - skip;
            let at = vec4(turn(slot + own.x), turn(slot + own.y), turn(slot + own.z), turn(slot + own.w));
            let vector = vec4(key_vectors) + at * info.key_strides.z;
            let run = (info.key_words + TOGETHER - 1u) / TOGETHER;
            var w = lane % TOGETHER * run;
            let stop = min(w + run, info.key_words);
            if KEYS_ALONG_TOKENS {
                let group = key_groups + at.x / info.key_group * info.key_scale_strides.z;
                for (; w < stop; w++) {
                    let words = vec4(keys[vector.x + w], keys[vector.y + w], keys[vector.z + w], keys[vector.w + w]);
                    for (var i = 0u; i < KEY_CODES; i++) {
                        let d = w * KEY_CODES + i;
                        let scale = affine(key_scales[group + min(d, dim - 1u)], KEY_STEPS);
                        let numbers = fma(codes_at(words, i, KEY_BITS), vec4(scale.x), vec4(scale.y));
                        for (var j = 0u; j < FOURS; j++) {
                            products[j] += outer(rows[d * FOURS + j], numbers);
                        }
                    }
                }
            } else {
                let groups = vec4(key_groups) + at * info.key_scale_strides.z;
                while w < stop {
                    // The words of a group. Offsets count only for the group's channels, which may end inside
                    // a word.
                    let group = w / info.key_together;
                    let until = min((group + 1u) * info.key_together, stop);
                    var d = group * info.key_channels + w % info.key_together * KEY_CODES;
                    let halves = vec4(
                        key_scales[groups.x + group],
                        key_scales[groups.y + group],
                        key_scales[groups.z + group],
                        key_scales[groups.w + group],
                    );
                    let scale = half_numbers(halves) * KEY_STEPS;
                    var sums_of_rows: array<vec4<f32>, FOURS>;
                    for (; w < until; w++) {
                        let words = vec4(keys[vector.x + w], keys[vector.y + w], keys[vector.z + w], keys[vector.w + w]);
                        for (var i = 0u; i < KEY_CODES; i++) {
                            let numbers = fma(codes_at(words, i, KEY_BITS), scale, -scale);
                            for (var j = 0u; j < FOURS; j++) {
                                products[j] += outer(rows[(d + i) * FOURS + j], numbers);
                            }
                        }
                        for (var j = 0u; j < FOURS; j++) {
                            sums_of_rows[j] += rows_of_words[w * FOURS + j];
                        }
                        d += KEY_CODES;
                    }
                    let offset = half_numbers(halves >> vec4(16u));
                    for (var j = 0u; j < FOURS; j++) {
                        products[j] += outer(sums_of_rows[j], offset);
                    }
                }
            }
        }
        var scores: array<vec4<f32>, FOURS>;
        for (var step = 0u; step * STEP < count; step++) {
            if quartet / STEP == step {
                for (var i = 0u; i < 4u; i++) {
                    for (var j = 0u; j < FOURS; j++) {
                        let at = (quartet % STEP + i) * TOGETHER + lane % TOGETHER;
                        memory[at * FOURS + j] = column_of(products[j], i);
                    }
                }
            }
            workgroupBarrier();
            if lane / STEP == step {
                for (var j = 0u; j < FOURS; j++) {
                    let i = lane % STEP * TOGETHER * FOURS + j;
                    scores[j] = memory[i] + memory[i + FOURS] + memory[i + 2u * FOURS] + memory[i + 3u * FOURS];
                }
            }
            workgroupBarrier();
        }

        // From here on, each lane has one key.
        let position = vec4(base + i32(lane));
        for (var j = 0u; j < FOURS; j++) {
            if part.capped == 1u {
                scores[j] = cap(scores[j]);
            }
            scores[j] = select(vec4(LOWEST), scores[j], (begins[j] <= position) & vec4(lane < count));
        }
        let shrunk = weigh(&scores, &largest, &sums, lane);
        for (var j = 0u; j < FOURS; j++) {
            offsets[j] *= shrunk[j];
            low[j] = shrink(low[j], shrunk[j]);
            if PIECE > 4u {
                high[j] = shrink(high[j], shrunk[j]);
            }
        }

        if share < shares {
            let first_key = share + (skip + shares - 1u - share) / shares * shares;
            for (var key = first_key; key < count; key += shares) {
                let at = turn(slot + key - skip);
                let codes = values[value_vectors + at * info.value_strides.z + word] >> (skipped * VALUE_BITS);
                var low_codes = codes_of(codes, 0u);
                var high_codes = codes_of(codes, 4u);
                if VALUES_ALONG_TOKENS {
                    let group = value_groups + at / info.value_group * info.value_scale_strides.z;
                    let channels = min(vec4(channel) + vec4(0u, 1u, 2u, 3u), vec4(dim - 1u)) + group;
                    low_codes = numbers_of(low_codes, channels);
                    if PIECE > 4u {
                        let channels = min(vec4(channel) + vec4(4u, 5u, 6u, 7u), vec4(dim - 1u)) + group;
                        high_codes = numbers_of(high_codes, channels);
                    }
                    for (var j = 0u; j < FOURS; j++) {
                        let weight = memory[key * FOURS + j];
                        low[j] += outer(low_codes, weight);
                        if PIECE > 4u {
                            high[j] += outer(high_codes, weight);
                        }
                    }
                } else {
                    let scale = affine(value_scales[value_groups + at * info.value_scale_strides.z + together], VALUE_STEPS);
                    for (var j = 0u; j < FOURS; j++) {
                        let weight = memory[key * FOURS + j];
                        offsets[j] += weight * scale.y;
                        low[j] += outer(low_codes, weight * scale.x);
                        if PIECE > 4u {
                            high[j] += outer(high_codes, weight * scale.x);
                        }
                    }
                }
            }
        }
        workgroupBarrier();
    }

    for (var j = 0u; j < FOURS; j++) {
        memory[lane * FOURS + j] = sums[j];
    }
    sum_of_lanes(lane);
    for (var j = 0u; j < FOURS; j++) {
        let row = place.first_row + 4u * j;
        for (var r = 0u; r < 4u && row + r <= place.last_row; r++) {
            // All lanes have read the previous contents.
            workgroupBarrier();
            memory[lane] = column_of(low[j], r) + offsets[j][r];
            if PIECE > 4u {
                memory[LANES + lane] = column_of(high[j], r) + offsets[j][r];
            }
            workgroupBarrier();
            // Half of the lanes take the first four channels of each piece, half take the others.
            let others = lane / 128u;
            let c = lane % 128u;
            if c < columns && 4u * others < PIECE {
                var vector = vec4(0.0);
                for (var k = 0u; k < shares; k++) {
                    vector += memory[others * LANES + k * columns + c];
                }
                let to = (vector_of(place, row + r) * info.parts + place.split) * (dim + 2u);
                let channels = channels_of(c, dim);
                for (var i = 4u * others; i < min(4u * others + 4u, PIECE) && channels.x + i < channels.y; i++) {
                    y[to + channels.x + i] = vector[i % 4u];
                }
                if lane == 0u {
                    y[to + dim] = largest[j][r];
                    y[to + dim + 1u] = results[j][r];
                }
            }
        }
    }
}

// Four codes in a word of values, from the code with index `first` within the piece.
fn codes_of(piece: u32, first: u32) -> vec4<f32> {
    let moved = vec4(piece) >> ((vec4(first) + vec4(0u, 1u, 2u, 3u)) * VALUE_BITS);
    return codes_at(moved, 0u, VALUE_BITS);
}

// The values of codes whose scales are at the offsets `at`.
fn numbers_of(codes: vec4<f32>, at: vec4<u32>) -> vec4<f32> {
    let words = vec4(value_scales[at.x], value_scales[at.y], value_scales[at.z], value_scales[at.w]);
    let scale = half_numbers(words) * VALUE_STEPS;
    return fma(codes, scale, half_numbers(words >> vec4(16u)) - scale);
}

// The first channel of a piece of a value, and one past the last channel of its word.
fn channels_of(column: u32, dim: u32) -> vec2<u32> {
    let word = column / PIECES;
    let together = word / info.value_together;
    let first = together * info.value_channels + word % info.value_together * VALUE_CODES;
    return vec2(first + column % PIECES * PIECE, min((together + 1u) * info.value_channels, dim));
}
