// Puts together what attention_decode made of parts of the keys. One workgroup a vector of the result.

alias elem = f32;

struct Info {
    vectors: u32,
    splits: u32,
    head_dim: u32,
}

// [vectors, splits, head_dim + 2]: sums of values, the largest score, the sum of weights. Where the last is 0, nothing
// was seen, and nothing else was written.
@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
@group(0) @binding(1) var<storage, read_write> y: array<elem>;
@group(0) @binding(2) var<uniform> info: Info;

const LANES = 256u;
const LOWEST = -3.4028234e38;

var<workgroup> largest: array<f32, LANES>;
var<workgroup> sums: array<f32, LANES>;
var<workgroup> weights: array<f32, LANES>;
var<workgroup> numbers: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let vector = group.x + group.y * groups.x;
    if vector >= info.vectors {
        return;
    }
    let dim = info.head_dim;
    let at = vector * info.splits * (dim + 2u);
    // There are no more parts than lanes.
    var most = LOWEST;
    var sum = 0.0;
    if lane < info.splits {
        let i = at + lane * (dim + 2u) + dim;
        sum = parts[i + 1u];
        if sum != 0.0 {
            most = parts[i];
        }
    }
    largest[lane] = most;
    workgroupBarrier();
    var all = LOWEST;
    for (var i = 0u; i < info.splits; i++) {
        all = max(all, largest[i]);
    }
    let weight = select(exp(most - all), 0.0, sum == 0.0);
    weights[lane] = weight;
    sums[lane] = weight * sum;
    workgroupBarrier();

    // Lanes share the parts where there are more lanes than numbers.
    let shares = LANES / dim;
    var number = 0.0;
    if lane < shares * dim {
        for (var i = lane / dim; i < info.splits; i += shares) {
            if weights[i] != 0.0 {
                number += weights[i] * parts[at + i * (dim + 2u) + lane % dim];
            }
        }
    }
    numbers[lane] = number;
    workgroupBarrier();
    if lane < dim {
        for (var i = 1u; i < shares; i++) {
            number += numbers[i * dim + lane];
        }
        var total = 0.0;
        for (var i = 0u; i < info.splits; i++) {
            total += sums[i];
        }
        // What sees nothing is 0.
        y[vector * dim + lane] = elem(select(number / total, 0.0, total == 0.0));
    }
}
