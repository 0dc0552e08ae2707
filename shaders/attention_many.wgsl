// The parameters of a launch, and the division of rows and keys, which attention_prefill and attention_tiles
// share.

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
}

@group(0) @binding(0) var<storage, read_write> q: array<pack>;
@group(0) @binding(1) var<storage, read_write> keys: array<pack>;
@group(0) @binding(2) var<storage, read_write> values: array<pack>;
// [3, batch]: the position of each row's first query, the first position that the row may see, and the first
// slot of the row.
@group(0) @binding(3) var<storage, read_write> positions: array<i32>;
@group(0) @binding(4) var<storage, read_write> bound: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<mixed>;
@group(0) @binding(6) var<uniform> info: Info;

// Number of rows per workgroup.
const ROWS = 64u;

// Divides positions evenly.
fn part_of(place: Place, begin: i32, end: i32, columns: u32) -> Part {
    let even = (max(end - begin, 0) + i32(info.splits) - 1) / i32(info.splits);
    // Rounds up to whole rounds of the lanes.
    let each = max((even + 63) / 64 * 64, 128);
    let from_position = begin + i32(place.split) * each;
    return Part(from_position, min(from_position + each, end), info.head_dim, columns, u32(info.softcap != 0.0));
}
