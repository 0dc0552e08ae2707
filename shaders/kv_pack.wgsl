// Writes the codes of new tokens to a ring of slots. kv_scales has written their scales before. One
// invocation per word.

alias elem = f32;
const ALONG_TOKENS = false;
const BITS = 4u;

struct Info {
    // [batch, kv_heads, n, head_dim]
    token_strides: vec4<u32>,
    // [batch, kv_heads, slots, words]
    code_strides: vec4<u32>,
    // [batch, kv_heads, slots, groups] or [batch, kv_heads, groups, head_dim]
    scale_strides: vec4<u32>,
    heads: u32,
    tokens: u32,
    head_dim: u32,
    words: u32,
    group: u32,
    // Number of channels in a unit that begins at a word, and number of words per unit.
    channels_together: u32,
    words_together: u32,
    slot: u32,
    slots: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> tokens: array<elem>;
@group(0) @binding(1) var<storage, read_write> codes: array<u32>;
@group(0) @binding(2) var<storage, read_write> scales: array<u32>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;
const SMALLEST = 5.9604644775390625e-8;
const LARGEST = 0x477fe000u;
const CODES = 32u / BITS;
const MOST = (1u << BITS) - 1u;

// Clamps to the range of float16. NaN and subnormal numbers become 0.
fn finite(x: elem) -> f32 {
    let bits = bitcast<u32>(f32(x));
    let size = bits & 0x7fffffffu;
    let none = size > 0x7f800000u || size < 0x00800000u;
    return bitcast<f32>(select(min(size, LARGEST) | (bits & 0x80000000u), 0u, none));
}

fn half_number(half: u32) -> f32 {
    let normal = bitcast<f32>(((half & 0x7fffu) << 13u) + 0x38000000u);
    let number = select(normal, f32(half & 0x3ffu) * SMALLEST, (half & 0x7c00u) == 0u);
    return select(number, -number, (half & 0x8000u) != 0u);
}

// The nearest code, or the even one of two. The quotient may be off by a little, but products are exact.
// Numbers that are not negative compare as their bits do.
fn code_of(x: f32, scale: f32, offset: f32) -> u32 {
    if scale == 0.0 {
        return 0u;
    }
    let difference = max(x - offset, 0.0);
    let bits = bitcast<u32>(difference);
    var code = u32(min(difference / scale, f32(MOST)) + 0.5);
    let odd = (code & 1u) == 1u;
    let above = bitcast<u32>(f32(2u * code + 1u) * (scale * 0.5));
    let below = bitcast<u32>(f32(max(2u * code, 1u) - 1u) * (scale * 0.5));
    if bits > above || (odd && bits == above) {
        code++;
    } else if code > 0u && (bits < below || (odd && bits == below)) {
        code--;
    }
    return min(code, MOST);
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
    let word = invocation % info.words;
    let token = invocation / info.words % info.tokens;
    let head = invocation / info.words / info.tokens % info.heads;
    let batch = invocation / info.words / info.tokens / info.heads;
    let slot = (info.slot + token) % info.slots;

    let together = word / info.words_together;
    let first = together * info.channels_together + word % info.words_together * CODES;
    let beyond = min(min((together + 1u) * info.channels_together, info.head_dim), first + CODES);
    var packed = 0u;
    for (var channel = first; channel < beyond; channel++) {
        var place = vec4(batch, head, slot, together);
        if ALONG_TOKENS {
            place = vec4(batch, head, slot / info.group, channel);
        }
        let scale = scales[dot(place, info.scale_strides)];
        let x = finite(tokens[dot(vec4(batch, head, token, channel), info.token_strides)]);
        let code = code_of(x, half_number(scale & 0xffffu), half_number(scale >> 16u));
        packed |= code << ((channel - first) * BITS);
    }
    codes[dot(vec4(batch, head, slot, word), info.code_strides)] = packed;
}
