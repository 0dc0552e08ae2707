// y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over rows of x, in f32. One workgroup per row.

alias elem = f32;

struct Info {
    x_strides: vec3<u32>,
    eps: f32,
    rows: u32,
    hidden: u32,
    // Row r of x is [r / tokens, r % tokens].
    tokens: u32,
    w_stride: u32,
    b_stride: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> w: array<elem>;
@group(0) @binding(2) var<storage, read_write> b: array<elem>;
@group(0) @binding(3) var<storage, read_write> y: array<elem>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;

var<workgroup> sums: array<f32, LANES>;

// The sum of one number per lane.
fn sum_of_lanes(number: f32, lane: u32) -> f32 {
    // All lanes have read the previous contents.
    workgroupBarrier();
    sums[lane] = number;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            sums[lane] += sums[lane + left];
        }
    }
    workgroupBarrier();
    return sums[0];
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if row >= info.rows {
        return;
    }
    let x_row = row / info.tokens * info.x_strides.x + row % info.tokens * info.x_strides.y;

    var sum = 0.0;
    for (var i = lane; i < info.hidden; i += LANES) {
        sum += f32(x[x_row + i * info.x_strides.z]);
    }
    let mean = sum_of_lanes(sum, lane) / f32(info.hidden);
    var squares = 0.0;
    for (var i = lane; i < info.hidden; i += LANES) {
        let value = f32(x[x_row + i * info.x_strides.z]) - mean;
        squares += value * value;
    }
    let deviation = sqrt(sum_of_lanes(squares, lane) / f32(info.hidden) + info.eps);

    let y_row = row * info.hidden;
    for (var i = lane; i < info.hidden; i += LANES) {
        let normal = (f32(x[x_row + i * info.x_strides.z]) - mean) / deviation;
        y[y_row + i] = elem(normal * f32(w[i * info.w_stride]) + f32(b[i * info.b_stride]));
    }
}
