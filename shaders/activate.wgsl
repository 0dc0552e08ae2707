// y = act(x), with act in f32. One invocation per element. With activation.wgsl.

alias elem = f32;
// 0: x / (1 + exp(-x)). 1: x Phi(x). 2: the tanh approximation of 1. 3: max(x, 0)^2.
const ACTIVATION = 0u;

struct Info {
    // [rows, tokens, width]. y has the same shape and is contiguous.
    x_strides: vec3<u32>,
    tokens: u32,
    width: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> y: array<elem>;
@group(0) @binding(2) var<uniform> info: Info;

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
    y[invocation] = elem(activated(f32(x[dot(vec3(row, token, i), info.x_strides)])));
}
