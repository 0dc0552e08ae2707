// y = softmax(scale * q k) v for many queries. The queries of heads that share keys are rows. A workgroup
// takes 64 of them over the keys that they see, 64 keys at a time (https://arxiv.org/abs/2205.14135). With
// attention.wgsl, attention_dense.wgsl and attention_many.wgsl.

alias elem = f32;
// The number of elements that are read at once: four, if the layout of queries, keys and values allows it.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Type of the output: the result, or the input of attention_combine.
alias mixed = elem;
const SPLIT = false;
// Maximum number of parts of 64 dimensions per vector.
const PARTS = 4u;

const LANES = 256u;
const KEYS = 64u;
// Weights of four rows for 16 keys, plus one vec4 of padding to avoid bank conflicts.
const WEIGHTS = 17u;
// Offset of the values, which follow the weights.
const VALUES = 16u * WEIGHTS;
// Number of parts of the dimensions that are in memory together.
const PAIR = min(PARTS, 2u);

// In this order: queries and keys [4 vec4s of dimensions, 64]; the largest scores per lane; then, for 16
// keys, weights [16 vec4s of rows, 16 keys] and values [16 keys, 16 PAIR vec4s of dimensions].
var<workgroup> memory: array<vec4<f32>, VALUES + PAIR * LANES>;
var<workgroup> shared_part: Part;

fn query_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(q[at / 4u + c]));
    }
    let i = places(c, info.q_strides.w) + at;
    return ended(vec4<f32>(vec4(vec4(q[i.x]).x, vec4(q[i.y]).x, vec4(q[i.z]).x, vec4(q[i.w]).x)), c);
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

    // A lane has the same four rows throughout: their scores for four keys, and four elements of each 64
    // dimensions.
    let quartet = lane / 16u;
    let sixteenth = lane % 16u;
    let row = vec4(place.first_row + 4u * quartet) + vec4(0u, 1u, 2u, 3u);
    let queries = vec4(positions[place.batch]) + vec4<i32>(row / info.group);
    let begins = max(vec4(earliest), queries - info.window + 1);
    let ends = min(queries, vec4(part.end - 1));
    var largest = vec4(LOWEST);
    // Sums over this lane's keys.
    var sums = vec4(0.0);
    var vectors: array<mat4x4<f32>, PARTS>;

    // The data that this lane loads: a part of the query of one row, of a key and of a value.
    let query_vector = query_of(place, min(place.first_row + lane / 4u, place.last_row));
    let key_vectors = keys_of(place);
    let value_vectors = values_of(place);

    for (var base = part.begin; base < part.end; base += i32(KEYS)) {
        let count = min(u32(part.end - base), KEYS);
        let slot = u32(base + i32(info.slots - info.origin)) % info.slots;

        // One column for each of four keys.
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
        if part.capped == 1u {
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
            vectors[i] = shrink(vectors[i], shrunk);
        }
        workgroupBarrier();

        for (var sixteen = 0u; 16u * sixteen < count; sixteen++) {
            memory[quartet * WEIGHTS + sixteenth] = column_of(weights, sixteen);
            for (var i = 0u; i < PARTS; i += PAIR) {
                // A lane has one vec4 per part.
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
            for (var r = 0u; r < 4u && row[r] <= place.last_row; r++) {
                write(place, row[r], column_of(vectors[i], r), largest[r], sums[r], column, dim);
            }
        }
    }
}
