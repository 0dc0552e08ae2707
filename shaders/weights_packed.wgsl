// Weights in words. A row of them has the low bits of all codes, the high bits, the scales of groups, the minimums of groups, and the scale of
// each block, with its minimum if it has one; each begins with a word. A run of 32 codes has eight fours. What follows is of bfloat16, two
// numbers a word.

// Numbers of a block and of a group, bits of a code, how a group's scale is stored, whether there are minimums, what is subtracted from codes,
// and what they stand for.
const BLOCK = 8u; const GROUP = 8u; const LOW = 16u; const HIGH = 0u; const SCALES = ONE; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;

// The block is one group; signed bytes; bytes, with as many for minimums; four bits each for scale and minimum.
const ONE = 0u;
const SIGNED = 1u;
const BYTES = 2u;
const NIBBLES = 3u;

// Codes are numbers; places in the table of IQ4_NL; floats of 4 bits, twice as large, with a bfloat16 as scale.
const PLAIN = 0u;
const NON_LINEAR = 1u;
const E2M1 = 2u;

@group(0) @binding(1) var<storage, read_write> w: array<u32>;

// A byte of a stream that begins with that word.
fn byte_at(start: u32, i: u32) -> u32 {
    return extractBits(w[start + i / 4u], i % 4u * 8u, 8u);
}

// Four codes of a stream of so many bits each: one in each byte.
fn codes_at(start: u32, bits: u32, run: u32, four: u32) -> u32 {
    if bits == 8u {
        return w[start + run * 8u + four];
    } else if bits == 4u {
        return (w[start + run * 4u + four % 4u] >> (four / 4u * 4u)) & 0x0f0f0f0fu;
    } else if bits == 2u {
        return (w[start + run * 2u + four / 4u] >> (four % 4u * 2u)) & 0x03030303u;
    }
    return (w[start + run] >> four) & 0x01010101u;
}

// What a place in the table stands for: bytes of words, increased by 128.
fn non_linear(code: u32) -> f32 {
    const TABLE_0 = vec4(0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u);
    return f32(extractBits(TABLE_0[code / 4u], code % 4u * 8u, 8u)) - 128.0;
}

// 2, 1 and 0.5 are 4, 2 and 1 here.
fn e2m1(code: u32) -> f32 {
    let exponent = (code >> 1u) & 3u;
    let size = select((2u + (code & 1u)) << (exponent - min(exponent, 1u)), code & 1u, exponent == 0u);
    return select(f32(size), -f32(size), code >= 8u);
}

// Four numbers of a row that begins with that word: the first or second four of a pair of fours.
fn w_at(at: u32, pair: u32, second: u32, stride: u32) -> vec4<f32> {
    if LOW == 16u {
        let words = vec2(w[at + 4u * pair + 2u * second], w[at + 4u * pair + 2u * second + 1u]);
        return bitcast<vec4<f32>>(vec4(words.x << 16u, words.x & 0xffff0000u, words.y << 16u, words.y & 0xffff0000u));
    }
    let run = pair / 4u;
    let four = pair % 4u * 2u + second;
    let group = pair / (GROUP / 8u);
    let block = pair / (BLOCK / 8u);
    let high_start = at + info.input / 32u * LOW;
    var start = high_start + info.input / 32u * HIGH;
    var bytes = codes_at(at, LOW, run, four);
    if HIGH > 0u {
        bytes |= codes_at(high_start, HIGH, run, four) << LOW;
    }
    let codes = vec4(bytes & 0xffu, (bytes >> 8u) & 0xffu, (bytes >> 16u) & 0xffu, bytes >> 24u);
    var numbers = vec4<f32>(codes) - OFFSET;
    if TABLE == NON_LINEAR {
        numbers = vec4(non_linear(codes.x), non_linear(codes.y), non_linear(codes.z), non_linear(codes.w));
    } else if TABLE == E2M1 {
        numbers = vec4(e2m1(codes.x), e2m1(codes.y), e2m1(codes.z), e2m1(codes.w));
    }
    // The scale of the group and its minimum, as factors of those of the block.
    var factors = vec2(1.0, 1.0);
    if SCALES != ONE {
        let byte = byte_at(start, group);
        let words = info.input / GROUP / 4u;
        if SCALES == SIGNED {
            factors.x = f32(extractBits(bitcast<i32>(w[start + group / 4u]), group % 4u * 8u, 8u));
        } else if SCALES == BYTES {
            factors = vec2(f32(byte), -f32(byte_at(start + words, group)));
            start += words;
        } else {
            factors = vec2(f32(byte & 15u), -f32(byte >> 4u));
        }
        start += words;
    }
    if HAS_MINIMUM {
        let of_block = unpack2x16float(w[start + block]) * factors;
        return numbers * of_block.x + of_block.y;
    }
    let two = w[start + block / 2u];
    if TABLE == E2M1 {
        return numbers * bitcast<f32>(select(two << 16u, two & 0xffff0000u, block % 2u == 1u));
    }
    let scales = unpack2x16float(two);
    return numbers * (select(scales.x, scales.y, block % 2u == 1u) * factors.x);
}
