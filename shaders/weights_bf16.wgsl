// Weights in bfloat16, two numbers a word, the first in the low half. Rows follow each other, and are whole fours.

@group(0) @binding(1) var<storage, read_write> w: array<vec2<u32>>;

// Four numbers of a row that begins with that number: those from 4 c on.
fn w_at(at: u32, c: u32, stride: u32) -> vec4<f32> {
    let words = w[at / 4u + c];
    return bitcast<vec4<f32>>(vec4(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
}
