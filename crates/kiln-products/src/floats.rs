//! Products in float32.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::marker::PhantomData;

use kiln_simd::Lanes;

use crate::{
    formats::{Block, Packed, Plain, RUN},
    tiles::Kernel,
};

/// 32 numbers of a vector.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Run {
    numbers: [f32; RUN],
    /// Of the first sixteen and the others
    sums: [f32; 2],
}

/// Makes runs of vectors.
pub(crate) fn fill(x: &[f32], runs: &mut [Run]) {
    let sum = |numbers: &[f32]| numbers.iter().sum::<f32>();
    for (&numbers, run) in x.as_chunks::<RUN>().0.iter().zip(runs) {
        *run = Run { numbers, sums: [sum(&numbers[..RUN / 2]), sum(&numbers[RUN / 2..])] };
    }
}

/// Codes as floats.
pub(crate) struct Floats<P>(PhantomData<P>);

/// Codes as float32, and their factors.
#[derive(Default)]
pub(crate) struct Rows {
    /// Of each column
    numbers: Vec<[f32; 16]>,
    /// The scale of each group, and its minimum
    factors: Vec<[[f32; 16]; 2]>,
}

impl<P: Packed> Kernel for Floats<P> {
    type Run = Run;
    type Rows = Rows;

    fn together<L: Lanes>() -> usize {
        if L::REGISTERS >= 32 { 8 } else { 6 }
    }

    fn runs(columns: usize) -> usize {
        columns / RUN
    }

    #[inline(always)]
    fn product<L: Lanes>(lanes: L, words: &[u32], _: &mut Rows, x: &[Run]) -> L::Floats {
        let mut total = [lanes.splat(0.0)];
        for (words, x) in words.chunks_exact(P::WORDS).zip(x.chunks_exact(P::RUNS)) {
            let block = Block::of::<P>(words);
            let whole = block.whole::<L, P>(lanes);
            let zeros = block.zeros::<L, P>(lanes);
            block.prefetch_scales::<L, P>(lanes);
            for run in 0..P::RUNS {
                block.prefetch_codes::<L, P>(lanes, run);
                let codes = block.run::<P>(run);
                for group in 0..P::GROUPS {
                    let mut sum = lanes.splat(0.0);
                    for q in group * QUADS / P::GROUPS..(group + 1) * QUADS / P::GROUPS {
                        let numbers = four::<L, P>(lanes, codes.quad(lanes, q), zeros);
                        for byte in 0..4 {
                            let x = lanes.splat(x[run].numbers[4 * q + byte]);
                            sum = lanes.mul_add(numbers[byte], x, sum);
                        }
                    }
                    let factors = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    total = add::<L, P, 1>(lanes, total, [sum], group, factors, [&x[run]]);
                }
            }
        }
        total[0]
    }

    #[inline(always)]
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Rows) {
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
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        _: &[u32],
        rows: &Rows,
        x: [&[Run]; T],
    ) -> [L::Floats; T] {
        let mut totals = [lanes.splat(0.0); T];
        // Where registers are few, a loop whose length the compiler does not know: it would unroll another one, and then run out of them.
        let each = match L::REGISTERS >= 32 {
            true => RUN / P::GROUPS,
            false => (rows.numbers.len() / rows.factors.len().max(1)).max(1),
        };
        for (i, (numbers, [scale, minimum])) in rows.numbers.chunks_exact(each).zip(&rows.factors).enumerate()
        {
            let (run, group) = (i / P::GROUPS, i % P::GROUPS);
            let (mut runs, mut of_group) = ([&x[0][run]; T], [&x[0][run].numbers[..]; T]);
            for t in 0..T {
                runs[t] = &x[t][run];
                of_group[t] = &x[t][run].numbers[group * RUN / P::GROUPS..][..numbers.len()];
            }
            let mut sums = [lanes.splat(0.0); T];
            for (i, number) in numbers.iter().enumerate() {
                sums = add_column(lanes, sums, lanes.floats(number), of_group, i);
            }
            let factors = [lanes.floats(scale), lanes.floats(minimum)];
            totals = add::<L, P, T>(lanes, totals, sums, group, factors, runs);
        }
        totals
    }
}

/// Words of four codes in a run
const QUADS: usize = RUN / 4;

/// The numbers that the bytes of a word stand for.
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
    x: [&Run; T],
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

/// Adds a column times a number of each vector.
#[inline(always)]
fn add_column<L: Lanes, const T: usize>(
    lanes: L,
    mut sums: [L::Floats; T],
    column: L::Floats,
    x: [&[f32]; T],
    i: usize,
) -> [L::Floats; T] {
    for t in 0..T {
        sums[t] = lanes.mul_add(column, lanes.splat(x[t][i]), sums[t]);
    }
    sums
}

/// Weights that are floats.
pub(crate) struct Numbers<N>(PhantomData<N>);

impl<N: Plain> Kernel for Numbers<N> {
    type Run = f32;
    type Rows = ();

    fn together<L: Lanes>() -> usize {
        if L::REGISTERS >= 32 { 8 } else { 6 }
    }

    fn runs(columns: usize) -> usize {
        columns
    }

    #[inline(always)]
    fn product<L: Lanes>(lanes: L, words: &[u32], (): &mut (), x: &[f32]) -> L::Floats {
        Self::products::<L, 1>(lanes, words, &(), [x])[0]
    }

    #[inline(always)]
    fn unpack<L: Lanes>(_: L, _: &[u32], (): &mut ()) {}

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        words: &[u32],
        (): &(),
        mut x: [&[f32]; T],
    ) -> [L::Floats; T] {
        let columns: &[N::Column] = bytemuck::cast_slice(words);
        // Of a length that is known, so that places are not checked again and again.
        for t in 0..T {
            x[t] = &x[t][..columns.len()];
        }
        if L::REGISTERS >= 32 {
            sums::<L, N, T, 2>(lanes, columns, x)
        } else {
            sums::<L, N, T, 1>(lanes, columns, x)
        }
    }
}

/// The products of columns with vectors, in `S` sums that do not wait for each other.
#[inline(always)]
fn sums<L: Lanes, N: Plain, const T: usize, const S: usize>(
    lanes: L,
    columns: &[N::Column],
    x: [&[f32]; T],
) -> [L::Floats; T] {
    let mut sums = [[lanes.splat(0.0); T]; S];
    let (chunks, last) = columns.as_chunks::<S>();
    for (i, chunk) in chunks.iter().enumerate() {
        lanes.prefetch(chunk);
        for s in 0..S {
            sums[s] = add_column(lanes, sums[s], N::floats(lanes, &chunk[s]), x, S * i + s);
        }
    }
    for (i, column) in last.iter().enumerate() {
        sums[0] = add_column(lanes, sums[0], N::floats(lanes, column), x, S * chunks.len() + i);
    }
    let mut all = sums[0];
    for s in 1..S {
        for t in 0..T {
            all[t] = lanes.add(all[t], sums[s][t]);
        }
    }
    all
}
