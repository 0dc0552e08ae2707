// y = softmax(scale * q k) v of many queries. The queries of heads that share keys are rows; a workgroup goes with 64
// of them over the keys that they see, 64 at a time (https://arxiv.org/abs/2205.14135).

alias elem = f32;
// Neighbours that are read at once: four, where the layout of queries, keys and values allows.
alias pack = vec4<elem>;
const WIDTH = 4u;
// What is written: the result, or what attention_combine makes it of.
alias mixed = elem;
const SPLIT = false;
// Parts of 64 dimensions that a vector has at most.
const PARTS = 4u;

struct Info {
    // [batch, heads, queries, head_dim]
    q_strides: vec4<u32>,
    // Both [batch, kv_heads, slots, head_dim].
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
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
    // 1: positions below left_pad[batch] are hidden.
    padded: u32,
    // Workgroups for all rows, and parts of the keys.
    tiles: u32,
    splits: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> q: array<pack>;
@group(0) @binding(1) var<storage, read_write> keys: array<pack>;
@group(0) @binding(2) var<storage, read_write> values: array<pack>;
@group(0) @binding(3) var<storage, read_write> first: array<i32>;
@group(0) @binding(4) var<storage, read_write> left_pad: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<mixed>;
@group(0) @binding(6) var<uniform> info: Info;

const LANES = 256u;
const ROWS = 64u;
const KEYS = 64u;
const LOWEST = -3.4028234e38;
// Weights of four rows for 16 keys, and one vector more, so that the fours are in different banks.
const WEIGHTS = 17u;
// Where values begin, which come after weights.
const VALUES = 16u * WEIGHTS;
// Parts of the dimensions that are in memory together.
const PAIR = min(PARTS, 2u);

// First queries and keys [4 fours of dimensions, 64]. Then the largest scores of each lane. Then, for 16 keys, weights
// [16 fours of rows, 16 keys] and values [16 keys, 16 PAIR fours of dimensions].
var<workgroup> memory: array<vec4<f32>, VALUES + PAIR * LANES>;
// The positions that this workgroup goes over, the first and the first beyond; the length of vectors; 1 for a softcap.
// What decides on branches is read from here: some drivers compile a kernel anew for each uniform that does.
var<workgroup> place: vec4<i32>;

// Four numbers of a vector, those from 4 c on. What is beyond its end is 0.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.head_dim - 1u)) * stride;
}

fn within(c: u32) -> vec4<bool> {
    return vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.head_dim);
}

fn query_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(q[at / 4u + c]));
    }
    let i = places(c, info.q_strides.w) + at;
    let four = vec4<f32>(vec4(vec4(q[i.x]).x, vec4(q[i.y]).x, vec4(q[i.z]).x, vec4(q[i.w]).x));
    return select(vec4(0.0), four, within(c));
}

fn key_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(keys[at / 4u + c]));
    }
    let i = places(c, info.key_strides.w) + at;
    let four = vec4<f32>(vec4(vec4(keys[i.x]).x, vec4(keys[i.y]).x, vec4(keys[i.z]).x, vec4(keys[i.w]).x));
    return select(vec4(0.0), four, within(c));
}

fn value_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(values[at / 4u + c]));
    }
    let i = places(c, info.value_strides.w) + at;
    return vec4<f32>(vec4(vec4(values[i.x]).x, vec4(values[i.y]).x, vec4(values[i.z]).x, vec4(values[i.w]).x));
}

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
    // The last rows see the most keys: they begin first.
    let tile = info.tiles - 1u - workgroup % info.tiles;
    let split = workgroup / info.tiles % info.splits;
    let kv_head = workgroup / info.tiles / info.splits % info.kv_heads;
    let batch = workgroup / info.tiles / info.splits / info.kv_heads;
    // Row r is query r / group of head r % group.
    let first_row = tile * ROWS;
    let last_row = min(first_row + ROWS, info.group * info.queries) - 1u;

    // Slots hold no more positions than there are, padding is hidden.
    let padding = left_pad[batch * info.padded] * i32(info.padded);
    let earliest = max(max(info.start, padding), first[0] + i32(info.queries) - i32(info.slots));
    if lane == 0u {
        let begin = max(earliest, first[0] + i32(first_row / info.group) - info.window + 1);
        let end = first[0] + i32(last_row / info.group) + 1;
        let part = (max(end - begin, 0) + i32(info.splits) - 1) / i32(info.splits);
        // Whole rounds of the lanes.
        let each = max((part + 63) / 64 * 64, 128);
        place = vec4(begin + i32(split) * each, min(begin + i32(split + 1u) * each, end), i32(info.head_dim), i32(info.softcap != 0.0));
    }
    let part = workgroupUniformLoad(&place);
    let dim = u32(part.z);
    let columns = (dim + 3u) / 4u;
    if SPLIT && part.x >= part.y {
        // Nothing to see: no weight.
        if lane <= last_row - first_row {
            let row = first_row + lane;
            let head = (batch * info.kv_heads + kv_head) * info.group + row % info.group;
            let at = ((head * info.queries + row / info.group) * info.splits + split) * (dim + 2u);
            y[at + dim + 1u] = mixed(0.0);
        }
        return;
    }

    // A lane has four rows throughout: their scores for four keys, and four of each 64 dimensions.
    let quartet = lane / 16u;
    let sixteenth = lane % 16u;
    let row = vec4(first_row + 4u * quartet) + vec4(0u, 1u, 2u, 3u);
    let ends = vec4(first[0]) + vec4<i32>(row / info.group);
    let begins = max(vec4(earliest), ends - info.window + 1);
    var largest = vec4(LOWEST);
    // Of the keys of this lane.
    var sums = vec4(0.0);
    var vectors: array<mat4x4<f32>, PARTS>;

    // What it loads: a part of the query of one row, of a key, of a value.
    let loaded_row = min(first_row + lane / 4u, last_row);
    let loaded_head = kv_head * info.group + loaded_row % info.group;
    let query_vector = dot(vec4(batch, loaded_head, loaded_row / info.group, 0u), info.q_strides);
    let key_vectors = batch * info.key_strides.x + kv_head * info.key_strides.y;
    let value_vectors = batch * info.value_strides.x + kv_head * info.value_strides.y;

    for (var base = part.x; base < part.y; base += i32(KEYS)) {
        let count = min(u32(part.y - base), KEYS);
        let slot = u32(base + i32(info.slots - info.origin)) % info.slots;

        // Of four keys, a column each.
        var scores = mat4x4<f32>();
        for (var c = 0u; c < columns; c += 4u) {
            let column = c + lane % 4u;
            var query = vec4(0.0);
            var key = vec4(0.0);
            if column < columns {
                query = query_at(query_vector, column) * info.scale;
                if lane / 4u < count {
                    key = key_at(key_vectors + turn(slot + lane / 4u) * info.key_strides.z, column);
                }
            }
            memory[lane % 4u * ROWS + lane / 4u] = query;
            memory[LANES + lane % 4u * KEYS + lane / 4u] = key;
            workgroupBarrier();
            for (var i = 0u; i < 4u; i++) {
                let at = i * ROWS + 4u * quartet;
                let queries = mat4x4(memory[at], memory[at + 1u], memory[at + 2u], memory[at + 3u]);
                let key = LANES + i * KEYS + sixteenth;
                scores += mat4x4(
                    memory[key] * queries,
                    memory[key + 16u] * queries,
                    memory[key + 32u] * queries,
                    memory[key + 48u] * queries,
                );
            }
            workgroupBarrier();
        }
        if part.w == 1 {
            scores = mat4x4(cap(scores[0]), cap(scores[1]), cap(scores[2]), cap(scores[3]));
        }

        let position = base + i32(sixteenth);
        let visible_0 = (begins <= vec4(position)) & (vec4(position) <= ends);
        let visible_1 = (begins <= vec4(position + 16)) & (vec4(position + 16) <= ends);
        let visible_2 = (begins <= vec4(position + 32)) & (vec4(position + 32) <= ends);
        let visible_3 = (begins <= vec4(position + 48)) & (vec4(position + 48) <= ends);
        var most = select(vec4(LOWEST), scores[0], visible_0);
        most = max(most, select(vec4(LOWEST), scores[1], visible_1));
        most = max(most, select(vec4(LOWEST), scores[2], visible_2));
        most = max(most, select(vec4(LOWEST), scores[3], visible_3));
        memory[lane] = most;
        workgroupBarrier();
        most = largest;
        for (var i = 0u; i < 16u; i++) {
            most = max(most, memory[quartet * 16u + i]);
        }
        let shrunk = exp(largest - most);
        largest = most;
        let weights = mat4x4(
            select(vec4(0.0), exp(scores[0] - most), visible_0),
            select(vec4(0.0), exp(scores[1] - most), visible_1),
            select(vec4(0.0), exp(scores[2] - most), visible_2),
            select(vec4(0.0), exp(scores[3] - most), visible_3),
        );
        sums = sums * shrunk + weights[0] + weights[1] + weights[2] + weights[3];
        for (var i = 0u; i < PARTS; i++) {
            let some = vectors[i];
            vectors[i] = mat4x4(some[0] * shrunk.x, some[1] * shrunk.y, some[2] * shrunk.z, some[3] * shrunk.w);
        }
        workgroupBarrier();

        for (var sixteen = 0u; 16u * sixteen < count; sixteen++) {
            memory[quartet * WEIGHTS + sixteenth] = column_of(weights, sixteen);
            for (var i = 0u; i < PARTS; i += PAIR) {
                // A lane has as many fours as there are parts.
                let key = 16u * sixteen + quartet;
                let at = value_vectors + turn(slot + key) * info.value_strides.z;
                for (var part = 0u; part < PAIR; part++) {
                    let column = 16u * (i + part) + sixteenth;
                    var value = vec4(0.0);
                    if column < columns && key < count {
                        value = value_at(at, column);
                    }
                    memory[VALUES + (PAIR * quartet + part) * 16u + sixteenth] = value;
                }
                workgroupBarrier();
                var some = vectors[i];
                var others = vectors[i + PAIR - 1u];
                for (var k = 0u; k < 16u; k++) {
                    let weight = memory[quartet * WEIGHTS + k];
                    let at = VALUES + PAIR * 16u * k + sixteenth;
                    some += outer(memory[at], weight);
                    if PAIR > 1u {
                        others += outer(memory[at + 16u], weight);
                    }
                }
                vectors[i] = some;
                if PAIR > 1u {
                    vectors[i + 1u] = others;
                }
                workgroupBarrier();
            }
        }
    }

    memory[lane] = sums;
    workgroupBarrier();
    sums = vec4(0.0);
    for (var i = 0u; i < 16u; i++) {
        sums += memory[quartet * 16u + i];
    }
    for (var i = 0u; i < PARTS; i++) {
        let column = i * 16u + sixteenth;
        if column < columns {
            for (var r = 0u; r < 4u && row[r] <= last_row; r++) {
                let head = (batch * info.kv_heads + kv_head) * info.group + row[r] % info.group;
                let at = head * info.queries + row[r] / info.group;
                write(at * info.splits + split, column_of(vectors[i], r), largest[r], sums[r], column, dim);
            }
        }
    }
}

// Four numbers of the result, or of a part of it.
fn write(number: u32, vector: vec4<f32>, largest: f32, sum: f32, column: u32, dim: u32) {
    if SPLIT {
        let at = number * (dim + 2u);
        for (var i = 0u; i < 4u && 4u * column + i < dim; i++) {
            y[at + 4u * column + i] = mixed(vector[i]);
        }
        if column == 0u {
            y[at + dim] = mixed(largest);
            y[at + dim + 1u] = mixed(sum);
        }
        return;
    }
    // What sees nothing is 0.
    let scale = select(1.0 / sum, 0.0, sum == 0.0);
    for (var i = 0u; i < 4u && 4u * column + i < dim; i++) {
        y[number * dim + 4u * column + i] = mixed(vector[i] * scale);
    }
}
