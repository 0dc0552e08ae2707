// The product of a vector with the matrix of an expert, for few tokens: y[pair] = w[experts[pair]] x[pair],
// where a pair is a token and one of its slots. As linear.wgsl for a single row; the result of a pair does
// not depend on other pairs. Pairs that read the same rows of weights are neighbors. With linear_dense.wgsl
// and weights_dense.wgsl, or linear_packed.wgsl and weights_packed.wgsl; and with row_products.wgsl.

alias elem = f32;
// A row is split among eight lanes times this number.
const SPLITS = 1u;
// Number of vectors per workgroup. They are not normalized.
const ROWS = 1u;
const NORMED = false;

struct Info {
    // [rows, tokens, input, slots]
    x_strides: vec4<u32>,
    // [experts in this buffer, rows of each]
    w_strides: vec2<u32>,
    input: u32,
    output: u32,
    // The first expert in this buffer.
    first_expert: u32,
    experts: u32,
    first_output: u32,
    // Number of rows of a whole matrix.
    outputs: u32,
    tokens: u32,
    slots: u32,
    pairs: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
// [rows, tokens, slots]
@group(0) @binding(2) var<storage, read_write> experts: array<i32>;
@group(0) @binding(3) var<storage, read_write> y: array<elem>;
@group(0) @binding(4) var<uniform> info: Info;

// The offset of the vector, and this lane's partial products with four rows of the weight.
var<private> vectors: array<u32, ROWS>;
var<private> products: array<vec4<f32>, ROWS>;
var<private> squares: array<f32, ROWS>;

const AT_ONCE = 1u;

var<workgroup> shared_expert: u32;

// The scales of normalized vectors, which are not used here.
fn scales_at(c: u32) -> vec4<f32> {
    return vec4(1.0);
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
    let pair = workgroup % info.pairs;
    if lane == 0u {
        shared_expert = u32(experts[pair]) - info.first_expert;
    }
    let expert = workgroupUniformLoad(&shared_expert);
    if expert >= info.experts {
        return;
    }
    let first_output = workgroup / info.pairs * OUTPUTS;
    // Rows past the last one are replaced by the last one.
    let own = min(vec4(first_output + lane / TOGETHER * 4u) + vec4(0u, 1u, 2u, 3u), vec4(info.output - 1u));
    let weights = (own + vec4(expert * info.output)) * info.w_strides.x;
    let vector = pair / info.slots;
    vectors[0] = dot(vec3(vector / info.tokens, vector % info.tokens, pair % info.slots), info.x_strides.xyw);
    multiply(weights, lane);
    sums[lane] = products[0];
    add_up(lane);
    for (var i = lane; i < OUTPUTS; i += LANES) {
        let output = first_output + i;
        if output < info.output {
            y[pair * info.outputs + info.first_output + output] = elem(added_up(0u, i));
        }
    }
}
