// Loads dense weights into workgroup memory for expert_tiles.wgsl and linear_many.wgsl.

@group(0) @binding(1) var<storage, read_write> w: array<pack>;

// Dense weights need no table.
fn write_table(lane: u32) {}

// The end of a row, in units of `c` of read_weights.
fn end_of_row() -> u32 {
    return (info.input + 3u) / 4u;
}

// The index of the vec4 of a row that is in memory at place `i`, if the vec4s from `c` on are loaded.
fn four_of(c: u32, i: u32) -> u32 {
    return c + i;
}

fn w_at(at: u32, c: u32) -> vec4<f32> {
    if WIDTH == 4u {
        return vec4<f32>(vec4(w[at / 4u + c]));
    }
    let i = places(c, info.w_strides.y) + at;
    return vec4<f32>(vec4(vec4(w[i.x]).x, vec4(w[i.y]).x, vec4(w[i.z]).x, vec4(w[i.w]).x));
}

// Loads the vec4s from `c` on of rows of the matrix that begins at row `matrix`.
fn read_weights(matrix: u32, first_output: u32, c: u32, fours: u32, lane: u32) {
    for (var i = lane; i < FOURS * OUTPUTS; i += LANES) {
        // Rows past the last one are replaced by the last one.
        let row = matrix + min(first_output + i / FOURS, info.output - 1u);
        var numbers = vec4(0.0);
        if c + i % FOURS < fours {
            numbers = w_at(row * info.w_strides.x, c + i % FOURS);
        }
        weights[i % FOURS * OUTPUTS + i / FOURS] = numbers;
    }
}
