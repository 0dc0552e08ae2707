// Rounds rows of x to signed bytes for linear_bytes.wgsl, with one scale for each run of 32 elements. x may
// be normalized first. One workgroup per row; a lane has a run.

alias elem = f32;
// Whether x is normalized.
const NORMED = false;

struct Info {
    rows: u32,
    input: u32,
    eps: f32,
    // Added to the scales of the norm.
    shift: f32,
}

@group(0) @binding(0) var<storage, read_write> x: array<vec4<elem>>;
// Factors for the elements of x, if x is normalized.
@group(0) @binding(1) var<storage, read_write> scales: array<vec4<elem>>;
// Two vectors for each run.
@group(0) @binding(2) var<storage, read_write> bytes: array<vec4<u32>>;
// For each run its scale, and the sums of the first and of the second 16 elements.
@group(0) @binding(3) var<storage, read_write> runs: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;

var<workgroup> sums: array<f32, LANES>;

// Elements c to c + 3 of a row that begins at vector `at`, before the division by their root mean square.
fn four_at(at: u32, c: u32) -> vec4<f32> {
    let four = vec4<f32>(x[at + c]);
    if NORMED {
        return four * (vec4<f32>(scales[c]) + info.shift);
    }
    return four;
}

// The root mean square of a row.
fn root_of(at: u32, lane: u32) -> f32 {
    var sum = 0.0;
    for (var c = lane; c < info.input / 4u; c += LANES) {
        let four = vec4<f32>(x[at + c]);
        sum += dot(four, four);
    }
    sums[lane] = sum;
    for (var left = LANES / 2u; left > 0u; left /= 2u) {
        workgroupBarrier();
        if lane < left {
            sums[lane] += sums[lane + left];
        }
    }
    workgroupBarrier();
    return sqrt(sums[0] / f32(info.input) + info.eps);
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
    let at = row * (info.input / 4u);
    var root = 1.0;
    if NORMED {
        root = root_of(at, lane);
    }
    let of_row = info.input / 32u;
    for (var run = lane; run < of_row; run += LANES) {
        // The bits of numbers without their sign are in the order of the numbers, and those of NaN are last.
        var most = vec4(0u);
        for (var i = 0u; i < 8u; i++) {
            most = max(most, bitcast<vec4<u32>>(four_at(at, 8u * run + i)) & vec4(0x7fffffffu));
        }
        let largest = bitcast<f32>(max(max(most.x, most.y), max(most.z, most.w)));
        // Where the reciprocal would be too large, bytes are 0.
        let factor = select(0.0, 127.0 / largest, largest > 1e-30);
        var words: array<vec4<u32>, 2>;
        var halves = vec2(0);
        for (var i = 0u; i < 8u; i++) {
            let rounded = vec4<i32>(round(four_at(at, 8u * run + i) * factor));
            let low = rounded & vec4(255);
            words[i / 4u][i % 4u] = u32(low.x | (low.y << 8u) | (low.z << 16u) | (low.w << 24u));
            halves[i / 4u] += rounded.x + rounded.y + rounded.z + rounded.w;
        }
        let scale = largest / 127.0 / root;
        let to = row * of_row + run;
        bytes[2u * to] = words[0];
        bytes[2u * to + 1u] = words[1];
        runs[to] = vec4(vec3(1.0, vec2<f32>(halves)) * scale, 0.0);
    }
}
