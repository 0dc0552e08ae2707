// y = act(gate) * up, with act in f32, or a clamped gate. One invocation per element. With activation.wgsl.

alias elem = f32;
// 0: x / (1 + exp(-x)). 1: x Phi(x). 2: the tanh approximation of 1. 3: max(x, 0)^2.
// 4: clamped.
const ACTIVATION = 0u;

struct Info {
    // [rows, tokens, width]. y has the same shape and is contiguous.
    gate_strides: vec3<u32>,
    tokens: u32,
    up_strides: vec3<u32>,
    width: u32,
    invocations: u32,
    // For clamped gates: the slope of the sigmoid, and the limit.
    alpha: f32,
    limit: f32,
}

@group(0) @binding(0) var<storage, read_write> gate: array<elem>;
@group(0) @binding(1) var<storage, read_write> up: array<elem>;
@group(0) @binding(2) var<storage, read_write> y: array<elem>;
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
    let i = invocation % info.width;
    let token = invocation / info.width % info.tokens;
    let row = invocation / info.width / info.tokens;
    let x = f32(gate[dot(vec3(row, token, i), info.gate_strides)]);
    let value = up[dot(vec3(row, token, i), info.up_strides)];
    if ACTIVATION == 4u {
        let limited = min(x, info.limit);
        y[invocation] = elem(limited * sigmoid(info.alpha * limited) * (clamp(f32(value), -info.limit, info.limit) + 1.0));
        return;
    }
    y[invocation] = elem(activated(x)) * value;
}
