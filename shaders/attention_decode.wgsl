// y = softmax(scale * q k) v for a few queries. The queries of heads that share keys are rows. A workgroup
// takes 4 or 8 of them over a part of the keys that they see, 256 keys at a time. With attention.wgsl,
// attention_dense.wgsl, attention_few.wgsl, and one of attention_stored.wgsl and attention_append.wgsl.

alias elem = f32;
// The number of elements that are read at once: four, if the layout of keys and values allows it.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Type of the output: the result, or the input of attention_combine.
alias mixed = elem;
const SPLIT = false;
// Number of vec4s of rows per workgroup.
const FOURS = 1u;

struct Info {
    // [batch, heads, queries, head_dim]
    q_strides: vec4<u32>,
    // Both are [batch, kv_heads, slots, head_dim].
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    // Those of the keys and values that are appended: [batch, kv_heads, 1, head_dim].
    new_key_strides: vec4<u32>,
    new_value_strides: vec4<u32>,
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
    // 1: positions below bound[0] are hidden.
    bounded: u32,
    // Number of workgroups for all rows, and number of parts of the keys.
    tiles: u32,
    splits: u32,
    workgroups: u32,
    // Number of parts per vector, and number of parts before the first one of this launch.
    parts: u32,
    before: u32,
    // One past the last position of the keys, if later positions are in other buffers.
    end: i32,
    // Number of rows in the batch.
    batch: u32,
    // Parts begin at multiples of this position.
    chunk: i32,
}

@group(0) @binding(0) var<storage, read_write> q: array<elem>;
@group(0) @binding(1) var<storage, read_write> keys: array<pack>;
@group(0) @binding(2) var<storage, read_write> values: array<pack>;
// [3, batch]: the position of each row's first query, the first position that the row may see, and the first
// slot of the row.
@group(0) @binding(3) var<storage, read_write> positions: array<i32>;
@group(0) @binding(4) var<storage, read_write> bound: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<mixed>;

const ROOM = 256u;

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
    let earliest = earliest_of(place);
    if lane == 0u {
        shared_part = share(place, earliest);
    }
    let part = workgroupUniformLoad(&shared_part);
    let dim = part.head_dim;
    let columns = part.columns;
    if SPLIT && part.begin >= part.end {
        write_nothing(place, lane, dim);
        return;
    }
    load_rows(place, 4u * columns * FOURS, lane, dim);

    // Per row: the positions that it sees and the largest score so far. Then the sums of weights and of
    // weighted values over this lane's keys.
    var begins: array<vec4<i32>, FOURS>;
    var ends: array<vec4<i32>, FOURS>;
    var largest: array<vec4<f32>, FOURS>;
    var sums: array<vec4<f32>, FOURS>;
    var vectors: array<mat4x4<f32>, FOURS>;
    for (var j = 0u; j < FOURS; j++) {
        let row = vec4(place.first_row + 4u * j) + vec4(0u, 1u, 2u, 3u);
        ends[j] = vec4(positions[place.batch]) + vec4<i32>(row / info.group);
        begins[j] = max(vec4(earliest), ends[j] - info.window + 1);
        largest[j] = vec4(LOWEST);
    }
    let column = lane % columns;
    let share = lane / columns;
    let shares = LANES / columns;
    let key_vectors = keys_of(place);
    let value_vectors = values_of(place);
    append(place, part, lane);
    workgroupBarrier();

    for (var base = part.begin - part.begin % i32(LANES); base < part.end; base += i32(LANES)) {
        let count = min(u32(part.end - base), LANES);
        // Keys before the part are not read.
        let skip = u32(max(part.begin - base, 0));
        let slot = (u32(base) + skip + info.slots - info.origin) % info.slots;

        // A lane reads its share of four keys. Keys past the last one are replaced by the last one.
        let own = clamp(vec4(lane / TOGETHER) + vec4(0u, 64u, 128u, 192u), vec4(skip), vec4(count - 1u)) - skip;
        let at = vec4(turn(slot + own.x), turn(slot + own.y), turn(slot + own.z), turn(slot + own.w));
        let offset = vec4(key_vectors) + at * info.key_strides.z;
        // One column per key.
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

        // From here on, each lane has one key.
        let position = vec4(base + i32(lane));
        for (var j = 0u; j < FOURS; j++) {
            if part.capped == 1u {
                scores[j] = cap(scores[j]);
            }
            let visible = (begins[j] <= position) & (position <= ends[j]) & vec4(lane < count);
            scores[j] = select(vec4(LOWEST), scores[j], visible);
        }
        let shrunk = weigh(&scores, &largest, &sums, lane);
        for (var j = 0u; j < FOURS; j++) {
            vectors[j] = shrink(vectors[j], shrunk[j]);
        }

        if share < shares {
            let first_key = share + (skip + shares - 1u - share) / shares * shares;
            for (var key = first_key; key < count; key += shares) {
                let at = value_vectors + turn(slot + key - skip) * info.value_strides.z;
                let value = value_at(at, column);
                for (var j = 0u; j < FOURS; j++) {
                    vectors[j] += outer(value, memory[key * FOURS + j]);
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
        for (var r = 0u; r < 4u && row + r <= place.last_row; r += 2u) {
            // All lanes have read the previous contents.
            workgroupBarrier();
            memory[lane] = column_of(vectors[j], r);
            memory[LANES + lane] = column_of(vectors[j], r + 1u);
            workgroupBarrier();
            // Half of the lanes take one row, half take the other.
            let own = r + lane / 128u;
            let c = lane % 128u;
            if c < columns && row + own <= place.last_row {
                var vector = vec4(0.0);
                for (var i = 0u; i < shares; i++) {
                    vector += memory[lane / 128u * LANES + i * columns + c];
                }
                write(place, row + own, vector, largest[j][own], results[j][own], c, dim);
            }
        }
    }
}
