// Depthwise causal convolution, in f32:
//
//     y[b, t, c] = silu(bias[c] + sum_k weight[c, k] input[b, first[b] + t - WIDTH + 1 + k, c])
//
// or the same without silu. The input at position first[b] + t is x[b, t, c]. Inputs before first[b], the
// position of the row's first new token, are in the ring. The input of padding is 0, and so is its output.
// One invocation computes a channel of 16 tokens. The invocation of the row's first tokens also reads the
// ring, and writes the latest inputs to it; no other invocation accesses that part of the ring.

alias elem = f32;
const WIDTH = 4u;

struct Info {
    // Strides of x, [rows, tokens, channels]. y has the same shape and is contiguous.
    x_strides: vec3<u32>,
    tokens: u32,
    // Strides of the ring, [rows, slots, channels].
    ring_strides: vec3<u32>,
    slots: u32,
    // Strides of weight, [channels, WIDTH].
    weight_strides: vec2<u32>,
    bias_stride: u32,
    // 1: there is a bias.
    biased: u32,
    // 1: silu is applied.
    activated: u32,
    channels: u32,
    // Number of blocks of 16 tokens per row.
    blocks: u32,
    // rows * blocks * channels
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> weight: array<elem>;
@group(0) @binding(2) var<storage, read_write> bias: array<elem>;
@group(0) @binding(3) var<storage, read_write> ring: array<elem>;
// [2, rows]: the position of each row's first token, then the first position that is not padding.
@group(0) @binding(4) var<storage, read_write> positions: array<i32>;
@group(0) @binding(5) var<storage, read_write> y: array<elem>;
@group(0) @binding(6) var<uniform> info: Info;

const LANES = 256u;
const BLOCK = 16u;

// Bounds of loops are read from here: a loop whose bound is a uniform is slow on software devices.
var<workgroup> tokens_of_all: u32;

// 1 / (1 + exp(-x)). On some GPUs exp(100) is not a number.
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-x, 80.0)));
}

// Slot of a position in the ring.
fn slot(position: i32) -> u32 {
    return u32(position) % info.slots;
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    if lane == 0u {
        tokens_of_all = info.tokens;
    }
    workgroupBarrier();
    let tokens = tokens_of_all;
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    if invocation >= info.invocations {
        return;
    }
    let channel = invocation % info.channels;
    let block = invocation / info.channels % info.blocks;
    let row = invocation / info.channels / info.blocks;
    let rows = info.invocations / info.channels / info.blocks;
    let first = positions[row];
    let visible_from = positions[rows + row];
    let x_row = row * info.x_strides.x + channel * info.x_strides.z;
    let ring_row = row * info.ring_strides.x + channel * info.ring_strides.z;

    var weights: array<f32, WIDTH>;
    for (var k = 0u; k < WIDTH; k++) {
        weights[k] = f32(weight[channel * info.weight_strides.x + k * info.weight_strides.y]);
    }
    var start = 0.0;
    if info.biased != 0u {
        start = f32(bias[channel * info.bias_stride]);
    }
    let begin = block * BLOCK;
    let end = min(begin + BLOCK, tokens);
    // The inputs that a token's output depends on, shifted by one for each token; the last is that of the
    // token itself.
    var inputs: array<f32, WIDTH>;
    for (var k = 1u; k < WIDTH; k++) {
        let token = i32(begin) - i32(WIDTH) + i32(k);
        let position = first + token;
        inputs[k] = 0.0;
        if position >= max(visible_from, 0) {
            if token >= 0 {
                inputs[k] = f32(x[x_row + u32(token) * info.x_strides.y]);
            } else {
                inputs[k] = f32(ring[ring_row + slot(position) * info.ring_strides.y]);
            }
        }
    }
    for (var token = begin; token < end; token++) {
        let seen = first + i32(token) >= visible_from;
        for (var k = 1u; k < WIDTH; k++) {
            inputs[k - 1u] = inputs[k];
        }
        inputs[WIDTH - 1u] = select(0.0, f32(x[x_row + token * info.x_strides.y]), seen);
        var sum = start;
        for (var k = 0u; k < WIDTH; k++) {
            sum += inputs[k] * weights[k];
        }
        let result = select(sum, sum * sigmoid(sum), info.activated != 0u);
        y[(row * tokens + token) * info.channels + channel] = elem(select(0.0, result, seen));
    }
    if block == 0u {
        let kept = min(tokens, info.slots);
        for (var token = tokens - kept; token < tokens; token++) {
            let position = first + i32(token);
            let input = select(elem(0.0), x[x_row + token * info.x_strides.y], position >= visible_from);
            ring[ring_row + slot(position) * info.ring_strides.y] = input;
        }
    }
}
