// Unpacks float16 numbers as the device does: both of each word. With halves.wgsl.

struct Info {
    words: u32,
}

@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read_write> w: array<u32>;
@group(0) @binding(2) var<uniform> info: Info;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_id) lane: vec3<u32>) {
    let i = lane.x;
    if i >= info.words {
        return;
    }
    y[2u * i] = lower_halves(vec4(w[i])).x;
    y[2u * i + 1u] = upper_halves(vec4(w[i])).x;
}
