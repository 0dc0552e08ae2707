// Unpacking of float16 numbers from words.

// Whether the device unpacks subnormal numbers correctly, rather than as 0. Scales of small weights are
// subnormal.
const KEEPS_SUBNORMALS = true;

// The smallest normal float16 number.
const NORMAL = 6.103515625e-5;

// The numbers in the lower halves of words.
fn lower_halves(words: vec4<u32>) -> vec4<f32> {
    if KEEPS_SUBNORMALS {
        return vec4(
            unpack2x16float(words.x).x,
            unpack2x16float(words.y).x,
            unpack2x16float(words.z).x,
            unpack2x16float(words.w).x,
        );
    }
    return halves_by_integers(words);
}

// The numbers in the upper halves of words.
fn upper_halves(words: vec4<u32>) -> vec4<f32> {
    if KEEPS_SUBNORMALS {
        return vec4(
            unpack2x16float(words.x).y,
            unpack2x16float(words.y).y,
            unpack2x16float(words.z).y,
            unpack2x16float(words.w).y,
        );
    }
    return halves_by_integers(words >> vec4(16u));
}

fn halves_by_integers(words: vec4<u32>) -> vec4<f32> {
    let size = bitcast<vec4<f32>>(((words & vec4(0x7fffu)) << vec4(13u)) + vec4(0x38000000u));
    // Subnormal numbers have no implicit leading 1, and the exponent of the smallest normal numbers. All of
    // this is exact.
    let number = select(size, fma(size, vec4(2.0), vec4(-NORMAL)), size < vec4(NORMAL));
    return bitcast<vec4<f32>>(bitcast<vec4<u32>>(number) | ((words & vec4(0x8000u)) << vec4(16u)));
}
