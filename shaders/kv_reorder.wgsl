// Copies the latest keys and values of a row's parent, another row of the same prompt, to the row in place.
// The workgroups of a head of keys or values divide its slots among them, for all rows of a prompt. They load
// a piece of all rows into workgroup memory before they write any of it.

alias elem = f32;

struct Info {
    // Each is [batch, heads, slots, width].
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    prompts: u32,
    // Number of rows per prompt.
    width: u32,
    capacity: u32,
    key_heads: u32,
    key_width: u32,
    value_heads: u32,
    value_width: u32,
    // Number of workgroups per head.
    parts: u32,
    origin: i32,
}

@group(0) @binding(0) var<storage, read_write> keys: array<elem>;
@group(0) @binding(1) var<storage, read_write> values: array<elem>;
// [batch]: the parent's row within the prompt.
@group(0) @binding(2) var<storage, read_write> parents: array<i32>;
// [3, batch]: the position of each row's latest token; only attention reads the rest.
@group(0) @binding(3) var<storage, read_write> positions: array<i32>;
// [1]: the number of tokens to copy.
@group(0) @binding(4) var<storage, read_write> latest: array<i32>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;
const HELD = 3840u;

var<workgroup> held: array<elem, HELD>;
var<workgroup> shared_tokens: u32;

// Number of tokens to copy; 0 if every row is its own parent.
fn tokens(first: u32) -> u32 {
    for (var row = 0u; row < info.width; row++) {
        if parents[first + row] != i32(row) {
            return min(u32(max(latest[0], 0)), info.capacity);
        }
    }
    return 0u;
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let id = group.x + group.y * groups.x;
    let part = id % info.parts;
    // Heads of keys, then heads of values.
    let heads = info.key_heads + info.value_heads;
    let number = id / info.parts % heads;
    let prompt = id / info.parts / heads;
    if prompt >= info.prompts {
        return;
    }
    let is_key = number < info.key_heads;
    let head = select(number - info.key_heads, number, is_key);
    let dim = select(info.value_width, info.key_width, is_key);
    let strides = select(info.value_strides, info.key_strides, is_key);
    let first = prompt * info.width;
    if lane == 0u {
        shared_tokens = tokens(first);
    }
    let count = workgroupUniformLoad(&shared_tokens) * dim;
    let piece = HELD / info.width;
    let capacity = i32(info.capacity);
    let newest = positions[first] - info.origin;
    for (var begin = part * piece; begin < count; begin += info.parts * piece) {
        let len = min(piece, count - begin);
        for (var i = lane; i < info.width * len; i += LANES) {
            let element = begin + i % len;
            let slot = ((newest - i32(element / dim)) % capacity + capacity) % capacity;
            let source = dot(vec4(first + i / len, head, u32(slot), element % dim), strides);
            if is_key {
                held[i] = keys[source];
            } else {
                held[i] = values[source];
            }
        }
        workgroupBarrier();
        for (var i = lane; i < info.width * len; i += LANES) {
            let row = i / len;
            let parent = u32(parents[first + row]);
            if parent != row {
                let element = begin + i % len;
                let slot = ((newest - i32(element / dim)) % capacity + capacity) % capacity;
                let to = dot(vec4(first + row, head, u32(slot), element % dim), strides);
                let moved = held[parent * len + i % len];
                if is_key {
                    keys[to] = moved;
                } else {
                    values[to] = moved;
                }
            }
        }
        workgroupBarrier();
    }
}
