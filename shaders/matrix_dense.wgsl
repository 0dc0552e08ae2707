// Loads dense weights into workgroup memory for linear_tiles.wgsl.

@group(0) @binding(1) var<storage, read_write> w: array<pack>;

// Each subgroup that shares a part multiplies 16 elements.
const STEP = 16u * SPLITS;

// Number of groups of eight elements that a lane reads in a step.
const W_EACH = (OUTPUTS * EIGHTS + LANES - 1u) / LANES;

// The rows that a lane reads, and the elements that it has read.
alias Rows = array<u32, W_EACH>;
alias Read = array<Eight, W_EACH>;

// Dense weights need no table.
fn write_table(lane: u32) {}

// The place in a row of eight elements of a step.
fn place_of(step: u32, eight: u32) -> u32 {
    return step * EIGHTS + eight;
}

// Four elements of x in the order of those of weights.
fn as_weights(four: vec4<elem>) -> vec4<elem> {
    return four;
}

fn rows_of_lane(first_output: u32, lane: u32) -> Rows {
    var rows: Rows;
    for (var i = 0u; i < W_EACH; i++) {
        // Rows past the last one are replaced by the last one.
        rows[i] = min(first_output + (lane + i * LANES) / EIGHTS, info.output - 1u) * info.w_strides.x;
    }
    return rows;
}

fn w_four(at: u32, c: u32) -> vec4<elem> {
    let i = places(c, info.w_strides.y) + at;
    let numbers = vec4<elem>(vec4(w[i.x]).x, vec4(w[i.y]).x, vec4(w[i.z]).x, vec4(w[i.w]).x);
    return select(vec4<elem>(), numbers, is_in_row(c));
}

// Like x_at.
fn w_at(at: u32, e: u32) -> Eight {
    if WIDTH == 8u {
        let i = 2u * (at / 8u + min(e, info.input / 8u - 1u));
        return Eight(vec4<elem>(vec4(w[i])), vec4<elem>(vec4(w[i + 1u])));
    }
    return Eight(w_four(at, 8u * e), w_four(at, 8u * e + 4u));
}

// Reads a lane's elements of a step.
fn read_weights(read: ptr<function, Read>, rows: ptr<function, Rows>, step: u32, lane: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        (*read)[i] = w_at((*rows)[i], place_of(step, lane % EIGHTS));
    }
}

// Writes them to the tile.
fn write_weights(read: ptr<function, Read>, step: u32, lane: u32) {
    for (var i = 0u; i < W_EACH; i++) {
        let row = (lane + i * LANES) / EIGHTS;
        if row < OUTPUTS {
            let at = row * STRIDE + lane % EIGHTS * 2u * CELLS;
            for (var j = 0u; j < CELLS; j++) {
                w_tile[at + j] = cell_of((*read)[i].low, j);
            }
            for (var j = 0u; j < CELLS; j++) {
                w_tile[at + CELLS + j] = cell_of((*read)[i].high, j);
            }
        }
    }
}
