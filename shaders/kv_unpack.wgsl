// Dequantizes codes: y[.., i, channel] = code * scale + offset, for consecutive slots. One invocation per
// element.

alias elem = f32;
const ALONG_TOKENS = false;
const BITS = 4u;

struct Info {
    // [batch, kv_heads, slots, words]
    code_strides: vec4<u32>,
    // [batch, kv_heads, slots, groups] or [batch, kv_heads, groups, head_dim]
    scale_strides: vec4<u32>,
    heads: u32,
    // Number of slots to unpack, and the first of them.
    tokens: u32,
    slot: u32,
    head_dim: u32,
    group: u32,
    // Number of channels in a unit that begins at a word, and number of words per unit.
    channels_together: u32,
    words_together: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> codes: array<u32>;
@group(0) @binding(1) var<storage, read_write> scales: array<u32>;
@group(0) @binding(2) var<storage, read_write> y: array<elem>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;
const SMALLEST = 5.9604644775390625e-8;
const CODES = 32u / BITS;
const MOST = (1u << BITS) - 1u;

fn half_number(half: u32) -> f32 {
    let normal = bitcast<f32>(((half & 0x7fffu) << 13u) + 0x38000000u);
    let number = select(normal, f32(half & 0x3ffu) * SMALLEST, (half & 0x7c00u) == 0u);
    return select(number, -number, (half & 0x8000u) != 0u);
}

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
    let channel = invocation % info.head_dim;
    let slot = info.slot + invocation / info.head_dim % info.tokens;
    let head = invocation / info.head_dim / info.tokens % info.heads;
    let batch = invocation / info.head_dim / info.tokens / info.heads;

    let together = channel / info.channels_together;
    let i = channel % info.channels_together;
    let word = codes[dot(vec4(batch, head, slot, together * info.words_together + i / CODES), info.code_strides)];
    let code = (word >> (i % CODES * BITS)) & MOST;
    var place = vec4(batch, head, slot, together);
    if ALONG_TOKENS {
        place = vec4(batch, head, slot / info.group, channel);
    }
    let scale = scales[dot(place, info.scale_strides)];
    y[invocation] = elem(f32(code) * half_number(scale & 0xffffu) + half_number(scale >> 16u));
}
