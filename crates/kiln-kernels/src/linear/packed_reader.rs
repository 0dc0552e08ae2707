//! Reads packed weights in `#[cube]` functions: the words of `kiln_weights::streams`, row after row, like
//! `shaders/weights_packed.wgsl`.
//!
//! The unit is half a run of 32 numbers: two pairs of fours, 16 numbers apart. For 4-bit codes, these are
//! both halves of two words. On CUDA, both halves of a run are read together. The format is known when a
//! kernel is compiled.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use half::f16;
use kiln_weights::{
    Format,
    streams::{GroupScales, ScaleType, Streams, Table},
};

use crate::{
    linear::fours::{Four, four, four_or_zero},
    runtime::{half::half_number, launch::is_cuda},
};

/// Numbers in half a run.
const HALF_RUN: usize = 16;

/// The number that [`nibble`] returns for the code 0 in the lower half of a byte.
const FIRST: f32 = 16.0;

/// The bits of the number 1, which [`read_four`] takes. As a parameter of a kernel, they stay in a register.
/// If they were a constant, CUDA's assembler would move them into a register for each code.
pub(crate) const ONE: u32 = 1f32.to_bits();

/// Entries of a table that codes index.
pub(crate) const TABLE: usize = 16;

/// Number of runs in a row of `input` numbers. A row of bfloat16 may end within the last one.
pub(crate) fn runs_of(input: usize) -> usize {
    input.div_ceil(2 * HALF_RUN)
}

/// Number of half runs in a row of `input` numbers.
pub(crate) fn halves_of(input: usize) -> usize {
    2 * runs_of(input)
}

/// The compile-time parameters of a kernel that reads packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Reading {
    pub(crate) format: Format,
    /// Whether the device is CUDA, which converts float16 without integer arithmetic, and reads 16 bytes at
    /// once.
    pub(crate) is_cuda: bool,
    /// Whether codes of four bits become numbers with half the shifts. Codes of the first pair are then read
    /// as `16 + code / 16`, and sums in float32 lose four bits.
    pub(crate) few_shifts: bool,
}

impl Reading {
    pub(crate) fn new(format: Format, words: &CubeTensor, few_shifts: bool) -> Self {
        Self { format, is_cuda: is_cuda(words), few_shifts }
    }

    /// The layout of blocks in words; `None` if a word has two bfloat16 numbers.
    pub(crate) fn streams(self) -> Option<Streams> {
        self.format.streams()
    }

    /// Whether 16 bytes are read at once. Rows of words begin at multiples of that, and so do vectors, which
    /// have whole runs. Those for bfloat16 weights may not.
    fn is_wide(self) -> bool {
        self.is_cuda && self.streams().is_some()
    }

    /// Number of words that are read for half a run: first those with low bits of codes, then those with high
    /// bits.
    pub(crate) fn words(self) -> usize {
        self.low_words() + self.streams().map_or(0, |streams| words_of(streams.high))
    }

    fn low_words(self) -> usize {
        self.streams().map_or(HALF_RUN / 2, |streams| words_of(streams.low))
    }

    /// Bits per code.
    fn bits(self) -> u32 {
        self.streams().map_or(0, |streams| streams.low + streams.high) as u32
    }

    /// The table that codes index, if the format has one.
    pub(crate) fn table(self) -> Option<[f32; TABLE]> {
        self.streams().and_then(|streams| streams.table).map(Table::numbers)
    }

    /// Whether [`read_four`] returns codes, rather than numbers from a table or bfloat16 numbers.
    pub(crate) fn reads_codes(self) -> bool {
        self.streams().is_some() && self.table().is_none()
    }

    /// Factor between the scale of a group and the scale of the numbers that [`read_four`] returns.
    pub(crate) fn steps(self) -> f32 {
        if self.reads_codes() { (1u32 << self.bits()) as f32 } else { 1.0 }
    }

    /// Whether [`nibble`] reads the codes.
    fn has_nibbles(self) -> bool {
        self.few_shifts && self.reads_codes() && self.streams().is_some_and(|s| (s.low, s.high) == (4, 0))
    }

    /// Whether numbers are `scale · (read - zero) · steps`, with a constant for `zero`.
    pub(crate) fn is_symmetric(self) -> bool {
        let has_zeros = |streams: Streams| streams.groups == GroupScales::Zeros;
        self.reads_codes() && self.streams().is_some_and(|s| !s.has_minimum && !has_zeros(s))
    }

    /// Whether numbers are codes with other zeros or with minimums.
    pub(crate) fn has_shifts(self) -> bool {
        self.reads_codes() && !self.is_symmetric()
    }

    /// The value that [`read_four`] returns for the code 0 of a pair.
    pub(crate) fn base(self, pair: usize) -> f32 {
        if self.has_nibbles() && pair == 0 { FIRST } else { 1.0 }
    }

    /// The value that [`read_four`] returns for the number 0 of a pair, in formats without minimum and zero
    /// point.
    pub(crate) fn zero(self, pair: usize) -> f32 {
        let offset = self.streams().map_or(0, |streams| streams.offset);
        if self.reads_codes() { self.base(pair) + f32::from(offset) / self.steps() } else { 0.0 }
    }
}

/// Number of words in half a run of a stream with `bits` bits per code.
fn words_of(bits: usize) -> usize {
    match bits {
        8 => 4,
        4 | 2 => 2,
        1 => 1,
        _ => 0,
    }
}

/// The word among those from [`read_stream`] that contains a four, and the shift of the four within each
/// byte.
fn place_of(bits: usize, pair: usize, four: usize) -> (usize, usize) {
    match bits {
        8 => (2 * pair + four, 0),
        4 => (four, 4 * pair),
        2 => (pair, 2 * four),
        _ => (0, 4 * pair + four),
    }
}

/// A mask of the lowest bits in each byte of a word.
pub(crate) fn mask(bits: usize) -> u32 {
    0x0101_0101 * ((1 << bits) - 1)
}

/// The parameters of a pair of fours. A number is `scale · (read - zero) · steps + minimum`, where `read` is
/// the result of [`read_four`].
#[derive(CubeType)]
pub(crate) struct Group {
    pub(crate) scale: f32,
    pub(crate) zero: f32,
    pub(crate) minimum: f32,
}

/// Reads the codes of half a run, in the row that begins with the word `at`.
#[cube]
pub(crate) fn read_words(
    w: &Tensor<u32>,
    at: usize,
    half: usize,
    input: usize,
    #[comptime] reading: Reading,
) -> Array<u32> {
    let mut words = Array::<u32>::new(comptime!(reading.words()));
    match comptime!(reading.streams()) {
        Some(streams) => {
            read_stream(&mut words, 0usize, w, at, half, comptime!(streams.low));
            let start = at + input / 32 * comptime!(streams.low);
            read_stream(
                &mut words,
                comptime!(words_of(streams.low)),
                w,
                start,
                half,
                comptime!(streams.high),
            );
        }
        None => {
            let first = half / 2 * 16 + half % 2 * 4;
            #[unroll]
            for i in 0..8usize {
                // A row may end within its last run.
                let word = first + comptime!(i / 4 * 8 + i % 4);
                let is_there = word < input / 2;
                words[i] = select(is_there, w[at + select(is_there, word, 0)], 0u32);
            }
        }
    }
    words
}

/// Reads half a run from the stream that begins with the word `start` and has `bits` bits per code.
#[cube]
fn read_stream(
    words: &mut Array<u32>,
    #[comptime] place: usize,
    w: &Tensor<u32>,
    start: usize,
    half: usize,
    #[comptime] bits: usize,
) {
    let (run, part) = (half / 2, half % 2);
    if comptime!(bits == 8) {
        #[unroll]
        for i in 0..4usize {
            words[comptime!(place + i)] = w[start + run * 8 + part * 2 + comptime!(i / 2 * 4 + i % 2)];
        }
    } else if comptime!(bits == 4) {
        #[unroll]
        for i in 0..2usize {
            words[comptime!(place + i)] = w[start + run * 4 + part * 2 + i];
        }
    } else if comptime!(bits == 2) {
        #[unroll]
        for i in 0..2usize {
            words[comptime!(place + i)] = w[start + run * 2 + i] >> u32::cast_from(part * 4);
        }
    } else if comptime!(bits == 1) {
        words[place] = w[start + run] >> u32::cast_from(part * 2);
    }
}

/// Reads the codes of a run: those of [`read_words`] for its first half, then for its second.
#[cube]
pub(crate) fn read_run(
    halves: &mut Sequence<Array<u32>>,
    w: &Tensor<u32>,
    at: usize,
    run: usize,
    input: usize,
    #[comptime] reading: Reading,
) {
    match comptime!(if reading.is_wide() { reading.streams() } else { None }) {
        Some(streams) => {
            let mut first = Array::<u32>::new(comptime!(reading.words()));
            let mut second = Array::<u32>::new(comptime!(reading.words()));
            let place = comptime!(words_of(streams.low));
            let start = at + input / 32 * comptime!(streams.low);
            read_run_of_stream(&mut first, &mut second, 0usize, w, at, run, comptime!(streams.low));
            read_run_of_stream(&mut first, &mut second, place, w, start, run, comptime!(streams.high));
            halves.push(first);
            halves.push(second);
        }
        None => {
            halves.push(read_words(w, at, 2 * run, input, reading));
            halves.push(read_words(w, at, 2 * run + 1, input, reading));
        }
    }
}

/// Reads both halves of a run from a stream like [`read_stream`], with one load or two.
#[cube]
fn read_run_of_stream(
    first: &mut Array<u32>,
    second: &mut Array<u32>,
    #[comptime] place: usize,
    w: &Tensor<u32>,
    start: usize,
    run: usize,
    #[comptime] bits: usize,
) {
    if comptime!(bits >= 4) {
        let fours = w.as_slice().as_vectorized().with_vector_size::<Const<4>>();
        let loads = comptime!(bits / 4);
        #[unroll]
        for load in 0..loads {
            let four = fours[start / 4 + run * loads + load];
            #[unroll]
            for i in 0..2usize {
                first[comptime!(place + 2 * load + i)] = four.extract(i);
                second[comptime!(place + 2 * load + i)] = four.extract(comptime!(i + 2));
            }
        }
    } else if comptime!(bits == 2) {
        let two = w.as_slice().as_vectorized().with_vector_size::<Const<2>>()[start / 2 + run];
        #[unroll]
        for i in 0..2usize {
            first[comptime!(place + i)] = two.extract(i);
            second[comptime!(place + i)] = two.extract(i) >> 4u32;
        }
    } else if comptime!(bits == 1) {
        let word = w[start + run];
        first[place] = word;
        second[place] = word >> 2u32;
    }
}

/// Returns four neighbouring numbers of what was read, from the first or second pair of fours. Codes are in
/// the first bits of a mantissa, `1 + code / 2^bits`, which takes no conversion; with `few_shifts`, those of
/// the first pair may be `16 + code / 16`. Numbers of a table are in the first places of `table`.
#[cube]
pub(crate) fn read_four(
    words: &Array<u32>,
    table: &Shared<[f32]>,
    #[comptime] pair: usize,
    #[comptime] four: usize,
    one: u32,
    #[comptime] reading: Reading,
) -> Four {
    let mut numbers = Four::new(0.0);
    match comptime!(reading.streams()) {
        Some(streams) => {
            let (low, high) = comptime!((streams.low, streams.high));
            let (low_word, low_shift) = comptime!(place_of(streams.low, pair, four));
            let mut word = words[low_word];
            // The first bit of the first code.
            let first = comptime!(if streams.high == 0 { low_shift as u32 } else { 0 });
            if comptime!(high > 0) {
                let (high_word, high_shift) = comptime!(place_of(streams.high, pair, four));
                let above = words[comptime!(reading.low_words() + high_word)];
                word = ((word >> comptime!(low_shift as u32)) & comptime!(mask(low)))
                    | (((above >> comptime!(high_shift as u32)) & comptime!(mask(high)))
                        << comptime!(low as u32));
            }
            #[unroll]
            for i in 0..4usize {
                let bit = comptime!(8 * i as u32 + first);
                if comptime!(reading.has_nibbles()) {
                    numbers.insert(i, nibble(word, i, pair, one));
                } else if comptime!(reading.reads_codes()) {
                    numbers.insert(i, in_mantissa(word, bit, comptime!(reading.bits()), one));
                } else {
                    numbers.insert(i, table[usize::cast_from((word >> bit) & 15u32)]);
                }
            }
        }
        None =>
        {
            #[unroll]
            for i in 0..4usize {
                let word = words[comptime!(4 * pair + 2 * four + i / 2)];
                let bits = if comptime!(i % 2 == 0) { word << 16u32 } else { word & 0xffff_0000u32 };
                numbers.insert(i, f32::reinterpret(bits));
            }
        }
    }
    numbers
}

/// `1 + code / 2^bits`, for the code that begins at bit `from` of a word.
#[cube]
fn in_mantissa(word: u32, #[comptime] from: u32, #[comptime] bits: u32, one: u32) -> f32 {
    let to = comptime!(23 - bits);
    let moved = if comptime!(from > to) {
        word >> comptime!(from.saturating_sub(to))
    } else {
        word << comptime!(to.saturating_sub(from))
    };
    f32::reinterpret((moved & comptime!(((1u32 << bits) - 1) << (23 - bits))) | one)
}

/// `16 + code / 16` for the code in the lower half of byte `i` of a word, or `1 + code / 16` for the upper
/// half. A shift serves both halves.
#[cube]
fn nibble(word: u32, #[comptime] i: usize, #[comptime] pair: usize, one: u32) -> f32 {
    let from = comptime!(8 * i as u32);
    let moved = if comptime!(from > 15) {
        word >> comptime!(from.saturating_sub(15))
    } else {
        word << comptime!(15u32.saturating_sub(from))
    };
    let (mask, above) = comptime!(match pair {
        0 => (15u32 << 15, FIRST.to_bits() - ONE),
        _ => (15u32 << 19, 0),
    });
    f32::reinterpret((moved & mask) | (one + above))
}

/// Reads the group of the first or second pair of fours in half a run.
#[cube]
pub(crate) fn read_group(
    w: &Tensor<u32>,
    at: usize,
    half: usize,
    #[comptime] pair: usize,
    input: usize,
    #[comptime] reading: Reading,
) -> Group {
    let mut scale = f32::new(1.0);
    let mut zero = f32::new(comptime!(reading.zero(pair)));
    let mut minimum = f32::new(0.0);
    #[allow(clippy::single_match, reason = "it is decided when the kernel is compiled")]
    match comptime!(reading.streams()) {
        Some(streams) => {
            let block = half / comptime!(streams.block / HALF_RUN);
            let group = if comptime!(streams.group < 32) {
                half / 2 * 2 + comptime!(pair)
            } else {
                half / comptime!(streams.group / HALF_RUN)
            };
            let scales = at + input / 32 * comptime!(streams.low + streams.high);
            // Number of words for the scales of groups, or for their minimums.
            let each = (input / comptime!(streams.group)).div_ceil(4);
            let bytes = comptime!(match streams.groups {
                GroupScales::One => 0,
                GroupScales::Signed | GroupScales::Nibbles | GroupScales::Zeros => 1,
                GroupScales::Bytes => 2,
            });
            let of_blocks = scales + each * bytes;
            let mut of_group = f32::new(1.0);
            let mut of_minimum = f32::new(1.0);
            if comptime!(streams.groups == GroupScales::Signed) {
                of_group = f32::cast_from(byte_at(w, scales, group) ^ 128u32) - 128.0;
            } else if comptime!(streams.groups == GroupScales::Bytes) {
                of_group = f32::cast_from(byte_at(w, scales, group));
                of_minimum = -f32::cast_from(byte_at(w, scales + each, group));
            } else if comptime!(streams.groups == GroupScales::Nibbles) {
                let both = byte_at(w, scales, group);
                of_group = f32::cast_from(both & 15u32);
                of_minimum = -f32::cast_from(both >> 4u32);
            } else if comptime!(streams.groups == GroupScales::Zeros) {
                let code = f32::cast_from(byte_at(w, scales, group));
                zero = code * comptime!(1.0 / reading.steps()) + comptime!(reading.base(pair));
            }
            if comptime!(streams.scale == ScaleType::F32) {
                scale = f32::reinterpret(w[of_blocks + block]);
            } else if comptime!(streams.has_minimum) {
                let halves = w[of_blocks + block];
                scale = float_of(halves & 0xffffu32, reading) * of_group;
                minimum = float_of(halves >> 16u32, reading) * of_minimum;
            } else {
                let halves = w[of_blocks + block / 2] >> u32::cast_from(block % 2 * 16);
                scale = float_of(halves & 0xffffu32, reading) * of_group;
            }
        }
        None => {}
    }
    Group { scale, zero, minimum }
}

/// Returns byte `i` of a stream that begins with the word `start`.
#[cube]
fn byte_at(w: &Tensor<u32>, start: usize, i: usize) -> u32 {
    (w[start + i / 4] >> u32::cast_from(i % 4 * 8)) & 255u32
}

/// Converts a 16-bit scale. CUDA's conversion keeps subnormal numbers, however its arithmetic treats them; on
/// devices without float16, integers are used.
#[cube]
fn float_of(bits: u32, #[comptime] reading: Reading) -> f32 {
    if comptime!(reading.streams().is_some_and(|streams| streams.scale == ScaleType::Bf16)) {
        f32::reinterpret(bits << 16u32)
    } else if comptime!(reading.is_cuda) {
        f32::cast_from(f16::reinterpret(u16::cast_from(bits)))
    } else {
        half_number(bits)
    }
}

/// Writes the table of a format into the first places of memory. Then all lanes wait.
#[cube]
pub(crate) fn write_table(memory: &mut Shared<[f32]>, #[comptime] reading: Reading) {
    if comptime!(reading.table().is_some()) {
        let lane = UNIT_POS as usize;
        let mut own = f32::new(0.0);
        #[unroll]
        for i in 0..TABLE {
            let number = comptime!(reading.table().map_or(0.0, |table| table[i]));
            own = select(lane == i, number, own);
        }
        if lane < TABLE {
            memory[lane] = own;
        }
        sync_cube();
    }
}

/// Reads the eight numbers of a vector from 4 c on, where c is even, like two of [`four_at`].
#[cube]
pub(crate) fn eight_at<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    input: usize,
    #[comptime] reading: Reading,
) -> (Four, Four) {
    if comptime!(reading.is_wide()) {
        let eights = tensor.as_slice().with_vector_size::<Const<8>>();
        let eight = eights[at / 8 + c / 2];
        let (mut first, mut second) = (Four::new(0.0), Four::new(0.0));
        #[unroll]
        for i in 0..4usize {
            first.insert(i, f32::cast_from(eight.extract(i)));
            second.insert(i, f32::cast_from(eight.extract(comptime!(i + 4))));
        }
        (first, second)
    } else {
        let first = four_at::<E, N>(tensor, at, c, input, reading);
        let second = four_at::<E, N>(tensor, at, c + 1, input, reading);
        (first, second)
    }
}

/// Reads four numbers of a vector. Rows of bfloat16 may end within half a run; numbers past the end are 0.
#[cube]
pub(crate) fn four_at<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    input: usize,
    #[comptime] reading: Reading,
) -> Four {
    if comptime!(reading.streams().is_some()) {
        four::<E, N>(tensor, at, c, 1usize, input)
    } else {
        four_or_zero::<E, N>(tensor, at, c, 1usize, input)
    }
}
