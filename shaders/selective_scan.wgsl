// The state h of each channel advances from token to token: h = exp(dt a) h + dt x b, with dt after softplus;
// and y = (sum c h + d x) silu(gate). All in f32. One invocation computes a channel of a row, with its state
// in registers. A workgroup has 64 channels of a row, which read b and c from workgroup memory.

alias elem = f32;
// Maximum number of vec4s in a state. Elements past info.states are 0.
const FOURS = 4u;

struct Info {
    // [rows, tokens, channels]. y has the same shape and is contiguous.
    x_strides: vec3<u32>,
    tokens: u32,
    dt_strides: vec3<u32>,
    channels: u32,
    // [rows, tokens, 2 states]: b, then c.
    bc_strides: vec3<u32>,
    states: u32,
    gate_strides: vec3<u32>,
    slots: u32,
    // [rows, states, slots, channels]
    ring_strides: vec4<u32>,
    // [states + 1, channels]: a, then d.
    ad_strides: vec2<u32>,
    // Number of workgroups per row, and in total.
    groups: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> dt: array<elem>;
@group(0) @binding(2) var<storage, read_write> bc: array<elem>;
@group(0) @binding(3) var<storage, read_write> gate: array<elem>;
@group(0) @binding(4) var<storage, read_write> ad: array<f32>;
@group(0) @binding(5) var<storage, read_write> ring: array<f32>;
// [2, rows]: the position of each row's first token; only attention reads the rest.
@group(0) @binding(6) var<storage, read_write> positions: array<i32>;
@group(0) @binding(7) var<storage, read_write> y: array<elem>;
@group(0) @binding(8) var<uniform> info: Info;

const LANES = 64u;
// Number of tokens whose b and c are in memory together.
const STEP = 8u;
const NUMBERS = 4u * FOURS;

// Per token: b, then c.
var<workgroup> vectors: array<f32, 2u * STEP * NUMBERS>;
// Bounds of loops are read from here: a loop whose bound is a uniform is slow on software devices.
var<workgroup> tokens_of_all: u32;

// 1 / (1 + exp(-x)). On some GPUs exp(100) is not a number.
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(min(-x, 80.0)));
}

// ln(1 + exp(x)). With e = exp(-|x|), ln(1 + e) = 2 artanh(e / (2 + e)), whose argument is at most a third:
// terms after the 15th power are below a rounding error.
fn softplus(x: f32) -> f32 {
    let e = exp(-min(abs(x), 80.0));
    let z = e / (2.0 + e);
    let s = z * z;
    var p = s / 15.0 + 1.0 / 13.0;
    p = p * s + 1.0 / 11.0;
    p = p * s + 1.0 / 9.0;
    p = p * s + 1.0 / 7.0;
    p = p * s + 1.0 / 5.0;
    p = p * s + 1.0 / 3.0;
    return max(x, 0.0) + 2.0 * (z + z * s * p);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let workgroup = group.x + group.y * groups.x;
    if workgroup >= info.workgroups {
        return;
    }
    if lane == 0u {
        tokens_of_all = info.tokens;
    }
    let tokens = workgroupUniformLoad(&tokens_of_all);
    let row = workgroup / info.groups;
    let channel = workgroup % info.groups * LANES + lane;
    let own = channel < info.channels;
    let first = positions[row];

    var a: array<vec4<f32>, FOURS>;
    var h: array<vec4<f32>, FOURS>;
    let ring_at = row * info.ring_strides.x + channel * info.ring_strides.w;
    let begin_at = ring_at + u32(first) % info.slots * info.ring_strides.z;
    for (var four = 0u; four < FOURS; four++) {
        a[four] = vec4(0.0);
        h[four] = vec4(0.0);
        for (var i = 0u; i < 4u; i++) {
            let state = 4u * four + i;
            if own && state < info.states {
                a[four][i] = ad[state * info.ad_strides.x + channel * info.ad_strides.y];
                if first != 0 {
                    h[four][i] = ring[begin_at + state * info.ring_strides.y];
                }
            }
        }
    }
    var d = 0.0;
    if own {
        d = ad[info.states * info.ad_strides.x + channel * info.ad_strides.y];
    }

    for (var begin = 0u; begin < tokens; begin += STEP) {
        // All lanes have read the previous contents.
        workgroupBarrier();
        for (var i = lane; i < 2u * STEP * NUMBERS; i += LANES) {
            let token = begin + i / (2u * NUMBERS);
            let which = i / NUMBERS % 2u;
            let state = i % NUMBERS;
            var number = 0.0;
            if token < tokens && state < info.states {
                number = f32(bc[dot(vec3(row, token, which * info.states + state), info.bc_strides)]);
            }
            vectors[i] = number;
        }
        workgroupBarrier();
        if own {
            let end = min(begin + STEP, tokens);
            for (var token = begin; token < end; token++) {
                let place = vec3(row, token, channel);
                let input = f32(x[dot(place, info.x_strides)]);
                let step = softplus(f32(dt[dot(place, info.dt_strides)]));
                let gain = step * input;
                let at = (token - begin) * 2u * NUMBERS;
                var sums = vec4(0.0);
                for (var four = 0u; four < FOURS; four++) {
                    let b = at + 4u * four;
                    let c = b + NUMBERS;
                    let enters = vec4(vectors[b], vectors[b + 1u], vectors[b + 2u], vectors[b + 3u]);
                    let leaves = vec4(vectors[c], vectors[c + 1u], vectors[c + 2u], vectors[c + 3u]);
                    h[four] = exp(step * a[four]) * h[four] + gain * enters;
                    sums += h[four] * leaves;
                }
                let mixed = sums.x + sums.y + sums.z + sums.w + d * input;
                let gated = f32(gate[dot(place, info.gate_strides)]);
                y[(row * tokens + token) * info.channels + channel] = elem(mixed * gated * sigmoid(gated));
                if token + info.slots >= tokens {
                    let to = ring_at + (u32(first) + token + 1u) % info.slots * info.ring_strides.z;
                    for (var four = 0u; four < FOURS; four++) {
                        for (var i = 0u; i < 4u; i++) {
                            let state = 4u * four + i;
                            if state < info.states {
                                ring[to + state * info.ring_strides.y] = h[four][i];
                            }
                        }
                    }
                }
            }
        }
    }
}
