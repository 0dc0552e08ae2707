// y = x / sqrt(mean(x^2) + eps) * w over rows of x; sums and quotient in f32. One workgroup per row.

alias elem = f32;

struct Info {
    rows: u32,
    hidden: u32,
    // Row r of x is [r / tokens, r % tokens].
    tokens: u32,
    // 1: multiply by 1 + w in f32, then round. 0: round, then multiply by w.
    scale_then_cast: u32,
    x_strides: vec3<u32>,
    eps: f32,
    w_stride: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> w: array<elem>;
@group(0) @binding(2) var<storage, read_write> y: array<elem>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;

var<workgroup> sums: array<f32, LANES>;

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
        let value = f32(x[x_row + i * info.x_strides.z]);
        sum += value * value;
    }
    sums[lane] = sum;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            sums[lane] += sums[lane + left];
        }
    }
    workgroupBarrier();
    let rms = sqrt(sums[0] / f32(info.hidden) + info.eps);

    let y_row = row * info.hidden;
    for (var i = lane; i < info.hidden; i += LANES) {
        let normal = f32(x[x_row + i * info.x_strides.z]) / rms;
        let weight = w[i * info.w_stride];
        if info.scale_then_cast == 1u {
            y[y_row + i] = elem(normal * (1.0 + f32(weight)));
        } else {
            y[y_row + i] = elem(normal) * weight;
        }
    }
}
