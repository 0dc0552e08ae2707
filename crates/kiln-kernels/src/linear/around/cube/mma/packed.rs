//! Packed weights. Factors are codes and x, which 16-bit types hold, and sums of a group are scaled in
//! float32.
//!
//! Lane 4 e + q has the quads q and q + 4 of each run of 32 numbers. These are its parts of two products,
//! each along 16 numbers. As lanes read 16 bytes of a row at once, and each needs words of all runs in them,
//! words pass through memory of the warp.

use cubecl::prelude::*;
use half::{bf16, f16};
use kiln_weights::{
    Format,
    streams::{GroupScales, Table},
};

use super::{
    Info, OF_LANE, OWN, Product, QUARTERS, Tile, Two, begins_of, multiply, no_sums_of_warp,
    norm::{self, powers_of, scaled, write_norms},
    place_of, vectors_of, write_results,
};
use crate::{
    linear::packed_reader::{Reading, TABLE, mask, read_group, write_table},
    runtime::{
        launch::{LANES, write_permutation},
        tensor_cores::WARP,
    },
};

/// Numbers in a run.
const RUN: usize = 32;

/// Numbers of a row that a warp reads in a turn of the loop, if weights of the format are codes.
pub(super) fn turn_of(format: Format) -> Option<usize> {
    format.streams().map(|streams| RUN * runs_of_turn(streams.low))
}

/// Runs of a row that a warp reads in a turn of the loop.
fn runs_of_turn(low: usize) -> usize {
    if low == 8 { 2 } else { 4 }
}

impl Tile {
    /// Bits of an integer that are in the mantissa of a number `first + integer`.
    fn bits(self) -> u32 {
        if self.brain { 7 } else { 10 }
    }

    /// The number whose mantissa is 0, where integers are the last bits of the mantissa.
    fn first(self) -> f32 {
        (1u32 << self.bits()) as f32
    }

    /// The bits of a number, twice.
    fn bits_of(self, number: f32) -> u32 {
        let bits = match self.brain {
            true => bf16::from_f32(number).to_bits(),
            false => f16::from_f32(number).to_bits(),
        };
        u32::from(bits) * 0x0001_0001
    }

    /// The bits of [`first`](Self::first), twice. As a parameter of a kernel, they stay in a register.
    pub(crate) fn magic(self) -> u32 {
        self.bits_of(self.first())
    }
}

/// The layout of packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Codes {
    /// Low and high bits per code
    low: usize,
    high: usize,
    offset: u8,
    has_table: bool,
    /// Whether the numbers of the table have more bits than x
    in_two_terms: bool,
    /// Whether something is added to products
    has_shifts: bool,
    /// Whether groups have zero points
    has_zeros: bool,
    /// Groups in a run: 1 or 2
    groups: usize,
    reading: Reading,
}

impl Codes {
    pub(crate) fn new(reading: Reading) -> Option<Self> {
        let streams = reading.streams()?;
        Some(Self {
            low: streams.low,
            high: streams.high,
            offset: streams.offset,
            has_table: streams.table.is_some(),
            in_two_terms: matches!(streams.table, Some(Table::Nf4 | Table::Fp4)),
            has_shifts: reading.has_shifts(),
            has_zeros: streams.groups == GroupScales::Zeros,
            groups: if streams.group < 32 { 2 } else { 1 },
            reading,
        })
    }

    /// Runs of a row that a warp reads in a turn of the loop.
    fn runs(self) -> usize {
        runs_of_turn(self.low)
    }

    /// Words of a row that a lane reads in a turn, of the low bits and of the high ones.
    fn low_words(self) -> usize {
        self.runs() * self.low / QUARTERS
    }

    fn high_words(self) -> usize {
        self.runs() * self.high / QUARTERS
    }

    /// Words between two rows in memory. With four words between them, lanes read low bits from different
    /// banks.
    fn low_pitch(self) -> usize {
        self.runs() * self.low + 4
    }

    fn high_pitch(self) -> usize {
        if self.high > 0 { self.runs() * self.high + 4 } else { 0 }
    }

    /// Terms that the numbers of the weight are the sums of.
    fn terms(self) -> usize {
        if self.in_two_terms { 2 } else { 1 }
    }

    /// Factors of a run of a row: the scale of each group, and what is added to its numbers.
    fn factors(self) -> usize {
        self.groups * if self.has_shifts { 2 } else { 1 }
    }
}

/// The memory of a warp.
#[derive(CubeType)]
struct Memory {
    words: Shared<[u32]>,
    factors: Shared<[f32]>,
    /// The first words with low and with high bits, and the first factor, of a row that the lane has words
    /// of.
    low: usize,
    high: usize,
    factor: usize,
}

/// The words of a turn that a lane has read: for each row, those with low bits, those with high bits, and
/// the factors of a run.
#[derive(CubeType)]
struct Turn {
    codes: Array<u32>,
    factors: Array<f32>,
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn linear_packed_mma<E: Float>(
    x: &Tensor<Vector<E, Const<4>>>,
    w: &Tensor<u32>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    scales: &Tensor<Vector<E, Const<4>>>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    rests: &Tensor<f32>,
    info: &Info,
    #[comptime] product: Product,
    #[comptime] tile: Tile,
    #[comptime] codes: Codes,
    #[define(E)] _elem: ElemType,
) {
    write_permutation(comptime!(format!("{}-{}", codes.reading.format.name(), tile.permutation(product))));
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    let place = place_of(info, product);
    let (warp, eighth, quarter) = (place.warp, place.eighth, place.quarter);
    let (splits, runs) = comptime!((product.splits, codes.runs()));
    let begins = begins_of(&place, info, w.stride(0), product);
    let turns = info.runs.div_ceil(runs);
    let mut turn = warp % splits;
    let mut read = Turn {
        codes: Array::<u32>::new(comptime!(OF_LANE * (codes.low_words() + codes.high_words()))),
        factors: Array::<f32>::new(comptime!(OF_LANE * codes.factors())),
    };
    read_turn(&mut read, w, &begins, turn, quarter, info, codes);

    let mut table = Shared::<[f32]>::new_slice(TABLE);
    write_table(&mut table, comptime!(codes.reading));
    let mut norms = Shared::<[f32]>::new_slice(comptime!(norm::len_of(product.norm, product.most_rows)));
    if comptime!(product.norm.is_some()) {
        write_norms(&mut norms, x, place.first_row, info, comptime!(product.most_rows));
    }
    let vectors = vectors_of(&place, info, info.input / 4, quarter, product);
    let powers = powers_of(&norms, &place, comptime!(product.norm), comptime!(product.most_rows));

    let (low_pitch, high_pitch) = comptime!((codes.low_pitch(), codes.high_pitch()));
    let of_factors = comptime!(codes.factors() * runs);
    let warps = comptime!(LANES / WARP);
    // The factors of all warps, then results.
    let floats = comptime!((warps * OWN * of_factors).max(8 * LANES));
    let mut memory = Memory {
        words: Shared::<[u32]>::new_aligned_slice(comptime!(warps * OWN * (low_pitch + high_pitch)), 16usize),
        factors: Shared::<[f32]>::new_aligned_slice(floats, 16usize),
        low: (warp * OWN + eighth) * low_pitch,
        high: comptime!(warps * OWN * low_pitch) + (warp * OWN + eighth) * high_pitch,
        factor: (warp * OWN + eighth) * of_factors,
    };
    let mut sums = no_sums_of_warp(product);
    while turn < turns {
        // All lanes have read the turn before.
        sync_plane();
        store_turn(&mut memory, &read, quarter, codes);
        sync_plane();
        let now = turn;
        turn += splits;
        read_turn(&mut read, w, &begins, turn, quarter, info, codes);
        #[unroll]
        for run in 0..runs {
            if comptime!(tile.whole) || now * runs + run < info.runs {
                add_products_of_run::<E>(
                    &mut sums,
                    x,
                    scales,
                    &vectors,
                    &powers,
                    &memory,
                    &table,
                    (now * runs + run) * 8,
                    quarter,
                    run,
                    info,
                    product,
                    tile,
                    codes,
                );
            }
        }
    }

    write_results::<E>(
        &mut memory.factors,
        &sums,
        &norms,
        rests,
        bias,
        residual,
        y,
        cosines,
        sines,
        &place,
        info,
        product,
        tile,
    );
}

/// Reads what a lane has of a turn. Past the last turn, it reads the last one.
#[cube]
fn read_turn(
    read: &mut Turn,
    w: &Tensor<u32>,
    begins: &Array<usize>,
    turn: usize,
    quarter: usize,
    info: &Info,
    #[comptime] codes: Codes,
) {
    let (low, high, runs) = comptime!((codes.low_words(), codes.high_words(), codes.runs()));
    let piece = min(turn * QUARTERS + quarter, info.runs * QUARTERS / runs - 1);
    let run = min(turn * runs + quarter % runs, info.runs - 1);
    #[unroll]
    for i in 0..OF_LANE {
        let begin = begins[i];
        let place = comptime!(i * (low + high));
        load_words(&mut read.codes, place, w, begin + piece * low, low);
        if comptime!(high > 0) {
            let from = begin + info.runs * comptime!(codes.low) + piece * high;
            load_words(&mut read.codes, comptime!(place + low), w, from, high);
        }
        let of_row = comptime!(i * codes.factors());
        #[unroll]
        for group in 0..comptime!(codes.groups) {
            let of_group = read_group(w, begin, 2 * run, group, info.input, comptime!(codes.reading));
            read.factors[comptime!(of_row + group)] = of_group.scale;
            if comptime!(codes.has_zeros) {
                let zero = of_group.zero - comptime!(codes.reading.base(group));
                let shift = of_group.scale * zero * comptime!(-codes.reading.steps());
                read.factors[comptime!(of_row + codes.groups + group)] = shift;
            } else if comptime!(codes.has_shifts) {
                read.factors[comptime!(of_row + codes.groups + group)] = of_group.minimum;
            }
        }
    }
}

/// Reads 1, 2 or 4 words at once.
#[cube]
fn load_words(
    to: &mut Array<u32>,
    #[comptime] place: usize,
    w: &Tensor<u32>,
    from: usize,
    #[comptime] many: usize,
) {
    if comptime!(many == 4) {
        let words = w.as_slice().as_vectorized().with_vector_size::<Const<4>>()[from / 4];
        #[unroll]
        for i in 0..4usize {
            to[comptime!(place + i)] = words.extract(i);
        }
    } else if comptime!(many == 2) {
        let words = w.as_slice().as_vectorized().with_vector_size::<Const<2>>()[from / 2];
        #[unroll]
        for i in 0..2usize {
            to[comptime!(place + i)] = words.extract(i);
        }
    } else {
        to[place] = w[from];
    }
}

/// Writes what a lane has read of a turn to memory: words as they are, and the factors of a run.
#[cube]
fn store_turn(memory: &mut Memory, read: &Turn, quarter: usize, #[comptime] codes: Codes) {
    let (low, high, runs) = comptime!((codes.low_words(), codes.high_words(), codes.runs()));
    #[unroll]
    for i in 0..OF_LANE {
        let place = comptime!(i * (low + high));
        let to = memory.low + comptime!(8 * i * codes.low_pitch()) + quarter * low;
        store_words(&mut memory.words, to, &read.codes, place, low);
        if comptime!(high > 0) {
            let to = memory.high + comptime!(8 * i * codes.high_pitch()) + quarter * high;
            store_words(&mut memory.words, to, &read.codes, comptime!(place + low), high);
        }
        let of_row = comptime!(codes.factors());
        let to = memory.factor + comptime!(8 * i * of_row * runs) + quarter % runs;
        #[unroll]
        for factor in 0..of_row {
            memory.factors[to + comptime!(factor * runs)] = read.factors[comptime!(i * of_row + factor)];
        }
    }
}

/// Writes 1, 2 or 4 words at once.
#[cube]
fn store_words(
    memory: &mut Shared<[u32]>,
    to: usize,
    words: &Array<u32>,
    #[comptime] place: usize,
    #[comptime] many: usize,
) {
    if comptime!(many == 4) {
        let mut four = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for i in 0..4usize {
            four.insert(i, words[comptime!(place + i)]);
        }
        memory.as_mut_slice().as_vectorized_mut().with_vector_size_mut::<Const<4>>()[to / 4] = four;
    } else if comptime!(many == 2) {
        let mut two = Vector::<u32, Const<2>>::new(0u32);
        #[unroll]
        for i in 0..2usize {
            two.insert(i, words[comptime!(place + i)]);
        }
        memory.as_mut_slice().as_vectorized_mut().with_vector_size_mut::<Const<2>>()[to / 2] = two;
    } else {
        memory[to] = words[place];
    }
}

/// Adds the products of a run, whose vectors begin with the four `from`.
#[cube]
#[allow(clippy::too_many_arguments, reason = "they are registers")]
fn add_products_of_run<E: Float>(
    sums: &mut Array<Two<f32>>,
    x: &Tensor<Vector<E, Const<4>>>,
    scales: &Tensor<Vector<E, Const<4>>>,
    vectors: &Array<usize>,
    powers: &Array<f32>,
    memory: &Memory,
    table: &Shared<[f32]>,
    from: usize,
    quarter: usize,
    #[comptime] run: usize,
    info: &Info,
    #[comptime] product: Product,
    #[comptime] tile: Tile,
    #[comptime] codes: Codes,
) {
    let (eights, groups, runs) = comptime!((product.most_rows / 8, codes.groups, codes.runs()));
    // Two halves of a run for each matrix of the weight, in one term or two.
    let mut weights = Sequence::<Array<Two<E>>>::new();
    #[unroll]
    for i in 0..comptime!(OF_LANE / 2) {
        #[unroll]
        for half in 0..2usize {
            let (upper, lower) = (comptime!(2 * i), comptime!(2 * i + 1));
            let above = quad::<E>(memory, table, upper, run, half, quarter, info.one, tile, codes);
            let below = quad::<E>(memory, table, lower, run, half, quarter, info.one, tile, codes);
            #[unroll]
            for term in 0..comptime!(codes.terms()) {
                let mut part = Array::<Two<E>>::new(4usize);
                part[0] = above[comptime!(2 * term)];
                part[1] = below[comptime!(2 * term)];
                part[2] = above[comptime!(2 * term + 1)];
                part[3] = below[comptime!(2 * term + 1)];
                weights.push(part);
            }
        }
    }
    let mut ones = Array::<Two<E>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        ones[i] = twice::<E>(1.0f32, tile);
    }
    #[unroll]
    for n in 0..eights {
        let mut halves = Sequence::<Array<Two<E>>>::new();
        #[unroll]
        for half in 0..2usize {
            let at = from + comptime!(4 * half);
            let mut four = x[vectors[n] + at];
            if comptime!(product.norm.is_some()) {
                four = scaled(four, scales[at + quarter], powers[n], comptime!(product.norm));
            }
            let (even, odd) = evens_and_odds::<E>(four);
            let mut part = Array::<Two<E>>::new(2usize);
            part[0] = even;
            part[1] = odd;
            halves.push(part);
        }
        let each = comptime!(2 / groups);
        #[unroll]
        for group in 0..groups {
            // The sum of the numbers of x.
            let mut totals = no_sums();
            if comptime!(codes.has_shifts) {
                #[unroll]
                for half in 0..each {
                    totals = multiply::<E>(&ones, &halves[comptime!(group * each + half)], &totals, tile);
                }
            }
            #[unroll]
            for i in 0..comptime!(OF_LANE / 2) {
                let mut products = no_sums();
                #[unroll]
                for half in 0..each {
                    let half = comptime!(group * each + half);
                    #[unroll]
                    for term in 0..comptime!(codes.terms()) {
                        let part = &weights[comptime!((2 * i + half) * codes.terms() + term)];
                        products = multiply::<E>(part, &halves[half], &products, tile);
                    }
                }
                #[unroll]
                for row in 0..2usize {
                    let own = comptime!(2 * i + row);
                    let at = memory.factor + comptime!(8 * own * codes.factors() * runs + group * runs + run);
                    let place = comptime!(2 * i * eights + 2 * n + row);
                    let scale = Two::<f32>::new(memory.factors[at]);
                    let mut sum = fma(products[row], scale, sums[place]);
                    if comptime!(codes.has_shifts) {
                        let shift = Two::<f32>::new(memory.factors[at + comptime!(groups * runs)]);
                        sum = fma(totals[row], shift, sum);
                    }
                    sums[place] = sum;
                }
            }
        }
    }
}

#[cube]
fn no_sums() -> Array<Two<f32>> {
    let mut sums = Array::<Two<f32>>::new(2usize);
    sums[0] = Two::<f32>::new(0.0);
    sums[1] = Two::<f32>::new(0.0);
    sums
}

/// Returns the quad of a lane in half of a run, in one of its rows: the first and third number, then the
/// second and fourth. A second term follows, if there is one.
#[cube]
#[allow(clippy::too_many_arguments, reason = "they are registers")]
fn quad<E: Float>(
    memory: &Memory,
    table: &Shared<[f32]>,
    #[comptime] row: usize,
    #[comptime] run: usize,
    #[comptime] half: usize,
    quarter: usize,
    magic: u32,
    #[comptime] tile: Tile,
    #[comptime] codes: Codes,
) -> Array<Two<E>> {
    let low = memory.low + comptime!(8 * row * codes.low_pitch());
    let bits = comptime!(codes.low + codes.high);
    let mut numbers = Array::<Two<E>>::new(comptime!(2 * codes.terms()));
    // The code of number i is in byte i, from bit `bit` on. Other bits may follow it.
    let mut bytes = if comptime!(codes.low == 8) {
        memory.words[low + comptime!(8 * run + 4 * half) + quarter]
    } else if comptime!(codes.low == 4) {
        memory.words[low + comptime!(4 * run) + quarter]
    } else {
        memory.words[low + comptime!(2 * run + half)] >> u32::cast_from(2 * quarter)
    };
    let mut bit = comptime!(if codes.low == 4 { 4 * half as u32 } else { 0 });
    if comptime!(codes.high > 0) {
        let high = memory.high + comptime!(8 * row * codes.high_pitch());
        let above = if comptime!(codes.high == 2) {
            memory.words[high + comptime!(2 * run + half)] >> u32::cast_from(2 * quarter)
        } else {
            memory.words[high + run] >> u32::cast_from(quarter + comptime!(4 * half))
        };
        let (low_mask, high_mask) = comptime!((mask(codes.low), mask(codes.high)));
        bytes = ((bytes >> bit) & low_mask) | ((above & high_mask) << comptime!(codes.low as u32));
        comptime!(bit = 0);
    }
    if comptime!(codes.has_table || bits as u32 > tile.bits()) {
        let mut four = Vector::<E, Const<4>>::new(E::from_int(0));
        let mut rest = Vector::<E, Const<4>>::new(E::from_int(0));
        #[unroll]
        for i in 0..4usize {
            let code = (bytes >> comptime!(8 * i as u32 + bit)) & comptime!((1u32 << bits) - 1);
            let number = if comptime!(codes.has_table) {
                table[usize::cast_from(code)]
            } else {
                // The code is in the last bits of a mantissa.
                f32::reinterpret(code | 0x4b00_0000u32) - comptime!(8_388_608.0 + f32::from(codes.offset))
            };
            let rounded = E::cast_from(number);
            four.insert(i, rounded);
            rest.insert(i, E::cast_from(number - f32::cast_from(rounded)));
        }
        let (even, odd) = evens_and_odds::<E>(four);
        numbers[0] = even;
        numbers[1] = odd;
        if comptime!(codes.in_two_terms) {
            let (even, odd) = evens_and_odds::<E>(rest);
            numbers[2] = even;
            numbers[3] = odd;
        }
    } else {
        #[unroll]
        for i in 0..2usize {
            let moved = if comptime!(i == 0) { bytes } else { bytes >> 8u32 };
            // Codes that do not begin with the first bit are multiplied.
            let by = comptime!(if bit + bits as u32 <= tile.bits() { bit } else { 0 });
            let moved = if comptime!(bit > by) { moved >> comptime!(bit - by) } else { moved };
            let mask = comptime!(0x0001_0001 * (((1u32 << bits) - 1) << by));
            let read = Two::<E>::reinterpret((moved & mask) | magic);
            let step = comptime!(1.0 / (1u32 << by) as f32);
            let zero = twice::<E>(comptime!(-tile.first() * step - f32::from(codes.offset)), tile);
            numbers[i] =
                if comptime!(by > 0) { fma(read, twice::<E>(step, tile), zero) } else { read + zero };
        }
    }
    numbers
}

/// A number that the type has, twice. From its bits, a compiler makes part of an instruction.
#[cube]
fn twice<E: Float>(#[comptime] number: f32, #[comptime] tile: Tile) -> Two<E> {
    let bits = comptime!(tile.bits_of(number));
    Two::<E>::reinterpret(bits.runtime())
}

/// The first and third number, and the second and fourth.
#[cube]
fn evens_and_odds<E: Float>(four: Vector<E, Const<4>>) -> (Two<E>, Two<E>) {
    let (mut even, mut odd) = (Two::<E>::new(E::from_int(0)), Two::<E>::new(E::from_int(0)));
    #[unroll]
    for i in 0..2usize {
        even.insert(i, four.extract(comptime!(2 * i)));
        odd.insert(i, four.extract(comptime!(2 * i + 1)));
    }
    (even, odd)
}
