//! Products in float32.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::marker::PhantomData;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::{
    formats::{Block, Packed, Plain, RUN},
    tiles::{Kernel, SixteenRows, store},
};

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
pub(crate) struct Rows {
    /// Numbers of each column.
    numbers: Vec<[f32; 16]>,
    /// Scale of each group, and its minimum.
    factors: Vec<[[f32; 16]; 2]>,
}

impl<P: Packed> Kernel for Floats<P> {
    type Run = Run;
    type Rows = Rows;

    const PART: usize = 256 / RUN;

    #[inline(always)]
    fn meet<L: Lanes>(rows: &SixteenRows<'_, Self>, lanes: L, x: &[Self::Run], y: &mut [[f32; SIXTEEN]]) {
        if const { L::REGISTERS >= 32 } {
            rows.in_eights(lanes, x, y);
        } else {
            rows.in_sixes_and_fours(lanes, x, y);
        }
    }

    fn runs(columns: usize) -> usize {
        columns / RUN
    }

    #[inline(always)]
    fn product<L: Lanes>(lanes: L, words: &[u32], x: &[Run]) -> L::Floats {
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
        rows: &Rows,
        x: [&[Run]; T],
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

/// Adds a column times one element of each vector.
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

/// The kernel for weights that are floats.
pub(crate) struct Numbers<N>(PhantomData<N>);

impl<N: Plain> Kernel for Numbers<N> {
    type Run = f32;
    type Rows = Vec<[f32; 16]>;

    const PART: usize = 256;

    #[inline(always)]
    fn meet<L: Lanes>(rows: &SixteenRows<'_, Self>, lanes: L, x: &[Self::Run], y: &mut [[f32; SIXTEEN]]) {
        if const { L::REGISTERS >= 32 } {
            rows.in_eights(lanes, x, y);
        } else {
            rows.in_sixes_and_fours(lanes, x, y);
        }
    }

    fn runs(columns: usize) -> usize {
        columns
    }

    #[inline(always)]
    fn product<L: Lanes>(lanes: L, words: &[u32], x: &[f32]) -> L::Floats {
        let [sums] = lanes.call(Products::<N, 1>::new([words], x));
        lanes.floats(&sums)
    }

    /// Writes two products at a time: additions to one sum are sequential, so two sums are twice as fast.
    #[inline(always)]
    fn write_products<L: Lanes>(lanes: L, words: &[u32], stride: usize, x: &[f32], y: &mut [f32]) {
        for (words, y) in words.chunks(2 * stride).zip(y.chunks_mut(2 * SIXTEEN)) {
            if words.len() < 2 * stride {
                store(lanes.array(Self::product(lanes, words, x)), y);
                continue;
            }
            let (first, second) = words.split_at(stride);
            let sums = lanes.call(Products::<N, 2>::new([first, second], x));
            let (first, second) = y.split_at_mut(SIXTEEN);
            store(sums[0], first);
            store(sums[1], second);
        }
    }

    #[inline(always)]
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Vec<[f32; 16]>) {
        let columns: &[[N::Number; 16]] = bytemuck::cast_slice(words);
        rows.resize(columns.len(), [0.0; 16]);
        for (row, column) in rows.iter_mut().zip(columns) {
            *row = lanes.array(N::floats(lanes, column));
        }
    }

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        rows: &Vec<[f32; 16]>,
        mut x: [&[f32]; T],
        mut sums: [L::Floats; T],
    ) -> [L::Floats; T] {
        // The length is made known to the compiler, so that bounds are not checked repeatedly.
        for t in 0..T {
            x[t] = &x[t][..rows.len()];
        }
        for (i, row) in rows.iter().enumerate() {
            sums = add_column(lanes, sums, lanes.floats(row), x, i);
        }
        sums
    }
}

/// `S` blocks of sixteen rows, and a vector.
struct Products<'a, N: Plain, const S: usize> {
    columns: [&'a [[N::Number; 16]]; S],
    x: &'a [f32],
}

impl<'a, N: Plain, const S: usize> Products<'a, N, S> {
    #[inline(always)]
    fn new(words: [&'a [u32]; S], x: &'a [f32]) -> Self {
        Self { columns: words.map(bytemuck::cast_slice), x }
    }
}

impl<N: Plain, const S: usize> Work for Products<'_, N, S> {
    type Output = [[f32; SIXTEEN]; S];

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> [[f32; SIXTEEN]; S] {
        let Self { mut columns, x } = self;
        for s in 0..S {
            columns[s] = &columns[s][..x.len()];
        }
        let mut sums = [lanes.splat(0.0); S];
        for (i, x) in x.iter().enumerate() {
            let x = lanes.splat(*x);
            for s in 0..S {
                lanes.prefetch(std::slice::from_ref(&columns[s][i]));
                sums[s] = lanes.mul_add(N::floats(lanes, &columns[s][i]), x, sums[s]);
            }
        }
        let mut arrays = [[0.0; SIXTEEN]; S];
        for s in 0..S {
            arrays[s] = lanes.array(sums[s]);
        }
        arrays
    }
}
