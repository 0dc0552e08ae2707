// How expert_tiles.wgsl reads packed weights into memory: half a run of each row at a time, which has two pairs of fours, 16 numbers apart. A
// lane reads that of four rows. With weights_packed.wgsl.

// A table.
var<workgroup> sums: array<vec4<f32>, 4>;

// Where a row ends, counted as `c` of read_weights.
fn end_of_row() -> u32 {
    return (info.input + 31u) / 32u * 8u;
}

// Which four of a row is in memory in that place, of the half of a run that is the next from c on.
fn four_of(c: u32, i: u32) -> u32 {
    return c / 8u * 8u + c % 8u / 2u + i / 2u * 4u + i % 2u;
}

// Writes a four of each of four rows, ACROSS apart.
fn write_rows(at: u32, columns: mat4x4<f32>, group: Group) {
    let rows = transpose(mat4x4(
        (columns[0] - group.offset) * group.scale + group.minimum,
        (columns[1] - group.offset) * group.scale + group.minimum,
        (columns[2] - group.offset) * group.scale + group.minimum,
        (columns[3] - group.offset) * group.scale + group.minimum,
    ));
    weights[at] = rows[0];
    weights[at + ACROSS] = rows[1];
    weights[at + 2u * ACROSS] = rows[2];
    weights[at + 3u * ACROSS] = rows[3];
}

// Reads the half of a run from c on of rows of the matrix that begins with the row `matrix`.
fn read_weights(matrix: u32, first_output: u32, c: u32, fours: u32, lane: u32) {
    if lane >= ACROSS {
        return;
    }
    // Those beyond the last row are the last.
    let own = min(vec4(first_output + lane) + vec4(0u, 1u, 2u, 3u) * ACROSS, vec4(info.output - 1u));
    let at = (own + vec4(matrix)) * info.w_strides.x;
    let half = c / 4u;
    let codes = codes_of_half(at, half);
    let first = columns_of_pair(codes.first);
    let second = columns_of_pair(codes.second);
    let of_first = group_at(at, half, 0u);
    let of_second = group_at(at, half, 1u);
    write_rows(lane, first.first, of_first);
    write_rows(OUTPUTS + lane, first.second, of_first);
    write_rows(2u * OUTPUTS + lane, second.first, of_second);
    write_rows(3u * OUTPUTS + lane, second.second, of_second);
}
