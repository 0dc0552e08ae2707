// Combines the results of attention_decode for parts of the keys. A lane computes four numbers of a vector.

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
// Parts that are read at once: their loads do not wait for each other.
const AT_ONCE = 4u;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let dim = info.head_dim;
    let splits = info.splits;
    let columns = (dim + 3u) / 4u;
    let i = (group.x + group.y * groups.x) * LANES + lane;
    let vector = i / columns;
    if vector >= info.vectors {
        return;
    }
    let width = dim + 2u;
    let first = vector * splits * width;

    var largest = LOWEST;
    if SINKS {
        largest = sinks[vector / info.queries % info.heads * info.sink_stride];
    }
    let sink = largest;
    for (var base = 0u; base < splits; base += AT_ONCE) {
        var scores: array<f32, AT_ONCE>;
        for (var u = 0u; u < AT_ONCE; u++) {
            let part = first + min(base + u, splits - 1u) * width;
            scores[u] = select(parts[part + dim], LOWEST, parts[part + dim + 1u] == 0.0);
        }
        for (var u = 0u; u < AT_ONCE; u++) {
            largest = max(largest, scores[u]);
        }
    }

    // The parts are added in order, so that a part without visible keys changes nothing.
    var numbers = vec4<f32>();
    var total = 0.0;
    if SINKS {
        total = exp(sink - largest);
    }
    // A lane has every `columns`-th number. Indices past the last one read the last one.
    let at = min(vec4(i % columns) + vec4(0u, 1u, 2u, 3u) * columns, vec4(dim - 1u));
    for (var base = 0u; base < splits; base += AT_ONCE) {
        var weights: array<f32, AT_ONCE>;
        var sums: array<f32, AT_ONCE>;
        var vectors: array<vec4<f32>, AT_ONCE>;
        for (var u = 0u; u < AT_ONCE; u++) {
            let part = first + min(base + u, splits - 1u) * width;
            sums[u] = parts[part + dim + 1u];
            let is_seen = base + u < splits && sums[u] != 0.0;
            weights[u] = select(0.0, exp(parts[part + dim] - largest), is_seen);
            let places = part + at;
            vectors[u] = vec4(parts[places.x], parts[places.y], parts[places.z], parts[places.w]);
        }
        for (var u = 0u; u < AT_ONCE; u++) {
            if weights[u] != 0.0 {
                numbers += weights[u] * vectors[u];
                total += weights[u] * sums[u];
            }
        }
    }
    // The result of a row that sees no keys is 0.
    let scale = select(1.0 / total, 0.0, total == 0.0);
    for (var k = 0u; k < 4u; k++) {
        let d = i % columns + k * columns;
        if d < dim {
            y[vector * dim + d] = elem(numbers[k] * scale);
        }
    }
}
