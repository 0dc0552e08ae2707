// The numbers of words of two bfloat16 numbers, the first in the low half.

alias elem = f32;

struct Info {
    words: u32,
}

@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@group(0) @binding(1) var<storage, read_write> y: array<vec2<f32>>;
@group(0) @binding(2) var<uniform> info: Info;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    if i < info.words {
        y[i] = bitcast<vec2<f32>>(vec2(words[i] << 16u, words[i] & 0xffff0000u));
    }
}
