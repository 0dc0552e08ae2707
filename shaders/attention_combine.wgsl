// Combines the results of attention_decode for parts of the keys. One workgroup per vector of the result.

alias elem = f32;
// Whether there is a key more for each head, whose value is 0.
const SINKS = false;

struct Info {
    vectors: u32,
    splits: u32,
    heads: u32,
    queries: u32,
    head_dim: u32,
    sink_stride: u32,
}

// [vectors, splits, head_dim + 2]: sums of values, the largest score, the sum of weights. If that sum is 0,
// the part saw no keys, and the other elements are not initialized.
@group(0) @binding(0) var<storage, read_write> parts: array<f32>;
// [heads]: the scores of such keys.
@group(0) @binding(1) var<storage, read_write> sinks: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<elem>;
@group(0) @binding(3) var<uniform> info: Info;

const LANES = 256u;
const LOWEST = -3.4028234e38;

var<workgroup> largest: array<f32, LANES>;
var<workgroup> sums: array<f32, LANES>;
var<workgroup> weights: array<f32, LANES>;
var<workgroup> shared_splits: u32;

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
    if lane == 0u {
        shared_splits = info.splits;
    }
    let splits = workgroupUniformLoad(&shared_splits);
    let dim = info.head_dim;
    let at = vector * splits * (dim + 2u);
    var sink = LOWEST;
    if SINKS {
        sink = sinks[vector / info.queries % info.heads * info.sink_stride];
    }
    var most = sink;
    for (var i = lane; i < splits; i += LANES) {
        let part = at + i * (dim + 2u) + dim;
        if parts[part + 1u] != 0.0 {
            most = max(most, parts[part]);
        }
    }
    largest[lane] = most;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            largest[lane] = max(largest[lane], largest[lane + left]);
        }
    }
    workgroupBarrier();
    let all = largest[0];

    // The parts are added in order, so that a part without visible keys changes nothing.
    var number = 0.0;
    var total = 0.0;
    if SINKS {
        total = exp(sink - all);
    }
    for (var base = 0u; base < splits; base += LANES) {
        let count = min(splits - base, LANES);
        var weight = 0.0;
        var sum = 0.0;
        if lane < count {
            let part = at + (base + lane) * (dim + 2u) + dim;
            sum = parts[part + 1u];
            if sum != 0.0 {
                weight = exp(parts[part] - all);
                sum *= weight;
            }
        }
        weights[lane] = weight;
        sums[lane] = sum;
        workgroupBarrier();
        if lane < dim {
            for (var i = 0u; i < count; i++) {
                if weights[i] != 0.0 {
                    number += weights[i] * parts[at + (base + i) * (dim + 2u) + lane];
                    total += sums[i];
                }
            }
        }
        workgroupBarrier();
    }
    if lane < dim {
        // The result of a row that sees no keys is 0.
        let scale = select(1.0 / total, 0.0, total == 0.0);
        y[vector * dim + lane] = elem(number * scale);
    }
}
