// The functions that attention_decode, attention_packed, attention_prefill and attention_tiles share.

const LOWEST = -3.4028234e38;

// The rows of a workgroup. Row r is query r / group of head r % group.
struct Place {
    batch: u32,
    kv_head: u32,
    split: u32,
    first_row: u32,
    last_row: u32,
}

// Conditions of branches and loops are read from here instead of from the uniform: some drivers recompile a
// kernel for each uniform that decides a branch.
struct Part {
    // The positions that a workgroup reads: begin is the first, end is one past the last.
    begin: i32,
    end: i32,
    head_dim: u32,
    // Number of vec4s per vector.
    columns: u32,
    // 1: scores have a softcap.
    capped: u32,
}

fn place_of(workgroup: u32) -> Place {
    let head = workgroup / info.tiles / info.splits;
    // The last rows see the most keys, so they start first.
    let first_row = (info.tiles - 1u - workgroup % info.tiles) * ROWS;
    let last_row = min(first_row + ROWS, info.group * info.queries) - 1u;
    return Place(head / info.kv_heads, head % info.kv_heads, workgroup / info.tiles % info.splits, first_row, last_row);
}

// The index of a row's vector in the result.
fn vector_of(place: Place, row: u32) -> u32 {
    let head = (place.batch * info.kv_heads + place.kv_head) * info.group + row % info.group;
    return head * info.queries + row / info.group;
}

// The offset of a row's vector in q.
fn query_of(place: Place, row: u32) -> u32 {
    let head = place.kv_head * info.group + row % info.group;
    return dot(vec3(place.batch, head, row / info.group), info.q_strides.xyz);
}

// Wraps the index of a slot around the ring. The index must be below 2 * slots.
fn turn(slot: u32) -> u32 {
    return select(slot, slot - info.slots, slot >= info.slots);
}

// tanh(10) rounds to 1. For larger arguments, tanh is not a number on some GPUs.
fn cap(scores: vec4<f32>) -> vec4<f32> {
    return tanh(clamp(scores / info.softcap, vec4(-10.0), vec4(10.0))) * info.softcap;
}

// Selects a column without indexing, because registers cannot be indexed.
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

fn shrink(vectors: mat4x4<f32>, by: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(vectors[0] * by.x, vectors[1] * by.y, vectors[2] * by.z, vectors[3] * by.w);
}
