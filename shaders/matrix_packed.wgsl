// Loads packed weights into workgroup memory for linear_tiles.wgsl: four elements of four rows at a time.
// Sixteen elements of a step are half a run: two pairs of vec4s, 16 elements apart. With weights_packed.wgsl.

// The lookup table.
var<workgroup> sums: array<vec4<f32>, 4>;

// Whether codes become numbers two at a time, as float16: 1024 + code has the bits of the code. The two are
// those of the first and third byte of a word, or of the second and fourth.
const IN_PAIRS = TABLE == PLAIN && LOW <= 8u;

// Each subgroup that shares a part multiplies 16 elements, and each lane has something to read.
const STEP = 16u * max(SPLITS, LANES / OUTPUTS);

// Number of vec4s in a row's step, and how many of them, for four rows each, a lane reads.
const FOURS = STEP / 4u;
const QUARTER = OUTPUTS / 4u;
const W_EACH = (QUARTER * FOURS + LANES - 1u) / LANES;

// The words that a lane has read: those with the low and the high bits of codes, or two of bfloat16, and
// those of their group.
struct Words {
    low: vec4<u32>,
    high: vec4<u32>,
    group: GroupWords,
}

// The rows that a lane reads, and the words that it has read.
alias Rows = array<vec4<u32>, W_EACH>;
alias Read = array<Words, W_EACH>;

// The place in a row of eight elements of a step.
fn place_of(step: u32, eight: u32) -> u32 {
    let half = step * (STEP / 16u) + eight / 2u;
    return half / 2u * 4u + eight % 2u * 2u + half % 2u;
}

// Four elements of x in the order of those of weights.
fn as_weights(four: vec4<elem>) -> vec4<elem> {
    if IN_PAIRS {
        return four.xzyw;
    }
    return four;
}

fn rows_of_lane(first_output: u32, lane: u32) -> Rows {
    var rows: Rows;
    for (var i = 0u; i < W_EACH; i++) {
        let own = vec4(first_output + (lane + i * LANES) / FOURS) + vec4(0u, 1u, 2u, 3u) * QUARTER;
        // Rows past the last one are replaced by the last one.
        rows[i] = min(own, vec4(info.output - 1u)) * info.w_strides.x;
    }
    return rows;
}

// The place of a vec4 in a row: its run, which half, which pair, and which of the pair.
struct Place {
    run: u32,
    part: u32,
    pair: u32,
    four: u32,
}

// The place of a lane's vec4. After the end of a row, it is in the last half of the last run: x is 0 there.
fn place_of_lane(step: u32, lane: u32) -> Place {
    let halves = (info.input + 31u) / 32u * 2u;
    let four = lane % FOURS;
    let half = min(step * (STEP / 16u) + four / 4u, halves - 1u);
    return Place(half / 2u, half % 2u, four % 4u / 2u, four % 2u);
}

// The words of a stream with `bits` bits per code.
fn words_of_four(start: vec4<u32>, bits: u32, at: Place) -> vec4<u32> {
    if bits == 8u {
        return words_at(start, at.run * 8u + at.part * 2u + at.pair * 4u + at.four);
    } else if bits == 4u {
        return words_at(start, at.run * 4u + at.part * 2u + at.four);
    } else if bits == 2u {
        return words_at(start, at.run * 2u + at.pair);
    } else if bits == 1u {
        return words_at(start, at.run);
    }
    return vec4(0u);
}

// Four codes, one per byte, of these words.
fn codes_of_four(words: vec4<u32>, bits: u32, at: Place) -> vec4<u32> {
    if bits == 4u {
        return (words >> vec4(4u * at.pair)) & vec4(0x0f0f0f0fu);
    } else if bits == 2u {
        return (words >> vec4(4u * at.part + 2u * at.four)) & vec4(0x03030303u);
    } else if bits == 1u {
        return (words >> vec4(2u * at.part + 4u * at.pair + at.four)) & vec4(0x01010101u);
    }
    return words;
}

// Reads a lane's words of a step.
fn read_weights(read: ptr<function, Read>, rows: ptr<function, Rows>, step: u32, lane: u32) {
    let at = place_of_lane(step, lane);
    for (var i = 0u; i < W_EACH; i++) {
        let row = (*rows)[i];
        if LOW == 16u {
            let word = at.run * 16u + at.part * 4u + at.pair * 8u + at.four * 2u;
            (*read)[i].low = bf16_at(row, word);
            (*read)[i].high = bf16_at(row, word + 1u);
        } else {
            (*read)[i].low = words_of_four(row, LOW, at);
            (*read)[i].high = words_of_four(row + vec4(info.input / 32u * LOW), HIGH, at);
        }
        (*read)[i].group = group_words(row, at.run, at.pair);
    }
}

// Two numbers of a row: with their scale, and with what is added then.
fn pair_of(codes: u32, scale: f32, shift: f32) -> vec2<elem> {
    let numbers = unpack2x16float((codes & 0x00ff00ffu) | 0x64006400u);
    return vec2<elem>(fma(numbers, vec2(scale), vec2(shift)));
}

// The numbers of four rows that were read.
fn numbers_of_words(words: Words, at: Place) -> array<vec4<elem>, 4> {
    let group = group_of(words.group, at.run, at.pair);
    let codes = codes_of_four(words.low, LOW, at) | (codes_of_four(words.high, HIGH, at) << vec4(LOW));
    var numbers: array<vec4<elem>, 4>;
    if IN_PAIRS {
        // To add 1024 costs ten bits of float32, which has 13 more than float16.
        let shifts = group.minimum - (group.offset + 1024.0) * group.scale;
        for (var r = 0u; r < 4u; r++) {
            let first = pair_of(codes[r], group.scale[r], shifts[r]);
            numbers[r] = vec4(first, pair_of(codes[r] >> 8u, group.scale[r], shifts[r]));
        }
        return numbers;
    }
    var columns: mat4x4<f32>;
    if LOW == 16u {
        columns = columns_of_bf16(words.low, words.high);
    } else {
        columns = columns_of(codes);
    }
    let rows = transpose(mat4x4(
        (columns[0] - group.offset) * group.scale + group.minimum,
        (columns[1] - group.offset) * group.scale + group.minimum,
        (columns[2] - group.offset) * group.scale + group.minimum,
        (columns[3] - group.offset) * group.scale + group.minimum,
    ));
    for (var r = 0u; r < 4u; r++) {
        numbers[r] = vec4<elem>(rows[r]);
    }
    return numbers;
}

// Writes their numbers to the tile.
fn write_weights(read: ptr<function, Read>, step: u32, lane: u32) {
    let at = place_of_lane(step, lane);
    for (var i = 0u; i < W_EACH; i++) {
        let row = (lane + i * LANES) / FOURS;
        if row < QUARTER {
            var numbers = numbers_of_words((*read)[i], at);
            for (var r = 0u; r < 4u; r++) {
                let cells = (row + r * QUARTER) * STRIDE + lane % FOURS * CELLS;
                for (var j = 0u; j < CELLS; j++) {
                    w_tile[cells + j] = cell_of(numbers[r], j);
                }
            }
        }
    }
}
