// keys[b, .., base[b] + (first[b] - origin + i) mod capacity, ..] = new_keys[b, .., i, ..], and the same for
// values. One invocation per number of both, or of the larger of the two. Rows that share a buffer have a
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

// Row, head, token and channel of a number.
fn place_of(number: u32, heads: u32, width: u32) -> vec4<u32> {
    let vector = number / width;
    let head = vector / info.tokens;
    return vec4(head / heads, head % heads, vector % info.tokens, number % width);
}

// The same with the slot of the token.
fn target_of(place: vec4<u32>) -> vec4<u32> {
    let capacity = i32(info.capacity);
    let slot = ((positions[place.x] - info.origin + i32(place.z)) % capacity + capacity) % capacity;
    return vec4(place.xy, u32(positions[2u * info.batch + place.x] + slot), place.w);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    let alike = info.key_heads == info.value_heads && info.key_width == info.value_width;
    if invocation < info.key_numbers {
        let place = place_of(invocation, info.key_heads, info.key_width);
        let to = target_of(place);
        keys[dot(to, info.key_strides)] = new_keys[dot(place, info.new_key_strides)];
        if alike {
            values[dot(to, info.value_strides)] = new_values[dot(place, info.new_value_strides)];
        }
    }
    if !alike && invocation < info.value_numbers {
        let place = place_of(invocation, info.value_heads, info.value_width);
        let to = target_of(place);
        values[dot(to, info.value_strides)] = new_values[dot(place, info.new_value_strides)];
    }
}
