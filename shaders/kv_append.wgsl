// buffer[.., (position + i) mod capacity, ..] = tokens[.., i, ..]. One invocation an element.

alias elem = f32;

struct Info {
    // Both [batch, kv_heads, slots or tokens, head_dim].
    buffer_strides: vec4<u32>,
    token_strides: vec4<u32>,
    heads: u32,
    capacity: u32,
    tokens: u32,
    head_dim: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> buffer: array<elem>;
@group(0) @binding(1) var<storage, read_write> tokens: array<elem>;
@group(0) @binding(2) var<storage, read_write> position: array<i32>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    if invocation >= info.invocations {
        return;
    }
    let i = invocation % info.head_dim;
    let token = invocation / info.head_dim % info.tokens;
    let head = invocation / info.head_dim / info.tokens % info.heads;
    let batch = invocation / info.head_dim / info.tokens / info.heads;

    let capacity = i32(info.capacity);
    let slot = ((position[0] + i32(token)) % capacity + capacity) % capacity;
    let to = dot(vec4(batch, head, u32(slot), i), info.buffer_strides);
    buffer[to] = tokens[dot(vec4(batch, head, token, i), info.token_strides)];
}
