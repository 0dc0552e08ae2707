//! Products in integers, of vectors that are rounded to bytes.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::marker::PhantomData;

use kiln_simd::{Lanes, Work};

use crate::{
    formats::{Block, CodesOfRun, Packed, RUN},
    tiles::{Kernel, Tiles, Unpacking},
    widths::{Computation, of_eight, of_six, of_three},
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
pub(crate) struct Unpacked {
    /// Four codes of each row per entry.
    quads: Vec<[u32; 16]>,
    /// Factors of each group.
    factors: Vec<Factors>,
}

/// Scale of a group, its minimum, and its negated zero point.
type Factors = [[f32; 16]; 3];

impl<P: Packed> Kernel for Integers<P> {
    type Run = Run;

    const UNIT: usize = 256 / RUN;

    #[inline(always)]
    fn width<L: Lanes>(vectors: usize) -> usize {
        if L::REGISTERS >= 32 {
            of_eight(vectors)
        } else if in_threes::<L, P>() {
            of_three(vectors)
        } else {
            of_six(vectors)
        }
    }

    #[inline(always)]
    fn in_width<L: Lanes>(tile: impl Computation, lanes: L) {
        if const { L::REGISTERS >= 32 } {
            tile.of_eight(lanes);
        } else if const { in_threes::<L, P>() } {
            tile.of_three(lanes);
        } else {
            tile.of_six(lanes);
        }
    }

    #[inline(always)]
    fn compute<L: Lanes>(tiles: Tiles<'_, Self>, lanes: L) {
        if const { decoded_for::<L, P>() < usize::MAX } && tiles.vectors() > decoded_for::<L, P>() {
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
                let codes = block.run::<P>(run);
                for group in 0..P::GROUPS {
                    let sums = sums::<L, P, T>(lanes, &codes, group, &x[run]);
                    let [scale, minimum] = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    totals = add::<L, P, T>(lanes, totals, sums, group, [scale, minimum, zeros], &x[run]);
                }
            }
        }
        totals
    }
}

impl<P: Packed> Unpacking for Integers<P> {
    type Unpacked = Unpacked;

    #[inline(always)]
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Unpacked) {
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
    fn products_of_unpacked<L: Lanes, const T: usize>(
        lanes: L,
        rows: &Unpacked,
        x: &[[Run; T]],
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
            let (x, mut numbers) = (&x[run], [&x[run][0].quads[..]; T]);
            for t in 0..T {
                numbers[t] = &x[t].quads[group * QUADS / P::GROUPS..][..quads.len()];
            }
            let sums = sums_of_unpacked::<L, P, T>(lanes, quads, numbers, group, x);
            let [scale, minimum, zeros] = factors;
            let factors = [lanes.floats(scale), lanes.floats(minimum), lanes.floats(zeros)];
            totals = add::<L, P, T>(lanes, totals, sums, group, factors, x);
        }
        totals
    }
}

/// Number of words of four codes in a run.
const QUADS: usize = RUN / 4;

/// Whether tiles of three are best where registers are few. They are unless products can be added in pairs,
/// or codes are whole bytes: elsewhere, sums that leave their registers cost more than codes that are
/// decoded again.
const fn in_threes<L: Lanes, P: Packed>() -> bool {
    L::LARGEST_PAIR == 0 && P::STREAMS.low < 8
}

/// Largest number of vectors for which rows are decoded again for each tile. Where registers are few,
/// unpacking pays for more vectors: soon if a product takes several instructions, later if codes are slow to
/// decode, with high bits or a table, and never if codes are whole bytes.
const fn decoded_for<L: Lanes, P: Packed>() -> usize {
    match (L::REGISTERS < 32, L::LARGEST_PAIR > 0) {
        (false, _) => usize::MAX,
        _ if P::STREAMS.low == 8 => usize::MAX,
        (true, true) => 12,
        (true, false) if P::STREAMS.high > 0 || P::STREAMS.table.is_some() => 32,
        (true, false) => usize::MAX,
    }
}

/// Whether pairs of products of a whole group are summed before they are widened: a pair is at most 254 times
/// the largest byte.
const fn in_pairs<L: Lanes, P: Packed>() -> bool {
    !P::WIDE && QUADS / P::GROUPS * 254 * P::LARGEST <= L::LARGEST_PAIR
}

#[inline(always)]
fn dot<L: Lanes, P: Packed>(lanes: L, sums: L::Words, quad: L::Words, x: i32) -> L::Words {
    if P::WIDE { lanes.dot_wide(sums, quad, x) } else { lanes.dot(sums, quad, x) }
}

/// Returns the products of a group with each vector.
#[inline(always)]
fn sums<L: Lanes, P: Packed, const T: usize>(
    lanes: L,
    codes: &CodesOfRun<'_, P>,
    group: usize,
    x: &[Run; T],
) -> [L::Words; T] {
    let (mut sums, mut pairs, each) = ([lanes.integers(0); T], [lanes.no_pairs(); T], QUADS / P::GROUPS);
    for t in 0..T {
        sums[t] = lanes.integers(x[t].starts[group]);
    }
    for i in 0..each {
        // Four-bit codes share a word with those of the other half of the run: in this order the word is
        // neither kept nor read again.
        let q = if each == QUADS && P::STREAMS.low == 4 { i % 2 * 4 + i / 2 } else { group * each + i };
        let quad = codes.quad(lanes, q);
        for t in 0..T {
            match in_pairs::<L, P>() {
                true => pairs[t] = lanes.add_pairs(pairs[t], quad, x[t].quads[q]),
                false => sums[t] = dot::<L, P>(lanes, sums[t], quad, x[t].quads[q]),
            }
        }
    }
    for t in 0..T {
        if in_pairs::<L, P>() {
            sums[t] = lanes.sum_pairs(sums[t], pairs[t]);
        }
    }
    sums
}

/// Returns the products of a group with several vectors, from its bytes.
#[inline(always)]
fn sums_of_unpacked<L: Lanes, P: Packed, const T: usize>(
    lanes: L,
    quads: &[[u32; 16]],
    numbers: [&[i32]; T],
    group: usize,
    x: &[Run; T],
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
    x: &[Run; T],
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
