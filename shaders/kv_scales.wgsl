// The scale and the offset of each group of numbers to pack, as two float16 numbers in a word. One invocation
// per group. Rounding is spelled out in integers, so that every device gives the same result.

alias elem = f32;
// Whether a group consists of neighboring tokens of a channel, instead of neighboring channels of a token.
const ALONG_TOKENS = false;
// Whether scales are given and only rounded. Tokens are then [batch, kv_heads, rows, 2 * columns], with
// offsets after scales.
const GIVEN = false;

struct Info {
    // [batch, kv_heads, n, head_dim]
    token_strides: vec4<u32>,
    // [batch, kv_heads, all_rows, columns]
    scale_strides: vec4<u32>,
    heads: u32,
    // Number of rows of new scales.
    rows: u32,
    columns: u32,
    head_dim: u32,
    group: u32,
    // The first row to write; row 0 comes after the last one.
    row: u32,
    all_rows: u32,
    invocations: u32,
    // Reciprocal of the largest code.
    reciprocal: f32,
}

@group(0) @binding(0) var<storage, read_write> tokens: array<elem>;
@group(0) @binding(1) var<storage, read_write> scales: array<u32>;
@group(0) @binding(2) var<uniform> info: Info;

const LANES = 256u;
// The smallest float16 number, and the bits of the largest one.
const SMALLEST = 5.9604644775390625e-8;
const LARGEST = 0x477fe000u;
const DOWN = 0u;
const UP = 1u;
const NEAREST = 2u;

// Clamps to the range of float16. NaN and subnormal numbers become 0.
fn finite(x: elem) -> f32 {
    let bits = bitcast<u32>(f32(x));
    let size = bits & 0x7fffffffu;
    let none = size > 0x7f800000u || size < 0x00800000u;
    return bitcast<f32>(select(min(size, LARGEST) | (bits & 0x80000000u), 0u, none));
}

// The bits of the float16 number next to x in the direction `rounding`; there is no negative 0.
fn half_bits(x: f32, rounding: u32) -> u32 {
    let bits = bitcast<u32>(x);
    let size = min(bits & 0x7fffffffu, LARGEST);
    if size == 0u {
        return 0u;
    }
    let exponent = size >> 23u;
    let digits = (size & 0x7fffffu) | 0x800000u;
    // Below 2^-14 the exponent stays the same.
    let small = exponent < 113u;
    let shift = min(select(13u, 126u - exponent, small), 31u);
    let whole = digits >> shift;
    let rest = digits & ((1u << shift) - 1u);
    let middle = 1u << (shift - 1u);
    var more = rest > middle || (rest == middle && (whole & 1u) == 1u);
    if rounding != NEAREST {
        // Rounds away from 0.
        more = rest > 0u && (rounding == UP) == (bits < 0x80000000u);
    }
    // An overflow of the mantissa carries into the exponent.
    let half = min(select((exponent - 113u) << 10u, 0u, small) + whole + u32(more), 0x7bffu);
    return select(half | ((bits >> 16u) & 0x8000u), 0u, half == 0u);
}

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
    let column = invocation % info.columns;
    let row = invocation / info.columns % info.rows;
    let head = invocation / info.columns / info.rows % info.heads;
    let batch = invocation / info.columns / info.rows / info.heads;
    let vectors = dot(vec2(batch, head), info.token_strides.xy);

    var scale = 0u;
    var offset = 0u;
    if GIVEN {
        let at = vectors + row * info.token_strides.z;
        scale = half_bits(max(finite(tokens[at + column * info.token_strides.w]), 0.0), NEAREST);
        offset = half_bits(finite(tokens[at + (info.columns + column) * info.token_strides.w]), NEAREST);
    } else {
        var token = row;
        var channel = column * info.group;
        var step = info.token_strides.w;
        var count = min(info.group, info.head_dim - channel);
        if ALONG_TOKENS {
            token = row * info.group;
            channel = column;
            step = info.token_strides.z;
            count = info.group;
        }
        var at = vectors + dot(vec2(token, channel), info.token_strides.zw);
        var least = finite(tokens[at]);
        var most = least;
        for (var i = 1u; i < count; i++) {
            at += step;
            let x = finite(tokens[at]);
            least = min(least, x);
            most = max(most, x);
        }
        offset = half_bits(least, DOWN);
        let range = most - half_number(offset);
        if range >= SMALLEST {
            scale = half_bits(range * info.reciprocal, UP);
        }
    }
    let to = vec4(batch, head, (info.row + row) % info.all_rows, column);
    scales[dot(to, info.scale_strides)] = scale | (offset << 16u);
}
