// Dequantizes the rows of a packed weight: a lane has half a run of four rows. With weights_packed.wgsl.

alias elem = f32;

struct Info {
    rows: u32,
    // Number of elements per row, and of words per row.
    input: u32,
    words: u32,
}

@group(0) @binding(0) var<storage, read_write> y: array<vec4<elem>>;
@group(0) @binding(2) var<uniform> info: Info;

// The lookup table.
var<workgroup> sums: array<vec4<f32>, 4>;

// Writes four elements of each of four rows.
fn write(first_row: u32, c: u32, columns: mat4x4<f32>, group: Group) {
    let fours = info.input / 4u;
    if c >= fours {
        return;
    }
    // With minimums, products are exact: it does not matter whether they are rounded before the sum.
    let rows = transpose(mat4x4(
        (columns[0] - group.offset) * group.scale + group.minimum,
        (columns[1] - group.offset) * group.scale + group.minimum,
        (columns[2] - group.offset) * group.scale + group.minimum,
        (columns[3] - group.offset) * group.scale + group.minimum,
    ));
    let at = first_row * fours + c;
    y[at] = vec4<elem>(rows[0]);
    if first_row + 1u < info.rows {
        y[at + fours] = vec4<elem>(rows[1]);
    }
    if first_row + 2u < info.rows {
        y[at + 2u * fours] = vec4<elem>(rows[2]);
    }
    if first_row + 3u < info.rows {
        y[at + 3u * fours] = vec4<elem>(rows[3]);
    }
}

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    write_table(lane);
    let i = (group.x + group.y * groups.x) * 256u + lane;
    let halves = (info.input + 31u) / 32u * 2u;
    let first_row = i / halves * 4u;
    if first_row >= info.rows {
        return;
    }
    let run = i % halves / 2u;
    let part = i % 2u;
    // Rows past the last one are replaced by the last one.
    let weights = min(vec4(first_row) + vec4(0u, 1u, 2u, 3u), vec4(info.rows - 1u)) * info.words;
    let codes = codes_of_half(weights, run, part);
    let c = run * 8u + part * 2u;
    let first = columns_of_pair(codes.first);
    let second = columns_of_pair(codes.second);
    let of_first = group_at(weights, run, 0u);
    let of_second = group_at(weights, run, 1u);
    write(first_row, c, first.first, of_first);
    write(first_row, c + 1u, first.second, of_first);
    write(first_row, c + 4u, second.first, of_second);
    write(first_row, c + 5u, second.second, of_second);
}
