// y = x w^T + bias + residual for many rows, on units that multiply small matrices (cooperative matrices). A
// workgroup has a tile of y, which is a grid of parts. A subgroup has a part: two rows of matrices of sums.
// In a tile for few rows, several subgroups share a part: each multiplies some elements along the sum. While
// one step along the sum is multiplied in memory, the next one may be read. Workgroups with other rows of x
// and the same weights are neighbors. With matrix_dense.wgsl, or with matrix_packed.wgsl and
// weights_packed.wgsl. These define STEP: the number of elements along the sum that are in memory together.

enable wgpu_cooperative_matrix;
alias elem = f32;
// The number of elements that are read at once: eight, as two vec4s, if the layout of x and w allows it and
// rows are whole steps.
alias pack = vec4<elem>;
const WIDTH = 8u;
// The matrices that are multiplied. HEIGHT is the number of rows of x_matrix and y_matrix. Their columns, and
// the rows and columns of w_matrix, are SIZE. Then the number of parts of a workgroup from top to bottom, and
// side by side, the number of matrices of sums side by side in a part (4 or 2), and the most subgroups that
// share a part.
alias x_matrix = coop_mat16x16<elem, A>;
alias w_matrix = coop_mat16x16<elem, B>;
alias y_matrix = coop_mat16x16<f32, C>;
const HEIGHT = 16u;
const SIZE = 16u;
const LANES = 256u;
const DOWN = 4u;
const ACROSS = 2u;
const WIDE = 4u;
const SPLITS = 1u;
// Whether the next step is read while this one is multiplied. It takes registers.
const AHEAD = true;
// What memory consists of, and how many of them four numbers are.
alias cell = vec4<elem>;
const CELLS = 1u;
fn cell_of(four: vec4<elem>, i: u32) -> cell { return four; }

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

const PARTS = DOWN * ACROSS;
// Size of a tile.
const ROWS = DOWN * 2u * HEIGHT;
const OUTPUTS = ACROSS * WIDE * SIZE;
// Cells from one row to the next, with padding to avoid bank conflicts.
const STRIDE = (STEP + 8u) / 4u * CELLS;
// Cells from one matrix to the one below it.
const X_BELOW = HEIGHT * STRIDE;
const W_BELOW = SIZE * STRIDE;
// Number of groups of eight elements in a row's step, and how many of them a lane reads.
const EIGHTS = STEP / 8u;
const X_EACH = (ROWS * EIGHTS + LANES - 1u) / LANES;
// Sums per matrix, and number of parts of which a matrix of sums is in memory.
const AREA = HEIGHT * SIZE;
const AT_ONCE = min(PARTS, 1024u / (AREA * SPLITS));

var<workgroup> x_tile: array<cell, ROWS * STRIDE>;
var<workgroup> w_tile: array<cell, OUTPUTS * STRIDE>;
var<workgroup> results: array<f32, AT_ONCE * SPLITS * AREA>;

// Eight elements of a row.
struct Eight {
    low: vec4<elem>,
    high: vec4<elem>,
}

// Which of four elements from c on are in a row.
fn is_in_row(c: u32) -> vec4<bool> {
    return vec4(c) + vec4(0u, 1u, 2u, 3u) < vec4(info.input);
}

// The offsets of those elements. Past the end of the row, they point at any of its elements.
fn places(c: u32, stride: u32) -> vec4<u32> {
    return min(vec4(c) + vec4(0u, 1u, 2u, 3u), vec4(info.input - 1u)) * stride;
}

fn x_four(at: u32, c: u32) -> vec4<elem> {
    let i = places(c, info.x_strides.z) + at;
    let numbers = vec4<elem>(vec4(x[i.x]).x, vec4(x[i.y]).x, vec4(x[i.z]).x, vec4(x[i.w]).x);
    return select(vec4<elem>(), numbers, is_in_row(c));
}

// Elements of a row from 8 e on. Past the end of the row they are 0 in its last step, and arbitrary numbers
// after that step.
fn x_at(at: u32, e: u32) -> Eight {
    if WIDTH == 8u {
        let i = 2u * (at / 8u + min(e, info.input / 8u - 1u));
        return Eight(vec4<elem>(vec4(x[i])), vec4<elem>(vec4(x[i + 1u])));
    }
    return Eight(x_four(at, 8u * e), x_four(at, 8u * e + 4u));
}

// The rows that a lane reads, and the elements that it has read.
alias XRows = array<u32, X_EACH>;
alias XRead = array<Eight, X_EACH>;

// Reads a lane's elements of a step.
fn read_x(read: ptr<function, XRead>, rows: ptr<function, XRows>, step: u32, lane: u32) {
    for (var i = 0u; i < X_EACH; i++) {
        (*read)[i] = x_at((*rows)[i], place_of(step, lane % EIGHTS));
    }
}

// Writes them to the tile.
fn write_x(read: ptr<function, XRead>, lane: u32) {
    for (var i = 0u; i < X_EACH; i++) {
        let row = (lane + i * LANES) / EIGHTS;
        if row < ROWS {
            let at = row * STRIDE + lane % EIGHTS * 2u * CELLS;
            let low = as_weights((*read)[i].low);
            let high = as_weights((*read)[i].high);
            for (var j = 0u; j < CELLS; j++) {
                x_tile[at + j] = cell_of(low, j);
            }
            for (var j = 0u; j < CELLS; j++) {
                x_tile[at + CELLS + j] = cell_of(high, j);
            }
        }
    }
}

// The position of a lane and of its subgroup.
struct Own {
    lane: u32,
    part: u32,
    // The parts that subgroups have now: the first one, and their number.
    first_part: u32,
    parts: u32,
    // The subgroups that share a part: which one this is, and their number.
    split: u32,
    splits: u32,
    // First row and output of the tile.
    first: vec2<u32>,
}

// Writes one of the matrices of each part.
fn write(matrix: y_matrix, down: u32, across: u32, own: Own) {
    for (var begin = 0u; begin < PARTS; begin += AT_ONCE) {
        // All lanes have read the previous contents.
        workgroupBarrier();
        if own.part / AT_ONCE == begin / AT_ONCE && own.split < own.splits {
            coopStoreT(matrix, &results[(own.part % AT_ONCE * SPLITS + own.split) * AREA], SIZE);
        }
        workgroupBarrier();
        for (var i = own.lane; i < AT_ONCE * AREA; i += LANES) {
            let part = begin + i / AREA;
            let row = own.first.x + (part / ACROSS * 2u + down) * HEIGHT + i / SIZE % HEIGHT;
            let output = own.first.y + (part % ACROSS * WIDE + across) * SIZE + i % SIZE;
            if part - own.first_part < own.parts && row < info.rows && output < info.output {
                let place = i / AREA * SPLITS * AREA + i % AREA;
                var sum = results[place];
                for (var split = 1u; split < min(own.splits, SPLITS); split++) {
                    sum += results[place + split * AREA];
                }
                if info.biased == 1u {
                    sum += f32(bias[output * info.bias_stride]);
                }
                if info.added == 1u {
                    let at = vec3(row / info.tokens, row % info.tokens, output);
                    sum += f32(residual[dot(at, info.residual_strides)]);
                }
                y[row * info.output + output] = elem(sum);
            }
        }
    }
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
) {
    let workgroup = group.x + group.y * groups.x;
    if workgroup >= info.workgroups {
        return;
    }
    let tiles = (info.rows + ROWS - 1u) / ROWS;
    let first = vec2(workgroup % tiles * ROWS, workgroup / tiles * OUTPUTS);
    let steps = (info.input + STEP - 1u) / STEP;
    write_table(lane);
    // The rows that this lane reads. Rows past the last one are replaced by the last one.
    var x_rows: XRows;
    for (var i = 0u; i < X_EACH; i++) {
        let row = min(first.x + (lane + i * LANES) / EIGHTS, info.rows - 1u);
        x_rows[i] = row / info.tokens * info.x_strides.x + row % info.tokens * info.x_strides.y;
    }
    var w_rows = rows_of_lane(first.y, lane);

    // A driver may choose the size of subgroups. If there are fewer subgroups than parts, each computes
    // several parts in turn. If there are more subgroups than can share parts, the others multiply, too, and
    // store nothing.
    let splits = clamp(subgroups / PARTS, 1u, SPLITS);
    let split = subgroup / PARTS;
    for (var first_part = 0u; first_part < PARTS; first_part += subgroups) {
        let part = min(first_part + subgroup % PARTS, PARTS - 1u);
        let x_first = part / ACROSS * 2u * X_BELOW;
        let w_first = part % ACROSS * WIDE * W_BELOW;
        // All lanes have read the previous contents.
        workgroupBarrier();
        for (var i = lane; i < AREA; i += LANES) {
            results[i] = 0.0;
        }
        workgroupBarrier();
        var y_00 = coopLoadT<y_matrix>(&results[0], SIZE);
        var y_01 = y_00;
        var y_02 = y_00;
        var y_03 = y_00;
        var y_10 = y_00;
        var y_11 = y_00;
        var y_12 = y_00;
        var y_13 = y_00;
        var x_read: XRead;
        var w_read: Read;
        if AHEAD {
            read_x(&x_read, &x_rows, 0u, lane);
            read_weights(&w_read, &w_rows, 0u, lane);
        }
        for (var step = 0u; step < steps; step++) {
            // All lanes have multiplied the previous contents.
            workgroupBarrier();
            if !AHEAD {
                read_x(&x_read, &x_rows, step, lane);
                read_weights(&w_read, &w_rows, step, lane);
            }
            write_x(&x_read, lane);
            write_weights(&w_read, step, lane);
            workgroupBarrier();
            if AHEAD {
                read_x(&x_read, &x_rows, step + 1u, lane);
                read_weights(&w_read, &w_rows, step + 1u, lane);
            }
            for (var k = min(split, SPLITS - 1u); k < STEP / SIZE; k += splits) {
                let at = k * SIZE / 4u * CELLS;
                let x_0 = coopLoadT<x_matrix>(&x_tile[x_first + at], STRIDE);
                let x_1 = coopLoadT<x_matrix>(&x_tile[x_first + X_BELOW + at], STRIDE);
                // The columns of the transposed weights.
                let w_0 = coopLoad<w_matrix>(&w_tile[w_first + at], STRIDE);
                let w_1 = coopLoad<w_matrix>(&w_tile[w_first + W_BELOW + at], STRIDE);
                y_00 = coopMultiplyAdd(x_0, w_0, y_00);
                y_01 = coopMultiplyAdd(x_0, w_1, y_01);
                y_10 = coopMultiplyAdd(x_1, w_0, y_10);
                y_11 = coopMultiplyAdd(x_1, w_1, y_11);
                if WIDE == 4u {
                    let w_2 = coopLoad<w_matrix>(&w_tile[w_first + 2u * W_BELOW + at], STRIDE);
                    let w_3 = coopLoad<w_matrix>(&w_tile[w_first + 3u * W_BELOW + at], STRIDE);
                    y_02 = coopMultiplyAdd(x_0, w_2, y_02);
                    y_03 = coopMultiplyAdd(x_0, w_3, y_03);
                    y_12 = coopMultiplyAdd(x_1, w_2, y_12);
                    y_13 = coopMultiplyAdd(x_1, w_3, y_13);
                }
            }
        }
        let own = Own(lane, part, first_part, subgroups, split, splits, first);
        write(y_00, 0u, 0u, own);
        write(y_01, 0u, 1u, own);
        write(y_10, 1u, 0u, own);
        write(y_11, 1u, 1u, own);
        if WIDE == 4u {
            write(y_02, 0u, 2u, own);
            write(y_03, 0u, 3u, own);
            write(y_12, 1u, 2u, own);
            write(y_13, 1u, 3u, own);
        }
    }
}
