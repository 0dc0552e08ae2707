// Weights with the number type of x, which are read as x is.

@group(0) @binding(1) var<storage, read_write> w: array<pack>;

// Four elements of a row that begins at the offset `at`: the first or second vec4 of a pair. Past the end of
// the row, they are any of its elements.
fn w_at(at: u32, pair: u32, second: u32, stride: u32) -> vec4<f32> {
    let c = 2u * pair + second;
    if WIDTH == 4u {
        return vec4<f32>(vec4(w[at / 4u + c]));
    }
    let i = places(c, stride) + at;
    return vec4<f32>(vec4(vec4(w[i.x]).x, vec4(w[i.y]).x, vec4(w[i.z]).x, vec4(w[i.w]).x));
}

// Four columns of the four rows that begin at the offsets `at`: the first or second vec4 of a pair.
fn columns_at(at: vec4<u32>, pair: u32, second: u32, stride: u32) -> mat4x4<f32> {
    return transpose(mat4x4(
        w_at(at.x, pair, second, stride),
        w_at(at.y, pair, second, stride),
        w_at(at.z, pair, second, stride),
        w_at(at.w, pair, second, stride),
    ));
}
