// The products of vectors with the matrices of experts, for many tokens: y[pair] = w[experts[pair]] x[pair],
// where a pair is a token and one of its slots. A workgroup takes a tile of pairs that are routed to one
// expert (expert_groups.wgsl), and some rows of its matrix. With tile_dense.wgsl, or with
// tile_packed.wgsl and weights_packed.wgsl.

alias elem = f32;
// The number of elements that are read at once: four, if the layout of x and w allows it.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Number of pairs per tile.
const TILE = 32u;

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
    tiles: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
// [rows, tokens, slots]
@group(0) @binding(2) var<storage, read_write> experts: array<i32>;
// [tiles, TILE]: pairs, or -1.
@group(0) @binding(3) var<storage, read_write> order: array<i32>;
@group(0) @binding(4) var<storage, read_write> y: array<elem>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 256u;
// Number of lanes that have the same four pairs, each with four rows of the matrix.
const ACROSS = 4u * LANES / TILE;
const OUTPUTS = 4u * ACROSS;
// Number of vec4s along the sum that are in memory together.
const FOURS = min(TILE / 8u, 4u);

struct Place {
    expert: u32,
    // Number of vec4s per row.
    fours: u32,
    // The end of a row, in units of `c` of read_weights.
    end: u32,
}

// A tile of the vectors, and of the rows of the matrix.
var<workgroup> vectors: array<vec4<f32>, FOURS * TILE>;
var<workgroup> weights: array<vec4<f32>, FOURS * OUTPUTS>;
var<workgroup> shared_place: Place;

// The offsets of elements 4 c to 4 c + 3 of a row. Past its end, they point at any of its elements.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(4u * c) + vec4(0u, 1u, 2u, 3u), vec4(info.input - 1u)) * stride;
}

// Four elements of x, with 0 past the end of the row.
fn x_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(x[at / 4u + c]));
    }
    let i = places(c, info.x_strides.z) + at;
    let numbers = vec4<f32>(vec4(vec4(x[i.x]).x, vec4(x[i.y]).x, vec4(x[i.z]).x, vec4(x[i.w]).x));
    return select(vec4(0.0), numbers, vec4(4u * c) + vec4(0u, 1u, 2u, 3u) < vec4(info.input));
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
        shared_place = Place(info.experts, (info.input + 3u) / 4u, end_of_row());
        if order[first] >= 0 {
            shared_place.expert = u32(experts[order[first]]) - info.first_expert;
        }
    }
    let place = workgroupUniformLoad(&shared_place);
    if place.expert >= info.experts {
        return;
    }

    write_table(lane);
    // The pair whose vector this lane loads a part of.
    var pair = -1;
    if lane / FOURS < TILE {
        pair = order[first + lane / FOURS];
    }
    let vector = u32(max(pair, 0)) / info.slots;
    let slot = u32(max(pair, 0)) % info.slots;
    let vector_at = dot(vec3(vector / info.tokens, vector % info.tokens, slot), info.x_strides.xyw);

    // This lane computes four rows of the matrix, ACROSS apart, times four vectors.
    let quartet = lane / ACROSS * 4u;
    let across = lane % ACROSS;
    var products: array<vec4<f32>, 4>;
    for (var c = 0u; c < place.end; c += FOURS) {
        read_weights(place.expert * info.output, first_output, c, place.fours, lane);
        if lane < FOURS * TILE {
            let own = four_of(c, lane % FOURS);
            var numbers = vec4(0.0);
            if pair >= 0 && own < place.fours {
                numbers = x_at(vector_at, own);
            }
            vectors[lane % FOURS * TILE + lane / FOURS] = numbers;
        }
        workgroupBarrier();
        for (var i = 0u; i < FOURS; i++) {
            let at = i * OUTPUTS + across;
            let w_0 = weights[at];
            let w_1 = weights[at + ACROSS];
            let w_2 = weights[at + 2u * ACROSS];
            let w_3 = weights[at + 3u * ACROSS];
            for (var r = 0u; r < 4u; r++) {
                let numbers = vectors[i * TILE + quartet + r];
                products[r] += vec4(dot(numbers, w_0), dot(numbers, w_1), dot(numbers, w_2), dot(numbers, w_3));
            }
        }
        workgroupBarrier();
    }
    for (var r = 0u; r < 4u; r++) {
        let to = order[first + quartet + r];
        if to >= 0 {
            for (var i = 0u; i < 4u; i++) {
                let output = first_output + across + ACROSS * i;
                if output < info.output {
                    y[u32(to) * info.outputs + info.first_output + output] = elem(products[r][i]);
                }
            }
        }
    }
}
