// Weights whose numbers are of the type of x, and are read as those of x are.

@group(0) @binding(1) var<storage, read_write> w: array<pack>;

// Four numbers of a row that begins there: the first or second four of a pair of fours. What is beyond its end is any of it.
fn w_at(at: u32, pair: u32, second: u32, stride: u32) -> vec4<f32> {
    let c = 2u * pair + second;
    if WIDTH == 4u {
        return vec4<f32>(vec4(w[at / 4u + c]));
    }
    let i = places(c, stride) + at;
    return vec4<f32>(vec4(vec4(w[i.x]).x, vec4(w[i.y]).x, vec4(w[i.z]).x, vec4(w[i.w]).x));
}

// Four columns of four rows, which begin there: the first or the second of the fours of a pair.
fn columns_at(at: vec4<u32>, pair: u32, second: u32, stride: u32) -> mat4x4<f32> {
    return transpose(mat4x4(
        w_at(at.x, pair, second, stride),
        w_at(at.y, pair, second, stride),
        w_at(at.z, pair, second, stride),
        w_at(at.w, pair, second, stride),
    ));
}
