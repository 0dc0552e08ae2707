// y = x w^T + bias + residual of a few rows. Eight lanes or more go along four rows of the weight together, so that each number of x that is
// read meets four weights, and memory is read in order. Where eight make few workgroups of long rows, more do. A lane reads eight numbers of each
// row at once. How a sum is made does not depend on the number of rows of x. Workgroups with other rows of x and the same weights are neighbours.
// With row_products.wgsl.

alias elem = f32;
// Neighbours that are read at once: four, where the layout of x and w allows.
alias pack = vec4<elem>;
const WIDTH = 4u;
// Rows of x that a workgroup has.
const ROWS = 1u;
// Eight lanes times this number go along a row.
const SPLITS = 1u;

struct Info {
    // Row r of x is [r / tokens, r % tokens].
    x_strides: vec3<u32>,
    tokens: u32,
    // [output, input]
    w_strides: vec2<u32>,
    input: u32,
    output: u32,
    // As x.
    residual_strides: vec3<u32>,
    // 1: there is a residual.
    added: u32,
    rows: u32,
    // 1: there is a bias.
    biased: u32,
    bias_stride: u32,
    workgroups: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
@group(0) @binding(1) var<storage, read_write> w: array<pack>;
@group(0) @binding(2) var<storage, read_write> bias: array<elem>;
@group(0) @binding(3) var<storage, read_write> residual: array<elem>;
@group(0) @binding(4) var<storage, read_write> y: array<elem>;
@group(0) @binding(5) var<uniform> info: Info;

// Rows whose sums are in memory together.
const AT_ONCE = min(ROWS, 4u);

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
    let tiles = (info.rows + ROWS - 1u) / ROWS;
    let first_row = workgroup % tiles * ROWS;
    let first_output = workgroup / tiles * OUTPUTS;
    // Those beyond the last are the last.
    let own = min(vec4(first_output + lane / TOGETHER * 4u) + vec4(0u, 1u, 2u, 3u), vec4(info.output - 1u));
    let weights = own * info.w_strides.x;
    var products: array<vec4<f32>, ROWS>;
    let columns = (info.input + 3u) / 4u;
    var vectors: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let row = min(first_row + r, info.rows - 1u);
        vectors[r] = row / info.tokens * info.x_strides.x + row % info.tokens * info.x_strides.y;
    }
    var c = lane % TOGETHER * 2u;
    for (; c + 1u < columns; c += TOGETHER * 2u) {
        let w_0 = w_at(weights.x, c, info.w_strides.y);
        let next_0 = w_at(weights.x, c + 1u, info.w_strides.y);
        let w_1 = w_at(weights.y, c, info.w_strides.y);
        let next_1 = w_at(weights.y, c + 1u, info.w_strides.y);
        let w_2 = w_at(weights.z, c, info.w_strides.y);
        let next_2 = w_at(weights.z, c + 1u, info.w_strides.y);
        let w_3 = w_at(weights.w, c, info.w_strides.y);
        let next_3 = w_at(weights.w, c + 1u, info.w_strides.y);
        for (var r = 0u; r < ROWS; r++) {
            let numbers = x_at(vectors[r], c, info.x_strides.z);
            let next = x_at(vectors[r], c + 1u, info.x_strides.z);
            products[r] += vec4(dot(numbers, w_0), dot(numbers, w_1), dot(numbers, w_2), dot(numbers, w_3));
            products[r] += vec4(dot(next, next_0), dot(next, next_1), dot(next, next_2), dot(next, next_3));
        }
    }
    // The last, where their number is odd.
    if c < columns {
        let w_0 = w_at(weights.x, c, info.w_strides.y);
        let w_1 = w_at(weights.y, c, info.w_strides.y);
        let w_2 = w_at(weights.z, c, info.w_strides.y);
        let w_3 = w_at(weights.w, c, info.w_strides.y);
        for (var r = 0u; r < ROWS; r++) {
            let numbers = x_at(vectors[r], c, info.x_strides.z);
            products[r] += vec4(dot(numbers, w_0), dot(numbers, w_1), dot(numbers, w_2), dot(numbers, w_3));
        }
    }
    for (var from_row = 0u; from_row < ROWS; from_row += AT_ONCE) {
        for (var r = 0u; r < AT_ONCE; r++) {
            sums[r * LANES + lane] = products[from_row + r];
        }
        add_up(lane);
        for (var i = lane; i < OUTPUTS * AT_ONCE; i += LANES) {
            let row = first_row + from_row + i / OUTPUTS;
            let output = first_output + i % OUTPUTS;
            if row < info.rows && output < info.output {
                var sum = added_up(i / OUTPUTS, i % OUTPUTS);
                if info.biased == 1u {
                    sum += f32(bias[output * info.bias_stride]);
                }
                if info.added == 1u {
                    let place = vec3(row / info.tokens, row % info.tokens, output);
                    sum += f32(residual[dot(place, info.residual_strides)]);
                }
                y[row * info.output + output] = elem(sum);
            }
        }
        if ROWS > AT_ONCE {
            // All lanes have read what was there.
            workgroupBarrier();
        }
    }
}
