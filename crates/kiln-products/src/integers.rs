//! Products in integers, of vectors that are rounded to bytes.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::marker::PhantomData;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::{
    formats::{Block, CodesOfRun, Packed, RUN},
    tiles::{Kernel, SixteenRows},
};

/// 32 elements of a vector as signed bytes with a scale.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Run {
    /// Groups of four bytes, from -127 to 127.
    quads: [i32; 8],
    scale: f32,
    /// Initial value of a sum of products for each group of a weight, which subtracts the weight's offset.
    starts: [i32; 2],
    /// Sum of the rounded elements for each group of a weight; the sum of their bytes if the weight has zero
    /// points.
    sums: [f32; 2],
}

/// Rounds vectors for weights in a format.
pub(crate) struct Rounding<'a, P> {
    x: &'a [f32],
    runs: &'a mut [Run],
    format: PhantomData<P>,
}

impl<'a, P> Rounding<'a, P> {
    pub(crate) fn new(x: &'a [f32], runs: &'a mut [Run]) -> Self {
        Self { x, runs, format: PhantomData }
    }
}

impl<P: Packed> Work for Rounding<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let offset = P::OFFSET - if P::WIDE && L::SUBTRACTS_128 { 128 } else { 0 };
        for (x, rounded) in self.x.as_chunks::<RUN>().0.iter().zip(self.runs) {
            *rounded = run::<L, P>(lanes, x, offset);
        }
    }
}

#[inline(always)]
fn run<L: Lanes, P: Packed>(lanes: L, x: &[f32; RUN], offset: i32) -> Run {
    let halves = x.as_chunks().0;
    let x = [lanes.floats(&halves[0]), lanes.floats(&halves[1])];
    let scale = lanes.largest(x) / 127.0;
    // Numbers so small that the inverse would be infinite are rounded to 0.
    let inverse = lanes.splat(if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 });
    let (first, first_sum) = lanes.rounded(lanes.mul(x[0], inverse));
    let (last, last_sum) = lanes.rounded(lanes.mul(x[1], inverse));
    let of_groups = if P::GROUPS == 1 { [first_sum + last_sum, 0] } else { [first_sum, last_sum] };
    let (mut starts, mut sums) = ([0; 2], [0.0; 2]);
    for group in 0..2 {
        let sum = of_groups[group];
        starts[group] = -offset * sum;
        sums[group] = if P::HAS_ZEROS { sum as f32 } else { scale * sum as f32 };
    }
    Run { quads: bytemuck::cast([first, last]), scale, starts, sums }
}

/// The kernel that multiplies codes by bytes.
pub(crate) struct Integers<P>(PhantomData<P>);

/// Codes as bytes, and their factors.
#[derive(Default)]
pub(crate) struct Rows {
    /// Four codes of each row per entry.
    quads: Vec<[u32; 16]>,
    /// Factors of each group.
    factors: Vec<Factors>,
}

/// Scale of a group, its minimum, and its negated zero point.
type Factors = [[f32; 16]; 3];

impl<P: Packed> Kernel for Integers<P> {
    type Run = Run;
    type Rows = Rows;

    const PART: usize = 1024 / RUN;

    #[inline(always)]
    fn meet<L: Lanes>(rows: &SixteenRows<'_, Self>, lanes: L, x: &[Self::Run], y: &mut [[f32; SIXTEEN]]) {
        if const { L::REGISTERS >= 32 } {
            rows.in_eights(lanes, x, y);
        } else if const { in_pairs::<L, P>() } {
            rows.in_sixes(lanes, x, y);
        } else {
            rows.in_threes(lanes, x, y);
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
                let quads = block.run::<P>(run);
                for group in 0..P::GROUPS {
                    let sum = sum::<L, P>(lanes, &quads, group, &x[run]);
                    let [scale, minimum] = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    total = add::<L, P, 1>(lanes, total, [sum], group, [scale, minimum, zeros], [&x[run]]);
                }
            }
        }
        total[0]
    }

    #[inline(always)]
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Rows) {
        rows.quads.clear();
        rows.factors.clear();
        for words in words.chunks_exact(P::WORDS) {
            let block = Block::of::<P>(words);
            let whole = block.whole::<L, P>(lanes);
            let zeros = lanes.array(block.zeros::<L, P>(lanes));
            block.prefetch_scales::<L, P>(lanes);
            for run in 0..P::RUNS {
                block.prefetch_codes::<L, P>(lanes, run);
                let quads = block.run::<P>(run);
                for q in 0..QUADS {
                    rows.quads.push(lanes.word_array(quads.quad(lanes, q)));
                }
                for group in 0..P::GROUPS {
                    let [scale, minimum] = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    rows.factors.push([lanes.array(scale), lanes.array(minimum), zeros]);
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
        // If a product takes several instructions, a loop whose length the compiler does not know is used: it
        // would unroll another one, and then run out of registers.
        let each = match L::LARGEST_PAIR == 0 {
            true => QUADS / P::GROUPS,
            false => (rows.quads.len() / rows.factors.len().max(1)).max(1),
        };
        for (i, (quads, factors)) in rows.quads.chunks_exact(each).zip(&rows.factors).enumerate() {
            let (run, group) = (i / P::GROUPS, i % P::GROUPS);
            let (mut runs, mut numbers) = ([&x[0][run]; T], [&x[0][run].quads[..]; T]);
            for t in 0..T {
                runs[t] = &x[t][run];
                numbers[t] = &x[t][run].quads[group * QUADS / P::GROUPS..][..quads.len()];
            }
            let sums = sums::<L, P, T>(lanes, quads, numbers, group, runs);
            let [scale, minimum, zeros] = factors;
            let factors = [lanes.floats(scale), lanes.floats(minimum), lanes.floats(zeros)];
            totals = add::<L, P, T>(lanes, totals, sums, group, factors, runs);
        }
        totals
    }
}

/// Number of words of four codes in a run.
const QUADS: usize = RUN / 4;

/// Whether pairs of products of a whole group are summed before they are widened: a pair is at most 254 times
/// the largest byte.
const fn in_pairs<L: Lanes, P: Packed>() -> bool {
    !P::WIDE && QUADS / P::GROUPS * 254 * P::LARGEST <= L::LARGEST_PAIR
}

#[inline(always)]
fn dot<L: Lanes, P: Packed>(lanes: L, sums: L::Words, quad: L::Words, x: i32) -> L::Words {
    if P::WIDE { lanes.dot_wide(sums, quad, x) } else { lanes.dot(sums, quad, x) }
}

/// Returns the products of a group with a vector, from packed codes.
#[inline(always)]
fn sum<L: Lanes, P: Packed>(lanes: L, codes: &CodesOfRun<'_, P>, group: usize, x: &Run) -> L::Words {
    let (mut sum, mut pairs, each) = (lanes.integers(x.starts[group]), lanes.no_pairs(), QUADS / P::GROUPS);
    for i in 0..each {
        // Four-bit codes share a word with those of the other half of the run: in this order the word is
        // neither kept nor read again.
        let q = if each == QUADS && P::STREAMS.low == 4 { i % 2 * 4 + i / 2 } else { group * each + i };
        let quad = codes.quad(lanes, q);
        match in_pairs::<L, P>() {
            true => pairs = lanes.add_pairs(pairs, quad, x.quads[q]),
            false => sum = dot::<L, P>(lanes, sum, quad, x.quads[q]),
        }
    }
    if in_pairs::<L, P>() { lanes.sum_pairs(sum, pairs) } else { sum }
}

/// Returns the products of a group with several vectors.
#[inline(always)]
fn sums<L: Lanes, P: Packed, const T: usize>(
    lanes: L,
    quads: &[[u32; 16]],
    numbers: [&[i32]; T],
    group: usize,
    x: [&Run; T],
) -> [L::Words; T] {
    let mut sums = [lanes.integers(0); T];
    if in_pairs::<L, P>() {
        let mut pairs = [lanes.no_pairs(); T];
        for (q, quad) in quads.iter().enumerate() {
            let quad = lanes.words(quad);
            for t in 0..T {
                pairs[t] = lanes.add_pairs(pairs[t], quad, numbers[t][q]);
            }
        }
        for t in 0..T {
            sums[t] = lanes.sum_pairs(lanes.integers(x[t].starts[group]), pairs[t]);
        }
        return sums;
    }
    for t in 0..T {
        sums[t] = lanes.integers(x[t].starts[group]);
    }
    for (q, quad) in quads.iter().enumerate() {
        let quad = lanes.words(quad);
        for t in 0..T {
            sums[t] = dot::<L, P>(lanes, sums[t], quad, numbers[t][q]);
        }
    }
    sums
}

/// Adds the sums of a group.
#[inline(always)]
fn add<L: Lanes, P: Packed, const T: usize>(
    lanes: L,
    mut totals: [L::Floats; T],
    sums: [L::Words; T],
    group: usize,
    [scale, minimum, zeros]: [L::Floats; 3],
    x: [&Run; T],
) -> [L::Floats; T] {
    for t in 0..T {
        let scale = lanes.mul(scale, lanes.splat(x[t].scale));
        let mut sum = lanes.to_floats(sums[t]);
        if P::HAS_ZEROS {
            // Exact, because all numbers are integers of less than 24 bits.
            sum = lanes.mul_add(zeros, lanes.splat(x[t].sums[group]), sum);
        }
        totals[t] = lanes.mul_add(sum, scale, totals[t]);
        if P::HAS_MINIMUM {
            totals[t] = lanes.mul_add(minimum, lanes.splat(x[t].sums[group]), totals[t]);
        }
    }
    totals
}
