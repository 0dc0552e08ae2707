// The product of a vector with the matrix of an expert, for few tokens: y[pair] = w[experts[pair]] x[pair], where a pair is a token and one of
// its slots. As linear.wgsl for a single row, and what a pair comes to does not depend on other pairs. The pairs of the same rows of
// weights are neighbours.

alias elem = f32;
// Neighbours that are read at once: four, where the layout of x and w allows.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Parts that rows of the weight are split into.
const SPLITS = 1u;

struct Info {
    // [rows, tokens, slots, input]
    x_strides: vec4<u32>,
    // [experts of this block, rows of each]
    w_strides: vec2<u32>,
    input: u32,
    output: u32,
    // Of this block.
    first_expert: u32,
    experts: u32,
    first_output: u32,
    // Of a whole matrix.
    outputs: u32,
    tokens: u32,
    slots: u32,
    pairs: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
@group(0) @binding(1) var<storage, read_write> w: array<pack>;
// [rows, tokens, slots]
@group(0) @binding(2) var<storage, read_write> experts: array<i32>;
@group(0) @binding(3) var<storage, read_write> y: array<elem>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;
// Lanes that share the sums of four rows of the weight.
const TOGETHER = 8u * SPLITS;
const OUTPUTS = LANES / TOGETHER * 4u;

var<workgroup> sums: array<vec4<f32>, LANES>;
var<workgroup> shared_expert: u32;

// Four numbers of a row: those from 4 c on. What is beyond its end is any of it.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.input - 1u)) * stride;
}

// Of x it is 0.
fn x_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(x[at / 4u + c]));
    }
    let i = places(c, info.x_strides.w) + at;
    let numbers = vec4<f32>(vec4(vec4(x[i.x]).x, vec4(x[i.y]).x, vec4(x[i.z]).x, vec4(x[i.w]).x));
    return select(vec4(0.0), numbers, vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.input));
}

fn w_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(w[at / 4u + c]));
    }
    let i = places(c, info.w_strides.y) + at;
    return vec4<f32>(vec4(vec4(w[i.x]).x, vec4(w[i.y]).x, vec4(w[i.z]).x, vec4(w[i.w]).x));
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
    // Those beyond the last are the last.
    let own = min(vec4(first_output + lane / TOGETHER * 4u) + vec4(0u, 1u, 2u, 3u), vec4(info.output - 1u));
    let weights = (own + vec4(expert * info.output)) * info.w_strides.x;
    let vector = pair / info.slots;
    let vector_at = dot(vec3(vector / info.tokens, vector % info.tokens, pair % info.slots), info.x_strides.xyz);
    let columns = (info.input + 3u) / 4u;
    let each = (columns + TOGETHER - 1u) / TOGETHER * 8u;
    let begin = lane % TOGETHER / 8u * each;
    let end = min(begin + each, columns);
    var products = vec4(0.0);
    for (var c = begin + lane % 8u; c < end; c += 8u) {
        let numbers = x_at(vector_at, c);
        products += vec4(
            dot(numbers, w_at(weights.x, c)),
            dot(numbers, w_at(weights.y, c)),
            dot(numbers, w_at(weights.z, c)),
            dot(numbers, w_at(weights.w, c)),
        );
    }
    sums[lane] = products;
    workgroupBarrier();
    for (var i = lane; i < OUTPUTS; i += LANES) {
        let output = first_output + i;
        if output < info.output {
            var sum = 0.0;
            for (var j = 0u; j < TOGETHER; j++) {
                // Groups begin at different lanes, which are in different banks.
                sum += sums[i / 4u * TOGETHER + (j + i / 4u) % TOGETHER][i % 4u];
            }
            y[pair * info.outputs + info.first_output + output] = elem(sum);
        }
    }
}
