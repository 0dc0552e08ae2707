// y = residual + the sum of weights[slot] x[slot] over slots, in f32. One invocation per element.

alias elem = f32;

struct Info {
    // [rows, tokens, slots, width]
    x_strides: vec4<u32>,
    // [rows, tokens, slots]
    weights_strides: vec3<u32>,
    tokens: u32,
    // [rows, tokens, width]
    residual_strides: vec3<u32>,
    width: u32,
    slots: u32,
    // 1: a residual is added.
    added: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> weights: array<f32>;
@group(0) @binding(2) var<storage, read_write> residual: array<elem>;
@group(0) @binding(3) var<storage, read_write> y: array<elem>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;

// Bounds of loops are read from here: a loop whose bound is a uniform is slow on software devices.
var<workgroup> shared_slots: u32;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    if lane == 0u {
        shared_slots = info.slots;
    }
    let slots = workgroupUniformLoad(&shared_slots);
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    if invocation >= info.invocations {
        return;
    }
    let i = invocation % info.width;
    let token = invocation / info.width % info.tokens;
    let row = invocation / info.width / info.tokens;
    var sum = 0.0;
    for (var slot = 0u; slot < slots; slot++) {
        let weight = weights[dot(vec3(row, token, slot), info.weights_strides)];
        sum += weight * f32(x[dot(vec4(row, token, slot, i), info.x_strides)]);
    }
    if info.added == 1u {
        sum += f32(residual[dot(vec3(row, token, i), info.residual_strides)]);
    }
    y[invocation] = elem(sum);
}
