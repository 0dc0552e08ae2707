//! Products in float32.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::marker::PhantomData;

use kiln_simd::Lanes;

use crate::{
    formats::{Block, Packed, Plain, RUN},
    tiles::{Kernel, Rows, Sums, Tiles, Unpacking},
    widths::{Computation, of_eight, of_six, of_sixteen},
};

/// Largest number of vectors for which rows are decoded again for each tile, if registers are few.
const DECODED_FOR: usize = 12;

/// 32 elements of a vector.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    numbers: [f32; RUN],
    /// Sum of the first sixteen elements, and of the others.
    sums: [f32; 2],
}

/// Splits vectors into runs.
pub(crate) fn fill(x: &[f32], runs: &mut [Run]) {
    let sum = |numbers: &[f32]| numbers.iter().sum::<f32>();
    for (&numbers, run) in x.as_chunks::<RUN>().0.iter().zip(runs) {
        *run = Run { numbers, sums: [sum(&numbers[..RUN / 2]), sum(&numbers[RUN / 2..])] };
    }
}

/// The kernel that computes with codes as floats.
pub(crate) struct Floats<P>(PhantomData<P>);

/// Codes as float32, and their factors.
#[derive(Default)]
pub(crate) struct Unpacked {
    /// Numbers of each column.
    numbers: Vec<[f32; 16]>,
    /// Scale of each group, and its minimum.
    factors: Vec<[[f32; 16]; 2]>,
}

impl<P: Packed> Kernel for Floats<P> {
    type Run = Run;

    const UNIT: usize = 256 / RUN;

    #[inline(always)]
    fn width<L: Lanes>(vectors: usize) -> usize {
        if L::REGISTERS >= 32 { of_eight(vectors) } else { of_six(vectors) }
    }

    #[inline(always)]
    fn in_width<L: Lanes>(tile: impl Computation, lanes: L) {
        if const { L::REGISTERS >= 32 } {
            tile.of_eight(lanes);
        } else {
            tile.of_six(lanes);
        }
    }

    #[inline(always)]
    fn compute<L: Lanes>(tiles: Tiles<'_, Self>, lanes: L) {
        if const { L::REGISTERS < 32 } && tiles.vectors() > DECODED_FOR {
            tiles.of_unpacked(lanes);
        } else {
            tiles.of_words(lanes);
        }
    }

    fn runs(columns: usize) -> usize {
        columns / RUN
    }

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        words: &[u32],
        x: &[[Run; T]],
        mut totals: [L::Floats; T],
    ) -> [L::Floats; T] {
        for (words, x) in words.chunks_exact(P::WORDS).zip(x.chunks_exact(P::RUNS)) {
            let block = Block::of::<P>(words);
            let whole = block.whole::<L, P>(lanes);
            let zeros = block.zeros::<L, P>(lanes);
            block.prefetch_scales::<L, P>(lanes);
            for run in 0..P::RUNS {
                block.prefetch_codes::<L, P>(lanes, run);
                let (codes, x) = (block.run::<P>(run), &x[run]);
                for group in 0..P::GROUPS {
                    let mut sums = [lanes.splat(0.0); T];
                    for q in group * QUADS / P::GROUPS..(group + 1) * QUADS / P::GROUPS {
                        let numbers = four::<L, P>(lanes, codes.quad(lanes, q), zeros);
                        for byte in 0..4 {
                            for t in 0..T {
                                let x = lanes.splat(x[t].numbers[4 * q + byte]);
                                sums[t] = lanes.mul_add(numbers[byte], x, sums[t]);
                            }
                        }
                    }
                    let factors = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    totals = add::<L, P, T>(lanes, totals, sums, group, factors, x);
                }
            }
        }
        totals
    }
}

impl<P: Packed> Unpacking for Floats<P> {
    type Unpacked = Unpacked;

    #[inline(always)]
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Unpacked) {
        rows.numbers.clear();
        rows.factors.clear();
        for words in words.chunks_exact(P::WORDS) {
            let block = Block::of::<P>(words);
            let whole = block.whole::<L, P>(lanes);
            let zeros = block.zeros::<L, P>(lanes);
            block.prefetch_scales::<L, P>(lanes);
            for run in 0..P::RUNS {
                block.prefetch_codes::<L, P>(lanes, run);
                let quads = block.run::<P>(run);
                let mut numbers = [[0.0; 16]; RUN];
                for q in 0..RUN / 4 {
                    let four = four::<L, P>(lanes, quads.quad(lanes, q), zeros);
                    for byte in 0..4 {
                        numbers[4 * q + byte] = lanes.array(four[byte]);
                    }
                }
                rows.numbers.extend_from_slice(&numbers);
                for group in 0..P::GROUPS {
                    let [scale, minimum] = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    rows.factors.push([lanes.array(scale), lanes.array(minimum)]);
                }
            }
        }
    }

    #[inline(always)]
    fn products_of_unpacked<L: Lanes, const T: usize>(
        lanes: L,
        rows: &Unpacked,
        x: &[[Run; T]],
        mut totals: [L::Floats; T],
    ) -> [L::Floats; T] {
        // If registers are few, a loop whose length the compiler does not know is used: it would unroll
        // another one, and then run out of registers.
        let each = match L::REGISTERS >= 32 {
            true => RUN / P::GROUPS,
            false => (rows.numbers.len() / rows.factors.len().max(1)).max(1),
        };
        for (i, (numbers, [scale, minimum])) in rows.numbers.chunks_exact(each).zip(&rows.factors).enumerate()
        {
            let (run, group) = (i / P::GROUPS, i % P::GROUPS);
            let (x, mut of_group) = (&x[run], [&x[run][0].numbers[..]; T]);
            for t in 0..T {
                of_group[t] = &x[t].numbers[group * RUN / P::GROUPS..][..numbers.len()];
            }
            let mut sums = [lanes.splat(0.0); T];
            for (i, number) in numbers.iter().enumerate() {
                let number = lanes.floats(number);
                for t in 0..T {
                    sums[t] = lanes.mul_add(number, lanes.splat(of_group[t][i]), sums[t]);
                }
            }
            let factors = [lanes.floats(scale), lanes.floats(minimum)];
            totals = add::<L, P, T>(lanes, totals, sums, group, factors, x);
        }
        totals
    }
}

/// Number of words of four codes in a run.
const QUADS: usize = RUN / 4;

/// Returns the numbers that the bytes of a word stand for.
#[inline(always)]
fn four<L: Lanes, P: Packed>(lanes: L, quad: L::Words, zeros: L::Floats) -> [L::Floats; 4] {
    let mut numbers = [zeros; 4];
    for byte in 0..4 {
        let code = lanes.and(lanes.shift_right(quad, byte as u32 * 8), 255);
        numbers[byte] = match &P::FLOATS {
            Some(table) => lanes.pick(table, code),
            None if P::HAS_ZEROS || P::OFFSET > 0 => lanes.add(lanes.to_floats(code), zeros),
            None => lanes.to_floats(code),
        };
    }
    numbers
}

/// Adds the sums of a group.
#[inline(always)]
fn add<L: Lanes, P: Packed, const T: usize>(
    lanes: L,
    mut totals: [L::Floats; T],
    sums: [L::Floats; T],
    group: usize,
    [scale, minimum]: [L::Floats; 2],
    x: &[Run; T],
) -> [L::Floats; T] {
    for t in 0..T {
        totals[t] = lanes.mul_add(sums[t], scale, totals[t]);
        if P::HAS_MINIMUM {
            let [first, second] = x[t].sums;
            let sum = match (P::GROUPS, group) {
                (1, _) => first + second,
                (_, 0) => first,
                _ => second,
            };
            totals[t] = lanes.mul_add(minimum, lanes.splat(sum), totals[t]);
        }
    }
    totals
}

/// The kernel for weights that are floats.
pub(crate) struct Numbers<N>(PhantomData<N>);

impl<N: Plain> Kernel for Numbers<N> {
    type Run = f32;

    // Whole cache lines of a vector: there are no blocks.
    const UNIT: usize = 64;

    #[inline(always)]
    fn width<L: Lanes>(vectors: usize) -> usize {
        if L::REGISTERS >= 32 { of_sixteen(vectors) } else { of_six(vectors) }
    }

    #[inline(always)]
    fn in_width<L: Lanes>(tile: impl Computation, lanes: L) {
        if const { L::REGISTERS >= 32 } {
            tile.of_sixteen(lanes);
        } else {
            tile.of_six(lanes);
        }
    }

    fn runs(columns: usize) -> usize {
        columns
    }

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        words: &[u32],
        x: &[[f32; T]],
        start: [L::Floats; T],
    ) -> [L::Floats; T] {
        let [sums] = products::<L, N, T, 1>(lanes, [words], x, [start]);
        sums
    }

    /// Computes two blocks of rows at a time for few vectors: additions to one sum are sequential, so twice
    /// as many sums are faster.
    #[inline(always)]
    fn add_products<L: Lanes, const T: usize>(
        lanes: L,
        rows: Rows<'_>,
        x: &[[f32; T]],
        sums: &mut Sums<'_, '_>,
    ) {
        let mut i = 0;
        if T <= if const { L::REGISTERS >= 32 } { 8 } else { 2 } {
            while i + 1 < rows.sixteens() {
                let start = [sums.start::<L, T>(lanes, i), sums.start::<L, T>(lanes, i + 1)];
                let both = products::<L, N, T, 2>(lanes, [rows.words(i), rows.words(i + 1)], x, start);
                sums.store::<L, T>(lanes, i, both[0]);
                sums.store::<L, T>(lanes, i + 1, both[1]);
                i += 2;
            }
        }
        while i < rows.sixteens() {
            let start = sums.start::<L, T>(lanes, i);
            let products = Self::products::<L, T>(lanes, rows.words(i), x, start);
            sums.store::<L, T>(lanes, i, products);
            i += 1;
        }
    }
}

/// Returns the products of `S` blocks of sixteen rows with `T` vectors, added to `sums`.
#[inline(always)]
fn products<L: Lanes, N: Plain, const T: usize, const S: usize>(
    lanes: L,
    words: [&[u32]; S],
    x: &[[f32; T]],
    mut sums: [[L::Floats; T]; S],
) -> [[L::Floats; T]; S] {
    let mut columns: [&[[N::Number; 16]]; S] = [&[]; S];
    for s in 0..S {
        // The length is made known to the compiler, so that bounds are not checked repeatedly.
        columns[s] = &bytemuck::cast_slice(words[s])[..x.len()];
    }
    for (i, x) in x.iter().enumerate() {
        let mut numbers = [lanes.splat(0.0); S];
        for s in 0..S {
            lanes.prefetch(std::slice::from_ref(&columns[s][i]));
            numbers[s] = N::floats(lanes, &columns[s][i]);
        }
        for t in 0..T {
            let x = lanes.splat(x[t]);
            for s in 0..S {
                sums[s][t] = lanes.mul_add(numbers[s], x, sums[s][t]);
            }
        }
    }
    sums
}
