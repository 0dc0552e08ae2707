// Loads packed weights into workgroup memory for expert_tiles.wgsl and linear_many.wgsl: half a run of
// each row at a time, which has two pairs of vec4s, 16 elements apart. A lane loads half a run of four rows.
// With weights_packed.wgsl.

// The lookup table.
var<workgroup> sums: array<vec4<f32>, 4>;

// The end of a row, in units of `c` of read_weights.
fn end_of_row() -> u32 {
    return (info.input + 31u) / 32u * 8u;
}

// The index of the vec4 of a row that is in memory at place `i`, if half a run from `c` on is loaded.
fn four_of(c: u32, i: u32) -> u32 {
    return c / 8u * 8u + c % 8u / 2u + i / 2u * 4u + i % 2u;
}

// Number of lanes that load rows.
const QUARTER = OUTPUTS / 4u;

// Writes one vec4 of each of four rows, QUARTER apart.
fn write_rows(at: u32, columns: mat4x4<f32>, group: Group) {
    let rows = transpose(mat4x4(
        (columns[0] - group.offset) * group.scale + group.minimum,
        (columns[1] - group.offset) * group.scale + group.minimum,
        (columns[2] - group.offset) * group.scale + group.minimum,
        (columns[3] - group.offset) * group.scale + group.minimum,
    ));
    weights[at] = rows[0];
    weights[at + QUARTER] = rows[1];
    weights[at + 2u * QUARTER] = rows[2];
    weights[at + 3u * QUARTER] = rows[3];
}

// Loads half a run from `c` on of rows of the matrix that begins at row `matrix`.
fn read_weights(matrix: u32, first_output: u32, c: u32, fours: u32, lane: u32) {
    if lane >= QUARTER {
        return;
    }
    // Rows past the last one are replaced by the last one.
    let own = min(vec4(first_output + lane) + vec4(0u, 1u, 2u, 3u) * QUARTER, vec4(info.output - 1u));
    let at = (own + vec4(matrix)) * info.w_strides.x;
    let run = c / 8u;
    let codes = codes_of_half(at, run, c / 4u % 2u);
    let first = columns_of_pair(codes.first);
    let second = columns_of_pair(codes.second);
    let of_first = group_at(at, run, 0u);
    let of_second = group_at(at, run, 1u);
    write_rows(lane, first.first, of_first);
    write_rows(OUTPUTS + lane, first.second, of_first);
    write_rows(2u * OUTPUTS + lane, second.first, of_second);
    write_rows(3u * OUTPUTS + lane, second.second, of_second);
}
