// Rotates pairs of elements of every head by the angle of its token, and copies the elements after them.
// One invocation per pair or copied element.

alias elem = f32;

struct Info {
    // [batch, heads, tokens, head_dim]. y has the same shape and is contiguous.
    x_strides: vec4<u32>,
    // [1 or batch, tokens, pairs]; the first stride is 0 if all sequences share their angles.
    cos_strides: vec3<u32>,
    heads: u32,
    sin_strides: vec3<u32>,
    tokens: u32,
    head_dim: u32,
    pairs: u32,
    // Pair i is (i * pair_stride, i * pair_stride + pair_width).
    pair_stride: u32,
    pair_width: u32,
    invocations: u32,
}

@group(0) @binding(0) var<storage, read_write> x: array<elem>;
@group(0) @binding(1) var<storage, read_write> cosines: array<f32>;
@group(0) @binding(2) var<storage, read_write> sines: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<elem>;
@group(0) @binding(4) var<uniform> info: Info;

const LANES = 256u;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let invocation = (group.x + group.y * groups.x) * LANES + lane;
    if invocation >= info.invocations {
        return;
    }
    let places = info.head_dim - info.pairs;
    let place = invocation % places;
    let vector = invocation / places;
    let token = vector % info.tokens;
    let head = vector / info.tokens % info.heads;
    let batch = vector / info.tokens / info.heads;
    let x_vector = batch * info.x_strides.x + head * info.x_strides.y + token * info.x_strides.z;
    let y_vector = vector * info.head_dim;

    if place >= info.pairs {
        let i = place + info.pairs;
        y[y_vector + i] = x[x_vector + i * info.x_strides.w];
        return;
    }
    let cosine = cosines[dot(vec3(batch, token, place), info.cos_strides)];
    let sine = sines[dot(vec3(batch, token, place), info.sin_strides)];
    // The tables are rounded to the type of x, the result once.
    let c = f32(elem(cosine));
    let s = f32(elem(sine));
    let i = place * info.pair_stride;
    let first = f32(x[x_vector + i * info.x_strides.w]);
    let second = f32(x[x_vector + (i + info.pair_width) * info.x_strides.w]);
    y[y_vector + i] = elem(first * c - second * s);
    y[y_vector + i + info.pair_width] = elem(second * c + first * s);
}
