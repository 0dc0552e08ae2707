// A part of softmax(scale * q k) v of a few queries: over the keys and values that are packed, as codes. It goes as
// attention_decode does; attention_combine makes the result of its parts and of those of the recent keys.

alias elem = f32;
const KEYS_ALONG_TOKENS = false;
const KEY_BITS = 4u;
const VALUES_ALONG_TOKENS = false;
// Values that a lane has of a word.
const VALUE_BITS = 4u;
const PIECE = 8u / FOURS;
// Rows of a workgroup, in fours.
const FOURS = 1u;

struct Info {
    // [batch, heads, queries, head_dim]
    q_strides: vec4<u32>,
    // Both [batch, kv_heads, slots, words]; words of a token are neighbours.
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    // Both [batch, kv_heads, slots, groups] or [batch, kv_heads, groups, head_dim]; those of a row are neighbours.
    key_scale_strides: vec4<u32>,
    value_scale_strides: vec4<u32>,
    kv_heads: u32,
    // Query heads of each of them.
    group: u32,
    queries: u32,
    slots: u32,
    head_dim: u32,
    // The key of position p is in slot (p - origin) mod slots.
    origin: u32,
    start: i32,
    window: i32,
    scale: f32,
    // 0: none.
    softcap: f32,
    // 1: positions below bounds[1 + batch] are hidden.
    padded: u32,
    // Workgroups for all rows, and parts of the keys.
    tiles: u32,
    splits: u32,
    workgroups: u32,
    // All parts, those of recent keys behind these.
    parts: u32,
    // Words of a vector; channels that begin a word of their own, and their words; numbers of a group.
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
@group(0) @binding(5) var<storage, read_write> first: array<i32>;
// The first position that is not packed; then those below which rows are padded.
@group(0) @binding(6) var<storage, read_write> bounds: array<i32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;
@group(0) @binding(8) var<uniform> info: Info;

const LANES = 256u;
const ROWS = 4u * FOURS;
// Lanes that read the vector of a key together.
const TOGETHER = 4u;
// Keys whose sums are put together between two barriers.
const STEP = 128u / FOURS;
const LOWEST = -3.4028234e38;
const SMALLEST = 5.9604644775390625e-8;
const KEY_CODES = 32u / KEY_BITS;
const VALUE_CODES = 32u / VALUE_BITS;
const PIECES = VALUE_CODES / PIECE;

// Numbers of the rows for each dimension, which are no more than 256, or 128 where rows are 8; and some 0 beyond, where
// words have codes of nothing.
const ROOM = 304u;
var<workgroup> rows: array<vec4<f32>, ROOM>;
// Their sums for each word.
var<workgroup> rows_of_words: array<vec4<f32>, 64>;
// Sums of lanes; then scores, then weights of keys.
var<workgroup> memory: array<vec4<f32>, 512>;
var<workgroup> maxima: array<vec4<f32>, 16u * FOURS>;
// The positions that this workgroup goes over, the first and the first beyond; the length of vectors; 1 for a softcap.
var<workgroup> place: vec4<i32>;

// The slot that many slots after the first, where the ring has turned once at most.
fn turn(slot: u32) -> u32 {
    return select(slot, slot - info.slots, slot >= info.slots);
}

// The hyperbolic tangent of 10 is 1; of larger numbers, some GPUs make none.
fn cap(scores: vec4<f32>) -> vec4<f32> {
    return tanh(clamp(scores / info.softcap, vec4(-10.0), vec4(10.0))) * info.softcap;
}

// Not indexed, for registers cannot be.
fn column_of(matrix: mat4x4<f32>, i: u32) -> vec4<f32> {
    var column = matrix[0];
    if i == 1u {
        column = matrix[1];
    } else if i == 2u {
        column = matrix[2];
    } else if i == 3u {
        column = matrix[3];
    }
    return column;
}

fn outer(value: vec4<f32>, weights: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(value * weights.x, value * weights.y, value * weights.z, value * weights.w);
}

// The float16 numbers in the low halves of words.
fn half_numbers(halves: vec4<u32>) -> vec4<f32> {
    let normal = bitcast<vec4<f32>>(((halves & vec4(0x7fffu)) << vec4(13u)) + vec4(0x38000000u));
    let small = vec4<f32>(halves & vec4(0x3ffu)) * SMALLEST;
    let numbers = select(normal, small, (halves & vec4(0x7c00u)) == vec4(0u));
    return select(numbers, -numbers, (halves & vec4(0x8000u)) != vec4(0u));
}

// A scale and an offset.
fn affine(word: u32) -> vec2<f32> {
    return half_numbers(vec4(word, word >> 16u, 0u, 0u)).xy;
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
    let tile = info.tiles - 1u - workgroup % info.tiles;
    let split = workgroup / info.tiles % info.splits;
    let kv_head = workgroup / info.tiles / info.splits % info.kv_heads;
    let batch = workgroup / info.tiles / info.splits / info.kv_heads;
    // Row r is query r / group of head r % group.
    let first_row = tile * ROWS;
    let last_row = min(first_row + ROWS, info.group * info.queries) - 1u;

    // Slots hold no more positions than there are, padding is hidden.
    let end = bounds[0];
    let padding = bounds[(1u + batch) * info.padded] * i32(info.padded);
    let earliest = max(max(info.start, padding), end - i32(info.slots));
    if lane == 0u {
        var begin = max(earliest, first[0] + i32(first_row / info.group) - info.window + 1);
        if KEYS_ALONG_TOKENS {
            // Four keys of a lane are in one group.
            begin = max(begin - (begin + i32(info.slots - info.origin)) % 4, 0);
        }
        let part = (max(end - begin, 0) + i32(info.splits) - 1) / i32(info.splits);
        // Whole rounds of the lanes.
        let each = max((part + 63) / 64 * 64, 128);
        place = vec4(begin + i32(split) * each, min(begin + i32(split + 1u) * each, end), i32(info.head_dim), i32(info.softcap != 0.0));
    }
    let part = workgroupUniformLoad(&place);
    let dim = u32(part.z);
    if part.x >= part.y {
        // Nothing to see: no weight.
        if lane <= last_row - first_row {
            let row = first_row + lane;
            let head = (batch * info.kv_heads + kv_head) * info.group + row % info.group;
            y[((head * info.queries + row / info.group) * info.parts + split) * (dim + 2u) + dim + 1u] = 0.0;
        }
        return;
    }

    for (var i = lane; i < ROOM; i += LANES) {
        let d = i / FOURS;
        var numbers = vec4(0.0);
        for (var r = 0u; r < 4u; r++) {
            let row = first_row + i % FOURS * 4u + r;
            if row <= last_row && d < dim {
                let head = kv_head * info.group + row % info.group;
                numbers[r] = f32(q[dot(vec4(batch, head, row / info.group, d), info.q_strides)]) * info.scale;
            }
        }
        rows[i] = numbers;
    }
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

    // What each row sees, its largest score so far, and the sums of weights, of weights times offsets, and of weighted
    // values of the keys of this lane.
    var begins: array<vec4<i32>, FOURS>;
    var largest: array<vec4<f32>, FOURS>;
    var sums: array<vec4<f32>, FOURS>;
    var offsets: array<vec4<f32>, FOURS>;
    var vectors: array<vec4<f32>, PIECE * FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        let row = vec4(first_row + 4u * j) + vec4(0u, 1u, 2u, 3u);
        begins[j] = max(vec4(earliest), vec4(first[0]) + vec4<i32>(row / info.group) - info.window + 1);
        largest[j] = vec4(LOWEST);
    }
    let key_vectors = batch * info.key_strides.x + kv_head * info.key_strides.y;
    let key_groups = batch * info.key_scale_strides.x + kv_head * info.key_scale_strides.y;
    let value_vectors = batch * info.value_strides.x + kv_head * info.value_strides.y;
    let value_groups = batch * info.value_scale_strides.x + kv_head * info.value_scale_strides.y;
    // Pieces of the words of a value are columns.
    let columns = info.value_words * PIECES;
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let word = column / PIECES;
    let together = word / info.value_together;
    let skipped = column % PIECES * PIECE;
    let channel = channels_of(column, dim).x;
    workgroupBarrier();

    for (var base = part.x; base < part.y; base += i32(LANES)) {
        let count = min(u32(part.y - base), LANES);
        let slot = u32(base + i32(info.slots - info.origin)) % info.slots;

        // A lane reads its part of four neighbouring keys; those beyond the last are the last.
        let quartet = lane / TOGETHER * 4u;
        // A column for each of them.
        var products: array<mat4x4<f32>, FOURS>;
        if quartet < count {
            let own = min(vec4(quartet) + vec4(0u, 1u, 2u, 3u), vec4(count - 1u));
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
                        let codes = vec4<f32>(vec4<i32>((words >> vec4(i * KEY_BITS)) & vec4((1u << KEY_BITS) - 1u)));
                        let scale = affine(key_scales[group + min(d, dim - 1u)]);
                        let numbers = codes * scale.x + scale.y;
                        for (var j = 0u; j < FOURS; j++) {
                            products[j] += outer(rows[d * FOURS + j], numbers);
                        }
                    }
                }
            } else {
                let groups = vec4(key_groups) + at * info.key_scale_strides.z;
                while w < stop {
                    // The words of a group: its scale comes after its sums.
                    let group = w / info.key_together;
                    let until = min((group + 1u) * info.key_together, stop);
                    var d = group * info.key_channels + w % info.key_together * KEY_CODES;
                    var sums_of_codes: array<mat4x4<f32>, FOURS>;
                    var sums_of_rows: array<vec4<f32>, FOURS>;
                    for (; w < until; w++) {
                        let words = vec4(keys[vector.x + w], keys[vector.y + w], keys[vector.z + w], keys[vector.w + w]);
                        for (var i = 0u; i < KEY_CODES; i++) {
                            let codes = vec4<f32>(vec4<i32>((words >> vec4(i * KEY_BITS)) & vec4((1u << KEY_BITS) - 1u)));
                            for (var j = 0u; j < FOURS; j++) {
                                sums_of_codes[j] += outer(rows[(d + i) * FOURS + j], codes);
                            }
                        }
                        for (var j = 0u; j < FOURS; j++) {
                            sums_of_rows[j] += rows_of_words[w * FOURS + j];
                        }
                        d += KEY_CODES;
                    }
                    let halves = vec4(
                        key_scales[groups.x + group],
                        key_scales[groups.y + group],
                        key_scales[groups.z + group],
                        key_scales[groups.w + group],
                    );
                    let scale = half_numbers(halves);
                    let offset = half_numbers(halves >> vec4(16u));
                    for (var j = 0u; j < FOURS; j++) {
                        let sums = sums_of_codes[j];
                        let scaled = mat4x4(sums[0] * scale.x, sums[1] * scale.y, sums[2] * scale.z, sums[3] * scale.w);
                        products[j] += scaled + outer(sums_of_rows[j], offset);
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

        // From here on, a lane has one key.
        let position = vec4(base + i32(lane));
        var visible: array<vec4<bool>, FOURS>;
        for (var j = 0u; j < FOURS; j++) {
            visible[j] = (begins[j] <= position) & vec4(lane < count);
            if part.w == 1 {
                scores[j] = cap(scores[j]);
            }
            memory[lane * FOURS + j] = select(vec4(LOWEST), scores[j], visible[j]);
        }
        workgroupBarrier();
        if lane < 16u * FOURS {
            let i = lane / FOURS * 16u * FOURS + lane % FOURS;
            var most = memory[i];
            for (var k = 1u; k < 16u; k++) {
                most = max(most, memory[i + k * FOURS]);
            }
            maxima[lane] = most;
        }
        workgroupBarrier();
        for (var j = 0u; j < FOURS; j++) {
            var most = largest[j];
            for (var k = 0u; k < 16u; k++) {
                most = max(most, maxima[k * FOURS + j]);
            }
            let shrunk = exp(largest[j] - most);
            largest[j] = most;
            sums[j] *= shrunk;
            offsets[j] *= shrunk;
            for (var i = 0u; i < PIECE; i++) {
                vectors[i * FOURS + j] *= shrunk;
            }
            memory[lane * FOURS + j] = select(vec4(0.0), exp(scores[j] - most), visible[j]);
        }
        workgroupBarrier();

        if share < shares {
            for (var key = share; key < count; key += shares) {
                let at = turn(slot + key);
                let codes = values[value_vectors + at * info.value_strides.z + word] >> (skipped * VALUE_BITS);
                if VALUES_ALONG_TOKENS {
                    let group = value_groups + at / info.value_group * info.value_scale_strides.z;
                    for (var i = 0u; i < PIECE; i++) {
                        let scale = affine(value_scales[group + min(channel + i, dim - 1u)]);
                        let code = f32(i32((codes >> (i * VALUE_BITS)) & ((1u << VALUE_BITS) - 1u)));
                        let value = code * scale.x + scale.y;
                        for (var j = 0u; j < FOURS; j++) {
                            vectors[i * FOURS + j] += value * memory[key * FOURS + j];
                        }
                    }
                    for (var j = 0u; j < FOURS; j++) {
                        sums[j] += memory[key * FOURS + j];
                    }
                } else {
                    let scale = affine(value_scales[value_groups + at * info.value_scale_strides.z + together]);
                    for (var j = 0u; j < FOURS; j++) {
                        let weight = memory[key * FOURS + j];
                        sums[j] += weight;
                        offsets[j] += weight * scale.y;
                        let scaled = weight * scale.x;
                        for (var i = 0u; i < PIECE; i++) {
                            let code = f32(i32((codes >> (i * VALUE_BITS)) & ((1u << VALUE_BITS) - 1u)));
                            vectors[i * FOURS + j] += scaled * code;
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
    workgroupBarrier();
    for (var j = 0u; j < FOURS; j++) {
        sums[j] = vec4(0.0);
        for (var i = 0u; i < shares; i++) {
            sums[j] += memory[i * columns * FOURS + j];
        }
    }
    for (var j = 0u; j < FOURS; j++) {
        for (var i = 0u; i < PIECE; i += 2u) {
            // All lanes have read what was there before.
            workgroupBarrier();
            // Not indexed, for registers cannot be.
            for (var k = 0u; k < PIECE * FOURS; k++) {
                if k == i * FOURS + j {
                    memory[lane] = vectors[k] + offsets[j];
                }
                if k == (i + 1u) * FOURS + j {
                    memory[LANES + lane] = vectors[k] + offsets[j];
                }
            }
            workgroupBarrier();
            // Half of the lanes has the one channel of each piece, half the other.
            let other = lane / 128u;
            let c = lane % 128u;
            if c < columns && i + other < PIECE {
                var vector = vec4(0.0);
                for (var k = 0u; k < shares; k++) {
                    vector += memory[other * LANES + k * columns + c];
                }
                let channels = channels_of(c, dim);
                let d = channels.x + i + other;
                for (var r = 0u; r < 4u; r++) {
                    let row = first_row + 4u * j + r;
                    if row <= last_row {
                        let head = (batch * info.kv_heads + kv_head) * info.group + row % info.group;
                        let to = ((head * info.queries + row / info.group) * info.parts + split) * (dim + 2u);
                        if d < channels.y {
                            y[to + d] = vector[r];
                        }
                        if d == 0u {
                            y[to + dim] = largest[j][r];
                            y[to + dim + 1u] = sums[j][r];
                        }
                    }
                }
            }
        }
    }
}

// The first channel of a piece of a value, and the first that its word has not.
fn channels_of(column: u32, dim: u32) -> vec2<u32> {
    let word = column / PIECES;
    let together = word / info.value_together;
    let first = together * info.value_channels + word % info.value_together * VALUE_CODES;
    return vec2(first + column % PIECES * PIECE, min((together + 1u) * info.value_channels, dim));
}
