// Weights packed into words. A row consists of the low bits of all codes, the high bits, the scales of
// groups, the minimums of groups, and the scale of each block, with its minimum if it has one. Each of these
// streams begins at a word. A read covers half a run of 32 elements of four rows: two pairs of vec4s, 16
// elements apart. For codes of four bits, these are both halves of two words. The code below for bfloat16 has
// two numbers per word. With halves.wgsl.

// Elements per block and per group; bits per code; storage of a group's scale; type of a block's scale;
// whether there are minimums; the number that is subtracted from codes; and the meaning of codes.
const BLOCK = 32u; const GROUP = 32u; const LOW = 16u; const HIGH = 0u; const SCALES = ONE; const SCALE = F16; const HAS_MINIMUM = false; const OFFSET = 0.0; const TABLE = PLAIN;

// The block is one group; signed bytes; bytes, with as many for minimums; four bits each for scale and
// minimum; a block that is one group has a byte that is subtracted from codes.
const ONE = 0u;
const SIGNED = 1u;
const BYTES = 2u;
const NIBBLES = 3u;
const ZEROS = 4u;

// Types of scales.
const F16 = 0u;
const BF16 = 1u;
const F32 = 2u;

// Codes are numbers, or indices into a table: that of IQ4_NL, of MXFP4 (floats of 4 bits, twice as large), or
// of bitsandbytes.
const PLAIN = 0u;
const NON_LINEAR = 1u;
const E2M1 = 2u;
const NF4 = 3u;
const FP4 = 4u;

@group(0) @binding(1) var<storage, read_write> w: array<u32>;

// Words of four rows.
fn words_at(at: vec4<u32>, i: u32) -> vec4<u32> {
    return vec4(w[at.x + i], w[at.y + i], w[at.z + i], w[at.w + i]);
}

// The codes of two vec4s of each row, one per byte; or the words in which both pairs of half a run have them.
struct Pair {
    first: vec4<u32>,
    second: vec4<u32>,
}

// The words of a stream with `bits` bits per code that both pairs of half a run need.
fn words_of_half(start: vec4<u32>, bits: u32, run: u32, part: u32) -> Pair {
    if bits == 4u {
        return Pair(words_at(start, run * 4u + part * 2u), words_at(start, run * 4u + part * 2u + 1u));
    } else if bits == 2u {
        let shift = vec4(part * 4u);
        return Pair(words_at(start, run * 2u) >> shift, words_at(start, run * 2u + 1u) >> shift);
    } else if bits == 1u {
        return Pair(words_at(start, run) >> vec4(part * 2u), vec4(0u));
    }
    return Pair(vec4(0u), vec4(0u));
}

// Codes of a stream, for the first or second pair of half a run.
fn codes_of_pair(start: vec4<u32>, bits: u32, run: u32, part: u32, pair: u32, words: Pair) -> Pair {
    if bits == 8u {
        let word = run * 8u + part * 2u + pair * 4u;
        return Pair(words_at(start, word), words_at(start, word + 1u));
    } else if bits == 4u {
        let shift = vec4(4u * pair);
        return Pair((words.first >> shift) & vec4(0x0f0f0f0fu), (words.second >> shift) & vec4(0x0f0f0f0fu));
    } else if bits == 2u {
        let word = select(words.first, words.second, pair == 1u);
        return Pair(word & vec4(0x03030303u), (word >> vec4(2u)) & vec4(0x03030303u));
    }
    let word = words.first >> vec4(4u * pair);
    return Pair(word & vec4(0x01010101u), (word >> vec4(1u)) & vec4(0x01010101u));
}

// Writes the table to the first places of `sums`, where lanes can read different entries at once. Then all
// lanes wait.
fn write_table(lane: u32) {
    if TABLE == PLAIN {
        return;
    }
    if lane == 0u {
        if TABLE == NON_LINEAR {
            sums[0] = vec4(-127.0, -104.0, -83.0, -65.0);
            sums[1] = vec4(-49.0, -35.0, -22.0, -10.0);
            sums[2] = vec4(1.0, 13.0, 25.0, 38.0);
            sums[3] = vec4(53.0, 69.0, 89.0, 113.0);
        } else if TABLE == E2M1 {
            sums[0] = vec4(0.0, 1.0, 2.0, 3.0);
            sums[1] = vec4(4.0, 6.0, 8.0, 12.0);
            sums[2] = vec4(0.0, -1.0, -2.0, -3.0);
            sums[3] = vec4(-4.0, -6.0, -8.0, -12.0);
        } else if TABLE == NF4 {
            sums[0] = vec4(-1.0, -0.6961928, -0.52507305, -0.3949175);
            sums[1] = vec4(-0.28444138, -0.18477343, -0.091050036, 0.0);
            sums[2] = vec4(0.0795803, 0.1609302, 0.2461123, 0.33791524);
            sums[3] = vec4(0.44070983, 0.562617, 0.72295684, 1.0);
        } else {
            sums[0] = vec4(0.0, 0.0052083335, 0.6666667, 1.0);
            sums[1] = vec4(0.33333334, 0.5, 0.16666667, 0.25);
            sums[2] = vec4(0.0, -0.0052083335, -0.6666667, -1.0);
            sums[3] = vec4(-0.33333334, -0.5, -0.16666667, -0.25);
        }
    }
    workgroupBarrier();
}

fn entry(code: u32) -> f32 {
    return sums[code / 4u][code % 4u];
}

// The values of one code per row, before scaling.
fn numbers_of(codes: vec4<u32>) -> vec4<f32> {
    if TABLE != PLAIN {
        return vec4(entry(codes.x), entry(codes.y), entry(codes.z), entry(codes.w));
    }
    return vec4<f32>(codes);
}

// The columns of four codes of each row.
fn columns_of(bytes: vec4<u32>) -> mat4x4<f32> {
    return mat4x4(
        numbers_of(bytes & vec4(0xffu)),
        numbers_of((bytes >> vec4(8u)) & vec4(0xffu)),
        numbers_of((bytes >> vec4(16u)) & vec4(0xffu)),
        numbers_of(bytes >> vec4(24u)),
    );
}

fn columns_of_bf16(words: vec4<u32>, next: vec4<u32>) -> mat4x4<f32> {
    let high = vec4(0xffff0000u);
    return mat4x4(
        bitcast<vec4<f32>>(words << vec4(16u)),
        bitcast<vec4<f32>>(words & high),
        bitcast<vec4<f32>>(next << vec4(16u)),
        bitcast<vec4<f32>>(next & high),
    );
}

// A pair of vec4s of each row as read: codes, one per byte; for bfloat16, four words.
struct Codes {
    first: vec4<u32>,
    second: vec4<u32>,
    third: vec4<u32>,
    fourth: vec4<u32>,
}

// Half a run of each row as read.
struct Half {
    first: Codes,
    second: Codes,
}

fn codes_of_half(at: vec4<u32>, run: u32, part: u32) -> Half {
    if LOW == 16u {
        let word = run * 16u + part * 4u;
        return Half(
            Codes(bf16_at(at, word), bf16_at(at, word + 1u), bf16_at(at, word + 2u), bf16_at(at, word + 3u)),
            Codes(bf16_at(at, word + 8u), bf16_at(at, word + 9u), bf16_at(at, word + 10u), bf16_at(at, word + 11u)),
        );
    }
    let high_start = at + vec4(info.input / 32u * LOW);
    let low_words = words_of_half(at, LOW, run, part);
    var first = codes_of_pair(at, LOW, run, part, 0u, low_words);
    var second = codes_of_pair(at, LOW, run, part, 1u, low_words);
    if HIGH > 0u {
        let words = words_of_half(high_start, HIGH, run, part);
        let high_first = codes_of_pair(high_start, HIGH, run, part, 0u, words);
        let high_second = codes_of_pair(high_start, HIGH, run, part, 1u, words);
        first = Pair(first.first | (high_first.first << vec4(LOW)), first.second | (high_first.second << vec4(LOW)));
        second = Pair(second.first | (high_second.first << vec4(LOW)), second.second | (high_second.second << vec4(LOW)));
    }
    let none = vec4(0u);
    return Half(Codes(first.first, first.second, none, none), Codes(second.first, second.second, none, none));
}

// Two elements of each row. A row may end within a run; elements past its end are 0.
fn bf16_at(at: vec4<u32>, word: u32) -> vec4<u32> {
    let words = info.input / 2u;
    return select(vec4(0u), words_at(at, min(word, words - 1u)), word < words);
}

// Columns of two vec4s of each row.
struct Columns {
    first: mat4x4<f32>,
    second: mat4x4<f32>,
}

// Elements before scaling.
fn columns_of_pair(codes: Codes) -> Columns {
    if LOW == 16u {
        return Columns(columns_of_bf16(codes.first, codes.second), columns_of_bf16(codes.third, codes.fourth));
    }
    return Columns(columns_of(codes.first), columns_of(codes.second));
}

// A group of elements of each row: (code - offset) scale + minimum.
struct Group {
    scale: vec4<f32>,
    minimum: vec4<f32>,
    offset: vec4<f32>,
}

// The words of a group's parameters: those with the bytes of its scale and of its minimum, and the word of
// the block's scale.
struct GroupWords {
    scale: vec4<u32>,
    minimum: vec4<u32>,
    block: vec4<u32>,
}

// A run is in one group, or each of its halves is one.
fn group_of_pair(run: u32, pair: u32) -> u32 {
    return select(run / (max(GROUP, 32u) / 32u), run * 2u + pair, GROUP == 16u);
}

// Reads the words of the group of the first or second pair of half a run.
fn group_words(at: vec4<u32>, run: u32, pair: u32) -> GroupWords {
    let none = vec4(0u);
    if LOW == 16u {
        return GroupWords(none, none, none);
    }
    let group = group_of_pair(run, pair);
    let block = run / (BLOCK / 32u);
    var start = at + vec4(info.input / 32u * (LOW + HIGH));
    var scale = none;
    var minimum = none;
    if SCALES != ONE {
        let words = vec4((info.input / GROUP + 3u) / 4u);
        scale = words_at(start, group / 4u);
        start += words;
        if SCALES == BYTES {
            minimum = words_at(start, group / 4u);
            start += words;
        }
    }
    if SCALE == F32 || HAS_MINIMUM {
        return GroupWords(scale, minimum, words_at(start, block));
    }
    return GroupWords(scale, minimum, words_at(start, block / 2u));
}

// The group that has these words.
fn group_of(words: GroupWords, run: u32, pair: u32) -> Group {
    if LOW == 16u {
        return Group(vec4(1.0), vec4(0.0), vec4(0.0));
    }
    let shift = vec4(group_of_pair(run, pair) % 4u * 8u);
    let bytes = (words.scale >> shift) & vec4(0xffu);
    // The scale of the group and its minimum, as factors of those of the block.
    var scale = vec4(1.0);
    var minimum = vec4(1.0);
    var offset = vec4(OFFSET);
    if SCALES == SIGNED {
        scale = vec4<f32>(bitcast<vec4<i32>>(bytes << vec4(24u)) >> vec4(24u));
    } else if SCALES == BYTES {
        scale = vec4<f32>(bytes);
        minimum = -vec4<f32>((words.minimum >> shift) & vec4(0xffu));
    } else if SCALES == ZEROS {
        offset = vec4<f32>(bytes);
    } else if SCALES == NIBBLES {
        scale = vec4<f32>(bytes & vec4(15u));
        minimum = -vec4<f32>(bytes >> vec4(4u));
    }
    if SCALE == F32 {
        return Group(bitcast<vec4<f32>>(words.block), vec4(0.0), offset);
    }
    if HAS_MINIMUM {
        return Group(lower_halves(words.block) * scale, upper_halves(words.block) * minimum, offset);
    }
    let half = words.block >> vec4(run / (BLOCK / 32u) % 2u * 16u);
    if SCALE == BF16 {
        return Group(bitcast<vec4<f32>>(half << vec4(16u)), vec4(0.0), offset);
    }
    return Group(lower_halves(half) * scale, vec4(0.0), offset);
}

// The group of the first or second pair of half a run.
fn group_at(at: vec4<u32>, run: u32, pair: u32) -> Group {
    return group_of(group_words(at, run, pair), run, pair);
}
