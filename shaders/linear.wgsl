// y = x w^T + bias + residual for a few rows. Eight or more lanes read four rows of the weight together, so
// that each element of x is multiplied by four weights, and memory is read in order. More than eight do if
// eight would give few workgroups with long rows. The order of a sum does not depend on the number of rows of
// x. Workgroups with other rows of x and the same weights are neighbors. x may be normalized before the
// product, and the result gated or rotated after it. The division of x by its root mean square comes after
// the product. With linear_dense.wgsl and weights_dense.wgsl, or with weights_packed.wgsl and either
// linear_packed.wgsl or linear_bytes.wgsl; and with row_products.wgsl and activation.wgsl.

alias elem = f32;
// Number of rows of x per workgroup.
const ROWS = 1u;
// A row is split among eight lanes times this number.
const SPLITS = 1u;
// Whether x is normalized, and the operation on the result.
const NORMED = false;
const THEN = NOTHING;
const ACTIVATION = 0u;

const NOTHING = 0u;
// The first half of the weight's rows gives gates for the results of the second half.
const GATED = 1u;
// Heads are rotated as in rotary.wgsl.
const ROTATED = 2u;

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
    // [1 or batch, tokens, pairs]; the first stride is 0 if all sequences share their angles.
    cos_strides: vec3<u32>,
    pairs: u32,
    sin_strides: vec3<u32>,
    head_dim: u32,
    // Number of rows of the weight whose results are rotated.
    rotated: u32,
    scale_stride: u32,
    eps: f32,
    // Added to the scales.
    shift: f32,
}

@group(0) @binding(0) var<storage, read_write> x: array<pack>;
@group(0) @binding(2) var<storage, read_write> bias: array<elem>;
@group(0) @binding(3) var<storage, read_write> residual: array<elem>;
@group(0) @binding(4) var<storage, read_write> y: array<elem>;
// Factors for the elements of x, if x is normalized.
@group(0) @binding(5) var<storage, read_write> scales: array<pack>;
@group(0) @binding(6) var<storage, read_write> cosines: array<f32>;
@group(0) @binding(7) var<storage, read_write> sines: array<f32>;
@group(0) @binding(8) var<uniform> info: Info;

// Per row of x: its offset, this lane's partial products with four rows of the weight, and this lane's sum of
// squares.
var<private> vectors: array<u32, ROWS>;
var<private> products: array<vec4<f32>, ROWS>;
var<private> squares: array<f32, ROWS>;

// Number of rows whose sums are in memory together.
const AT_ONCE = min(ROWS, 4u);

// The row of the weight at a place. Results that are combined are two places apart.
fn row_at(place: u32) -> u32 {
    let second = place % 4u >= 2u;
    let number = place / 4u * 2u + place % 2u;
    if THEN == GATED {
        let half = info.output / 2u;
        return min(number, half - 1u) + select(0u, half, second);
    } else if THEN == ROTATED {
        let of_head = place % info.head_dim;
        let row = of_head / 4u * 2u + of_head % 2u + select(0u, info.pairs, second);
        return select(place, place - of_head + row, place < info.rotated && of_head < 2u * info.pairs);
    }
    return min(place, info.output - 1u);
}

// The scales of elements 4 c to 4 c + 3.
fn scales_at(c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(scales[c])) + info.shift;
    }
    let i = places(c, info.scale_stride);
    let four = vec4(vec4(scales[i.x]).x, vec4(scales[i.y]).x, vec4(scales[i.z]).x, vec4(scales[i.w]).x);
    return vec4<f32>(four) + info.shift;
}

// A result with its bias, for a row of x whose sums are in memory and a place of the workgroup.
fn result(row: u32, own_place: u32, place: u32) -> f32 {
    let sum = added_up(row, own_place);
    if info.biased == 1u {
        return sum + f32(bias[row_at(place) * info.bias_stride]);
    }
    return sum;
}

fn write(row: u32, place: u32, own_row: u32, own_place: u32) {
    let output = row_at(place);
    let position = vec2(row / info.tokens, row % info.tokens);
    if THEN == GATED {
        let number = place / 4u * 2u + place % 2u;
        if place % 4u < 2u && number < info.output / 2u {
            let value = activated(result(own_row, own_place, place)) * result(own_row, own_place + 2u, place + 2u);
            y[row * (info.output / 2u) + number] = elem(value);
        }
        return;
    }
    if place >= info.output {
        return;
    }
    var value = result(own_row, own_place, place);
    if THEN == ROTATED {
        let of_head = output % info.head_dim;
        if output < info.rotated && of_head < 2u * info.pairs {
            let pair = vec3(position, of_head % info.pairs);
            // The tables are rounded to the type of x.
            let c = f32(elem(cosines[dot(pair, info.cos_strides)]));
            let s = f32(elem(sines[dot(pair, info.sin_strides)]));
            let other = result(own_row, own_place ^ 2u, place ^ 2u);
            value = value * c + select(other, -other, of_head < info.pairs) * s;
        }
    }
    if info.added == 1u {
        value += f32(residual[dot(vec3(position, output), info.residual_strides)]);
    }
    y[row * info.output + output] = elem(value);
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
    let tiles = (info.rows + ROWS - 1u) / ROWS;
    let first_row = workgroup % tiles * ROWS;
    let first_output = workgroup / tiles * OUTPUTS;
    // Rows past the last one are replaced by the last one.
    let first_place = first_output + lane / TOGETHER * 4u;
    let own = vec4(row_at(first_place), row_at(first_place + 1u), row_at(first_place + 2u), row_at(first_place + 3u));
    let weights = min(own, vec4(info.output - 1u)) * info.w_strides.x;
    for (var r = 0u; r < ROWS; r++) {
        let row = min(first_row + r, info.rows - 1u);
        vectors[r] = row / info.tokens * info.x_strides.x + row % info.tokens * info.x_strides.y;
    }
    multiply(weights, lane);
    if NORMED {
        for (var from_row = 0u; from_row < ROWS; from_row += 4u) {
            for (var r = 0u; r < AT_ONCE; r++) {
                sums[lane][r] = squares[from_row + r];
            }
            add_up(lane);
            // All lanes that share the sums of four rows of the weight have read all of x.
            var sum = vec4(0.0);
            for (var j = 0u; j < LEFT; j++) {
                sum += sums[j];
            }
            let root = sqrt(sum / f32(info.input) + info.eps);
            for (var r = 0u; r < AT_ONCE; r++) {
                products[from_row + r] /= root[r];
            }
            workgroupBarrier();
        }
    }
    for (var from_row = 0u; from_row < ROWS; from_row += AT_ONCE) {
        for (var r = 0u; r < AT_ONCE; r++) {
            sums[r * LANES + lane] = products[from_row + r];
        }
        add_up(lane);
        for (var i = lane; i < OUTPUTS * AT_ONCE; i += LANES) {
            let row = first_row + from_row + i / OUTPUTS;
            let place = first_output + i % OUTPUTS;
            if row < info.rows {
                write(row, place, i / OUTPUTS, i % OUTPUTS);
            }
        }
        if ROWS > AT_ONCE {
            // All lanes have read the previous contents.
            workgroupBarrier();
        }
    }
}
