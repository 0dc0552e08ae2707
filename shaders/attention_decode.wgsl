// y = softmax(scale * q k) v of a few queries. The queries of heads that share keys are rows; a workgroup goes with
// 4 or 8 of them over a part of the keys that they see, 256 at a time (https://arxiv.org/abs/1805.02867).

alias elem = f32;
// Neighbours that are read at once: four, where the layout of keys and values allows.
alias pack = vec4<elem>;
const WIDTH = 4u;
// What is written: the result, or what attention_combine makes it of.
alias mixed = elem;
const SPLIT = false;
// Rows of a workgroup, in fours.
const FOURS = 1u;

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
    // All parts of a vector, and those before the first of these.
    parts: u32,
    before: u32,
}

@group(0) @binding(0) var<storage, read_write> q: array<elem>;
@group(0) @binding(1) var<storage, read_write> keys: array<pack>;
@group(0) @binding(2) var<storage, read_write> values: array<pack>;
@group(0) @binding(3) var<storage, read_write> first: array<i32>;
@group(0) @binding(4) var<storage, read_write> left_pad: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<mixed>;
@group(0) @binding(6) var<uniform> info: Info;

const LANES = 256u;
const ROWS = 4u * FOURS;
// Lanes that read the vector of a key together.
const TOGETHER = 4u;
// Keys whose sums are put together between two barriers.
const STEP = 128u / FOURS;
const LOWEST = -3.4028234e38;

// Numbers of the rows for each dimension. There are no more than 128 where rows are 8.
var<workgroup> rows: array<vec4<f32>, 256>;
// Sums of lanes; then scores, then weights of keys.
var<workgroup> memory: array<vec4<f32>, 512>;
var<workgroup> maxima: array<vec4<f32>, 16u * FOURS>;
// The positions that this workgroup goes over, the first and the first beyond; the length of vectors; 1 for a softcap.
// What decides on branches is read from here: some drivers compile a kernel anew for each uniform that does.
var<workgroup> place: vec4<i32>;

// Four numbers of a vector: those from 4 c on. What is beyond its end is any of it.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.head_dim - 1u)) * stride;
}

fn key_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(keys[at / 4u + c]));
    }
    let i = places(c, info.key_strides.w) + at;
    return vec4<f32>(vec4(vec4(keys[i.x]).x, vec4(keys[i.y]).x, vec4(keys[i.z]).x, vec4(keys[i.w]).x));
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
            let number = (head * info.queries + row / info.group) * info.parts + info.before + split;
            y[number * (dim + 2u) + dim + 1u] = mixed(0.0);
        }
        return;
    }

    for (var i = lane; i < 4u * columns * FOURS; i += LANES) {
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

    // What each row sees, its largest score so far, and the sums of weights and of values of the keys of this lane.
    var begins: array<vec4<i32>, FOURS>;
    var ends: array<vec4<i32>, FOURS>;
    var largest: array<vec4<f32>, FOURS>;
    var sums: array<vec4<f32>, FOURS>;
    var vectors: array<mat4x4<f32>, FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        let row = vec4(first_row + 4u * j) + vec4(0u, 1u, 2u, 3u);
        ends[j] = vec4(first[0]) + vec4<i32>(row / info.group);
        begins[j] = max(vec4(earliest), ends[j] - info.window + 1);
        largest[j] = vec4(LOWEST);
    }
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let key_vectors = batch * info.key_strides.x + kv_head * info.key_strides.y;
    let value_vectors = batch * info.value_strides.x + kv_head * info.value_strides.y;
    workgroupBarrier();

    for (var base = part.x; base < part.y; base += i32(LANES)) {
        let count = min(u32(part.y - base), LANES);
        let slot = u32(base + i32(info.slots - info.origin)) % info.slots;

        // A lane reads its part of four keys; those beyond the last are the last.
        let place = vec4(lane / TOGETHER) + vec4(0u, 64u, 128u, 192u);
        let own = min(place, vec4(count - 1u));
        let at = vec4(turn(slot + own.x), turn(slot + own.y), turn(slot + own.z), turn(slot + own.w));
        let offset = vec4(key_vectors) + at * info.key_strides.z;
        // A column for each of them.
        var products: array<mat4x4<f32>, FOURS>;
        for (var c = lane % TOGETHER; c < columns; c += TOGETHER) {
            let key_0 = key_at(offset.x, c);
            var key_1 = vec4(0.0);
            var key_2 = vec4(0.0);
            var key_3 = vec4(0.0);
            if count > 64u {
                key_1 = key_at(offset.y, c);
            }
            if count > 128u {
                key_2 = key_at(offset.z, c);
            }
            if count > 192u {
                key_3 = key_at(offset.w, c);
            }
            for (var j = 0u; j < FOURS; j++) {
                let i = 4u * c * FOURS + j;
                let numbers = mat4x4(rows[i], rows[i + FOURS], rows[i + 2u * FOURS], rows[i + 3u * FOURS]);
                products[j] += mat4x4(numbers * key_0, numbers * key_1, numbers * key_2, numbers * key_3);
            }
        }
        var scores: array<vec4<f32>, FOURS>;
        for (var step = 0u; step * STEP < count; step++) {
            for (var i = 0u; i < STEP / 64u; i++) {
                for (var j = 0u; j < FOURS; j++) {
                    memory[(i * LANES + lane) * FOURS + j] = column_of(products[j], step * STEP / 64u + i);
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
            visible[j] = (begins[j] <= position) & (position <= ends[j]) & vec4(lane < count);
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
            vectors[j] = mat4x4(
                vectors[j][0] * shrunk.x,
                vectors[j][1] * shrunk.y,
                vectors[j][2] * shrunk.z,
                vectors[j][3] * shrunk.w,
            );
            memory[lane * FOURS + j] = select(vec4(0.0), exp(scores[j] - most), visible[j]);
        }
        workgroupBarrier();

        if share < shares {
            for (var key = share; key < count; key += shares) {
                let at = value_vectors + turn(slot + key) * info.value_strides.z;
                let value = value_at(at, column);
                for (var j = 0u; j < FOURS; j++) {
                    let weight = memory[key * FOURS + j];
                    sums[j] += weight;
                    vectors[j] += outer(value, weight);
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
        let row = first_row + 4u * j;
        let head = (batch * info.kv_heads + kv_head) * info.group;
        for (var r = 0u; r < 4u && row + r <= last_row; r += 2u) {
            // All lanes have read what was there before.
            workgroupBarrier();
            memory[lane] = column_of(vectors[j], r);
            memory[LANES + lane] = column_of(vectors[j], r + 1u);
            workgroupBarrier();
            // Half of the lanes has the one row, half the other.
            let own = r + lane / 128u;
            let c = lane % 128u;
            if c < columns && row + own <= last_row {
                var vector = vec4(0.0);
                for (var i = 0u; i < shares; i++) {
                    vector += memory[lane / 128u * LANES + i * columns + c];
                }
                let at = (head + (row + own) % info.group) * info.queries + (row + own) / info.group;
                write(at * info.parts + info.before + split, vector, largest[j][own], sums[j][own], c, dim);
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
