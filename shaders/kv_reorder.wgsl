// Copies the latest keys and values of a row's parent, another row of the same prompt, to the row in place.
// The workgroups of a head divide its slots among them, for all rows of a prompt. They load a piece of all
// rows into workgroup memory before they write any of it.

alias elem = f32;

struct Info {
    // Each is [batch, heads, slots, width].
    key_strides: vec4<u32>,
    value_strides: vec4<u32>,
    prompts: u32,
    // Number of rows per prompt.
    width: u32,
    // Heads of keys or of values, whichever are more.
    heads: u32,
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

var<workgroup> held_keys: array<elem, HELD / 2u>;
var<workgroup> held_values: array<elem, HELD / 2u>;
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

// Row, head, slot and channel of a number, counted from the latest token back.
fn place_of(row: u32, head: u32, newest: i32, element: u32, width: u32) -> vec4<u32> {
    let capacity = i32(info.capacity);
    let slot = ((newest - i32(element / width)) % capacity + capacity) % capacity;
    return vec4(row, head, u32(slot), element % width);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let id = group.x + group.y * groups.x;
    let part = id % info.parts;
    let head = id / info.parts % info.heads;
    let prompt = id / info.parts / info.heads;
    if prompt >= info.prompts {
        return;
    }
    let first = prompt * info.width;
    if lane == 0u {
        shared_tokens = tokens(first);
    }
    let moved = workgroupUniformLoad(&shared_tokens);
    let alike = info.key_heads == info.value_heads && info.key_width == info.value_width;
    let key_numbers = select(0u, moved * info.key_width, head < info.key_heads);
    let value_numbers = select(0u, moved * info.value_width, head < info.value_heads);
    let count = moved * max(info.key_width, info.value_width);
    let piece = HELD / 2u / info.width;
    let newest = positions[first] - info.origin;
    for (var begin = part * piece; begin < count; begin += info.parts * piece) {
        let len = min(piece, count - begin);
        for (var i = lane; i < info.width * len; i += LANES) {
            let element = begin + i % len;
            let row = first + i / len;
            if element < key_numbers {
                let source = place_of(row, head, newest, element, info.key_width);
                held_keys[i] = keys[dot(source, info.key_strides)];
                if alike {
                    held_values[i] = values[dot(source, info.value_strides)];
                }
            }
            if !alike && element < value_numbers {
                let source = place_of(row, head, newest, element, info.value_width);
                held_values[i] = values[dot(source, info.value_strides)];
            }
        }
        workgroupBarrier();
        for (var i = lane; i < info.width * len; i += LANES) {
            let row = i / len;
            let parent = u32(parents[first + row]);
            if parent != row {
                let element = begin + i % len;
                let held = parent * len + i % len;
                if element < key_numbers {
                    let to = place_of(first + row, head, newest, element, info.key_width);
                    keys[dot(to, info.key_strides)] = held_keys[held];
                    if alike {
                        values[dot(to, info.value_strides)] = held_values[held];
                    }
                }
                if !alike && element < value_numbers {
                    let to = place_of(first + row, head, newest, element, info.value_width);
                    values[dot(to, info.value_strides)] = held_values[held];
                }
            }
        }
        workgroupBarrier();
    }
}
