// The products of vectors with the matrices of experts, for many tokens: y[pair] = w[experts[pair]] x[pair], where a pair is a token and
// one of its slots. A workgroup has a tile of pairs that go to one expert (expert_groups.wgsl) and 64 rows of its matrix.

alias elem = f32;
// Neighbours that are read at once: four, where the layout of x and w allows.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Pairs that a lane has, each with four rows of the matrix.
const ROWS = 1u;

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
    tiles: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
@group(0) @binding(1) var<storage, read_write> w: array<pack>;
// [rows, tokens, slots]
@group(0) @binding(2) var<storage, read_write> experts: array<i32>;
// [tiles, TILE]: pairs, or -1.
@group(0) @binding(3) var<storage, read_write> order: array<i32>;
@group(0) @binding(4) var<storage, read_write> y: array<elem>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;
const TILE = 16u * ROWS;
const OUTPUTS = 64u;

struct Place {
    expert: u32,
    // Fours of a row.
    columns: u32,
}

// Four fours of each vector, and of each row of the matrix.
var<workgroup> vectors: array<vec4<f32>, 4u * TILE>;
var<workgroup> weights: array<vec4<f32>, 4u * OUTPUTS>;
var<workgroup> shared_place: Place;

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
    let first = workgroup % info.tiles * TILE;
    let first_output = workgroup / info.tiles * OUTPUTS;
    if lane == 0u {
        shared_place = Place(info.experts, (info.input + 3u) / 4u);
        if order[first] >= 0 {
            shared_place.expert = u32(experts[order[first]]) - info.first_expert;
        }
    }
    let place = workgroupUniformLoad(&shared_place);
    if place.expert >= info.experts {
        return;
    }

    // What it loads: a part of a vector, and of a row of the matrix. Those beyond the last row are the last.
    var pair = -1;
    if lane / 4u < TILE {
        pair = order[first + lane / 4u];
    }
    let vector = u32(max(pair, 0)) / info.slots;
    let slot = u32(max(pair, 0)) % info.slots;
    let vector_at = dot(vec3(vector / info.tokens, vector % info.tokens, slot), info.x_strides.xyz);
    let row = min(first_output + lane / 4u, info.output - 1u);
    let weights_at = (place.expert * info.output + row) * info.w_strides.x;

    // What it computes: four rows of the matrix, 16 apart, times ROWS vectors.
    let sixteen = lane / 16u;
    let sixteenth = lane % 16u;
    var products: array<vec4<f32>, ROWS>;
    for (var c = 0u; c < place.columns; c += 4u) {
        let column = c + lane % 4u;
        var numbers = vec4(0.0);
        var four_weights = vec4(0.0);
        if column < place.columns {
            four_weights = w_at(weights_at, column);
            if pair >= 0 {
                numbers = x_at(vector_at, column);
            }
        }
        weights[lane % 4u * OUTPUTS + lane / 4u] = four_weights;
        if lane / 4u < TILE {
            vectors[lane % 4u * TILE + lane / 4u] = numbers;
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) {
            let at = i * OUTPUTS + sixteenth;
            let w_0 = weights[at];
            let w_1 = weights[at + 16u];
            let w_2 = weights[at + 32u];
            let w_3 = weights[at + 48u];
            for (var r = 0u; r < ROWS; r++) {
                let numbers = vectors[i * TILE + ROWS * sixteen + r];
                products[r] += vec4(dot(numbers, w_0), dot(numbers, w_1), dot(numbers, w_2), dot(numbers, w_3));
            }
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < ROWS; r++) {
        let to = order[first + ROWS * sixteen + r];
        if to >= 0 {
            for (var i = 0u; i < 4u; i++) {
                let output = first_output + sixteenth + 16u * i;
                if output < info.output {
                    y[u32(to) * info.outputs + info.first_output + output] = elem(products[r][i]);
                }
            }
        }
    }
}
