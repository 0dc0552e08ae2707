// The numbers of a packed weight's rows, four at a time. With weights_packed.wgsl.

alias elem = f32;

struct Info {
    rows: u32,
    // Numbers of a row, and its words.
    input: u32,
    words: u32,
}

@group(0) @binding(0) var<storage, read_write> y: array<vec4<elem>>;
@group(0) @binding(2) var<uniform> info: Info;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let i = (group.x + group.y * groups.x) * 256u + lane;
    let fours = info.input / 4u;
    if i < info.rows * fours {
        let four = i % fours;
        y[i] = vec4<elem>(w_at(i / fours * info.words, four / 2u, four % 2u, 1u));
    }
}
