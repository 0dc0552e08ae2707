// y = x w^T + bias + residual for many rows, on devices without units that multiply small matrices. A
// workgroup has a tile of y. A lane has eight rows of w, ACROSS apart, and DOWN neighboring rows of x. The
// order of a sum does not depend on the tile. Workgroups with other rows of x and the same weights are
// neighbors. Loops over rows are written out: browsers guard loops, so that compilers do not unroll them, and
// sums in an array would be in memory. With tile_dense.wgsl, or with tile_packed.wgsl and
// weights_packed.wgsl.

alias elem = f32;
// The number of elements that are read at once: four, if the layout of x and w allows it.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Number of rows of x per tile, and per lane.
const TILE = 32u; const DOWN = 4u;

struct Info {
    // Row r of x is [r / tokens, r % tokens].
    x_strides: vec3<u32>,
    tokens: u32,
    // [output, input]
    w_strides: vec2<u32>,
    input: u32,
    output: u32,
    // Same shape as x.
    residual_strides: vec3<u32>,
    // 1: a residual is added.
    added: u32,
    rows: u32,
    // 1: a bias is added.
    biased: u32,
    bias_stride: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
@group(0) @binding(2) var<storage, read_write> bias: array<elem>;
@group(0) @binding(3) var<storage, read_write> residual: array<elem>;
@group(0) @binding(4) var<storage, read_write> y: array<elem>;
@group(0) @binding(5) var<uniform> info: Info;

const LANES = 128u;
// Number of lanes that have the same rows of x.
const ACROSS = LANES * DOWN / TILE;
const OUTPUTS = 8u * ACROSS;
// Number of vec4s along the sum that are in memory together.
const FOURS = 4u;

// A tile of x, and of w.
var<workgroup> vectors: array<vec4<f32>, FOURS * TILE>;
var<workgroup> weights: array<vec4<f32>, FOURS * OUTPUTS>;

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

// Writes the sums of a row of x and four rows of w from `output` on.
fn write(row: u32, output: u32, sums: vec4<f32>) {
    if row >= info.rows {
        return;
    }
    let residual_at = row / info.tokens * info.residual_strides.x + row % info.tokens * info.residual_strides.y;
    for (var i = 0u; i < 4u; i++) {
        let own = output + ACROSS * i;
        if own < info.output {
            var sum = sums[i];
            if info.biased == 1u {
                sum += f32(bias[own * info.bias_stride]);
            }
            if info.added == 1u {
                sum += f32(residual[residual_at + own * info.residual_strides.z]);
            }
            y[row * info.output + own] = elem(sum);
        }
    }
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
    let tiles = (info.rows + TILE - 1u) / TILE;
    let first_row = workgroup % tiles * TILE;
    let first_output = workgroup / tiles * OUTPUTS;
    let fours = (info.input + 3u) / 4u;
    let end = end_of_row();
    write_table(lane);

    let down = lane / ACROSS * DOWN;
    let across = lane % ACROSS;
    // Sums of each row of x with the first four rows of w, and with the others.
    var a_0 = vec4(0.0);
    var a_1 = vec4(0.0);
    var a_2 = vec4(0.0);
    var a_3 = vec4(0.0);
    var a_4 = vec4(0.0);
    var a_5 = vec4(0.0);
    var a_6 = vec4(0.0);
    var a_7 = vec4(0.0);
    var b_0 = vec4(0.0);
    var b_1 = vec4(0.0);
    var b_2 = vec4(0.0);
    var b_3 = vec4(0.0);
    var b_4 = vec4(0.0);
    var b_5 = vec4(0.0);
    var b_6 = vec4(0.0);
    var b_7 = vec4(0.0);
    for (var c = 0u; c < end; c += FOURS) {
        read_weights(0u, first_output, c, fours, lane);
        for (var i = lane; i < FOURS * TILE; i += LANES) {
            // Rows past the last one are replaced by the last one.
            let row = min(first_row + i / FOURS, info.rows - 1u);
            let at = row / info.tokens * info.x_strides.x + row % info.tokens * info.x_strides.y;
            let own = four_of(c, i % FOURS);
            var numbers = vec4(0.0);
            if own < fours {
                numbers = x_at(at, own);
            }
            vectors[i % FOURS * TILE + i / FOURS] = numbers;
        }
        workgroupBarrier();
        for (var i = 0u; i < FOURS; i++) {
            let w_first = i * OUTPUTS + across;
            let a = mat4x4(weights[w_first], weights[w_first + ACROSS], weights[w_first + 2u * ACROSS], weights[w_first + 3u * ACROSS]);
            let b = mat4x4(
                weights[w_first + 4u * ACROSS],
                weights[w_first + 5u * ACROSS],
                weights[w_first + 6u * ACROSS],
                weights[w_first + 7u * ACROSS],
            );
            let x_first = i * TILE + down;
            let x_0 = vectors[x_first];
            let x_1 = vectors[x_first + 1u];
            let x_2 = vectors[x_first + 2u];
            let x_3 = vectors[x_first + 3u];
            a_0 += x_0 * a;
            b_0 += x_0 * b;
            a_1 += x_1 * a;
            b_1 += x_1 * b;
            a_2 += x_2 * a;
            b_2 += x_2 * b;
            a_3 += x_3 * a;
            b_3 += x_3 * b;
            if DOWN == 8u {
                let x_4 = vectors[x_first + 4u];
                let x_5 = vectors[x_first + 5u];
                let x_6 = vectors[x_first + 6u];
                let x_7 = vectors[x_first + 7u];
                a_4 += x_4 * a;
                b_4 += x_4 * b;
                a_5 += x_5 * a;
                b_5 += x_5 * b;
                a_6 += x_6 * a;
                b_6 += x_6 * b;
                a_7 += x_7 * a;
                b_7 += x_7 * b;
            }
        }
        workgroupBarrier();
    }
    let row = first_row + down;
    let output = first_output + across;
    write(row, output, a_0);
    write(row, output + 4u * ACROSS, b_0);
    write(row + 1u, output, a_1);
    write(row + 1u, output + 4u * ACROSS, b_1);
    write(row + 2u, output, a_2);
    write(row + 2u, output + 4u * ACROSS, b_2);
    write(row + 3u, output, a_3);
    write(row + 3u, output + 4u * ACROSS, b_3);
    if DOWN == 8u {
        write(row + 4u, output, a_4);
        write(row + 4u, output + 4u * ACROSS, b_4);
        write(row + 5u, output, a_5);
        write(row + 5u, output + 4u * ACROSS, b_5);
        write(row + 6u, output, a_6);
        write(row + 6u, output + 4u * ACROSS, b_6);
        write(row + 7u, output, a_7);
        write(row + 7u, output + 4u * ACROSS, b_7);
    }
}
