// keys[b, .., base[b] + (first[b] - origin + i) mod capacity, ..] = new_keys[b, .., i, ..], and the same for
// values. One invocation per number: those of keys, then those of values. Rows that share a buffer have a
// stride of 0.

alias elem = f32;

struct Info {
    // All are [batch, heads, slots or tokens, width].
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    new_key_strides: vec4<u32>,
    new_value_strides: vec4<u32>,
    batch: u32,
    capacity: u32,
    tokens: u32,
    key_heads: u32,
    key_width: u32,
    key_numbers: u32,
    value_heads: u32,
    value_width: u32,
    value_numbers: u32,
    origin: i32,
}

@group(0) @binding(0) var<storage, read_write> keys: array<elem>;
@group(0) @binding(1) var<storage, read_write> values: array<elem>;
@group(0) @binding(2) var<storage, read_write> new_keys: array<elem>;
@group(0) @binding(3) var<storage, read_write> new_values: array<elem>;
// [3, batch]: the position of each row's first new token, then a row that only attention reads, then the
// first slot of each row.
@group(0) @binding(4) var<storage, read_write> positions: array<i32>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    if invocation >= info.key_numbers + info.value_numbers {
        return;
    }
    let is_key = invocation < info.key_numbers;
    let number = select(invocation - info.key_numbers, invocation, is_key);
    let heads = select(info.value_heads, info.key_heads, is_key);
    let width = select(info.value_width, info.key_width, is_key);
    let vector = number / width;
    let sequence = vector / info.tokens;
    let batch = sequence / heads;
    let i = number - vector * width;
    let token = vector - sequence * info.tokens;
    let head = sequence - batch * heads;

    let capacity = i32(info.capacity);
    let slot = ((positions[batch] - info.origin + i32(token)) % capacity + capacity) % capacity;
    let to = vec4(batch, head, u32(positions[2u * info.batch + batch] + slot), i);
    let place = vec4(batch, head, token, i);
    if is_key {
        keys[dot(to, info.key_strides)] = new_keys[dot(place, info.new_key_strides)];
    } else {
        values[dot(to, info.value_strides)] = new_values[dot(place, info.new_value_strides)];
    }
}
