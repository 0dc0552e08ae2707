//! Scores of packed keys.
//!
//! A lane is a key: words are transposed, and codes become floats in registers, where they are multiplied by
//! the queries. The scale of a channel is multiplied into the query, once for all keys of a group. The scale
//! of a token is multiplied by the sum over its group. The contribution of the offsets is one product per
//! group.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use kiln_simd::{Lanes, Work};

use super::{
    codes::{Codes, Run, dot},
    few::Scores,
    segments::{LANES, SEGMENT, Segment},
};

/// Number of keys that are transposed at a time: two vectors of them.
const TILE: usize = 2 * LANES;

/// Words of a tile, transposed.
type Block = [[u32; TILE]; LANES];

/// Computes the scores of several queries over the same keys.
pub(super) struct Scorer<'a> {
    keys: Codes<'a>,
    runs: Vec<Run>,
    rows: usize,
    /// Number of places for codes in the words of a token.
    places: usize,
    /// `[rows, places]`, and the factors of codes in their places, which are too large by powers of 2.
    queries: Vec<f32>,
    shrunk: Vec<f32>,
    /// `shrunk`, times the scales of a group of tokens.
    scaled: Vec<f32>,
    /// `[rows, runs]`: factors of the offsets.
    sums: Vec<f32>,
    /// For a segment: `[groups, SEGMENT]`. Ones if scales belong to channels.
    scales: Vec<f32>,
    offsets: Vec<f32>,
    block: Block,
}

impl<'a> Scorer<'a> {
    /// Prepares queries `given`: `[rows, head_dim]`.
    pub(super) fn new(keys: Codes<'a>, given: &[f32]) -> Self {
        let (rows, runs, codes) = (given.len() / keys.head_dim, keys.runs(), keys.codes);
        let places = keys.width * codes;
        let (mut queries, mut sums) = (vec![0.0; rows * places], vec![0.0; rows * runs.len()]);
        for (r, query) in given.chunks_exact(keys.head_dim).enumerate() {
            let placed = &mut queries[r * places..][..places];
            keys.place(query, placed);
            for (run, sum) in runs.iter().zip(&mut sums[r * runs.len()..]) {
                let first = if keys.tokens.is_some() { 0.0 } else { 1.0 };
                *sum = first * placed[run.first * codes..][..run.len * codes].iter().sum::<f32>();
            }
        }
        let mut shrunk = queries.clone();
        keys.shrink(&mut shrunk);
        let (scaled, of_groups) = (shrunk.clone(), vec![1.0; keys.groups * SEGMENT]);
        let (scales, offsets, block) = (of_groups.clone(), of_groups, [[0; TILE]; LANES]);
        Self { keys, runs, rows, places, queries, shrunk, scaled, sums, scales, offsets, block }
    }

    #[inline(always)]
    fn write_bits<L: Lanes, const BITS: usize, const CODES: usize, const SHIFT: usize>(
        &mut self,
        lanes: L,
        segment: Segment,
        scores: &mut [f32],
        stride: usize,
    ) {
        self.scale(segment);
        let width = self.keys.width;
        for tile in (0..segment.len).step_by(TILE) {
            let mut run = 0;
            for column in (0..width).step_by(LANES) {
                let tokens = TILE.min(segment.len - tile);
                self.transpose(lanes, segment.slot + tile, tokens, column);
                while run < self.runs.len() && self.runs[run].first < column + LANES {
                    let mut row = 0;
                    while row < self.rows {
                        let scores = &mut scores[row * stride + tile..];
                        let place = [row, run, tile, stride];
                        row += match self.rows - row {
                            4.. => self.meet::<L, BITS, CODES, SHIFT, 4>(lanes, scores, place),
                            3 => self.meet::<L, BITS, CODES, SHIFT, 3>(lanes, scores, place),
                            2 => self.meet::<L, BITS, CODES, SHIFT, 2>(lanes, scores, place),
                            _ => self.meet::<L, BITS, CODES, SHIFT, 1>(lanes, scores, place),
                        };
                    }
                    run += 1;
                }
            }
        }
    }

    /// Reads the scales of a segment.
    #[inline(always)]
    fn scale(&mut self, segment: Segment) {
        let Self { keys, rows, places, .. } = *self;
        if keys.tokens.is_none() {
            keys.scales_of_tokens(segment, &mut self.scales, &mut self.offsets);
            return;
        }
        let (mut scales, mut offsets) = (vec![0.0; places], vec![0.0; places]);
        keys.scales_of_channels(segment, &mut scales, &mut offsets);
        for r in 0..rows {
            let query = &self.queries[r * places..][..places];
            let shrunk = &self.shrunk[r * places..][..places];
            let scaled = &mut self.scaled[r * places..][..places];
            for i in 0..places {
                scaled[i] = shrunk[i] * scales[i];
            }
            self.sums[r * self.runs.len()] = dot(query, &offsets);
        }
    }

    /// Transposes the words of these slots from a column on. Entries beyond them are unchanged.
    #[inline(always)]
    fn transpose<L: Lanes>(&mut self, lanes: L, slot: usize, tokens: usize, column: usize) {
        let width = self.keys.width;
        let words = &self.keys.words[slot * width..][..tokens * width];
        if tokens == TILE && LANES.is_multiple_of(width) {
            let block = &mut self.block;
            match width {
                16 => lanes.call(Transposition::<16> { words, block }),
                8 => lanes.call(Transposition::<8> { words, block }),
                4 => lanes.call(Transposition::<4> { words, block }),
                2 => lanes.call(Transposition::<2> { words, block }),
                _ => lanes.call(Transposition::<1> { words, block }),
            }
            return;
        }
        let len = LANES.min(width - column);
        for (t, words) in words.chunks_exact(width).enumerate() {
            for (block, word) in self.block.iter_mut().zip(&words[column..][..len]) {
                block[t] = *word;
            }
        }
    }

    /// Adds the scores of M rows over a run of words.
    #[inline(always)]
    fn meet<L: Lanes, const BITS: usize, const CODES: usize, const SHIFT: usize, const M: usize>(
        &self,
        lanes: L,
        scores: &mut [f32],
        [row, run, tile, stride]: [usize; 4],
    ) -> usize {
        let Run { first, len, group } = self.runs[run];
        let (mut queries, mut sums) = ([&[][..]; M], [0.0; M]);
        for m in 0..M {
            queries[m] = self.scaled[(row + m) * self.places + first * CODES..][..len * CODES].as_chunks().0;
            sums[m] = self.sums[(row + m) * self.runs.len() + run];
        }
        let words = &self.block[first % LANES..][..len];
        let at = group.min(self.scales.len() / SEGMENT - 1) * SEGMENT + tile;
        let (scales, offsets) = (self.scales[at..].as_chunks().0, self.offsets[at..].as_chunks().0);
        let is_first = run == 0;
        let meeting = Meeting { words, queries, sums, scales, offsets, is_first, scores, stride };
        if const { L::REGISTERS >= 32 } {
            lanes.call(Together::<BITS, CODES, SHIFT, M, 2>(meeting));
        } else {
            lanes.call(Together::<BITS, CODES, SHIFT, M, 1>(meeting));
        }
        M
    }
}

impl Scores for Scorer<'_> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, lanes: L, segment: Segment, scores: &mut [f32], stride: usize) {
        match self.keys.bits {
            1 => self.write_bits::<L, 1, 32, 4>(lanes, segment, scores, stride),
            2 => self.write_bits::<L, 2, 16, 4>(lanes, segment, scores, stride),
            3 => self.write_bits::<L, 3, 10, 5>(lanes, segment, scores, stride),
            4 => self.write_bits::<L, 4, 8, 4>(lanes, segment, scores, stride),
            _ => self.write_bits::<L, 8, 4, 2>(lanes, segment, scores, stride),
        }
    }
}

/// M queries and two vectors of keys, multiplied over a shared run of words.
struct Meeting<'a, const CODES: usize, const M: usize> {
    words: &'a [[u32; TILE]],
    queries: [&'a [[f32; CODES]]; M],
    /// Factors of the offsets.
    sums: [f32; M],
    scales: &'a [[f32; LANES]],
    offsets: &'a [[f32; LANES]],
    /// Whether scores are written instead of added to.
    is_first: bool,
    scores: &'a mut [f32],
    stride: usize,
}

/// A [`Meeting`] with T vectors of keys at a time: as many as have registers for their sums.
struct Together<'a, const BITS: usize, const CODES: usize, const SHIFT: usize, const M: usize, const T: usize>(
    Meeting<'a, CODES, M>,
);

impl<const BITS: usize, const CODES: usize, const SHIFT: usize, const M: usize, const T: usize> Work
    for Together<'_, BITS, CODES, SHIFT, M, T>
{
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Meeting { words, mut queries, sums: of_offsets, scales, offsets, is_first, scores, stride } =
            self.0;
        for m in 0..M {
            queries[m] = &queries[m][..words.len()];
        }
        for first in (0..2).step_by(T) {
            let mut sums = [[lanes.splat(0.0); T]; M];
            for (i, words) in words.iter().enumerate() {
                let halves = words.as_chunks::<LANES>().0;
                let mut rest = [lanes.integers(0); T];
                for t in 0..T {
                    rest[t] = lanes.words(&halves[first + t]);
                }
                for shift in 0..CODES / SHIFT {
                    for c in 0..SHIFT {
                        let mask = ((1u32 << BITS) - 1) << (c * BITS);
                        let mut code = [lanes.splat(0.0); T];
                        for t in 0..T {
                            code[t] = lanes.to_floats(lanes.and(rest[t], mask));
                        }
                        for m in 0..M {
                            let query = lanes.splat(queries[m][i][shift * SHIFT + c]);
                            for t in 0..T {
                                sums[m][t] = lanes.mul_add(code[t], query, sums[m][t]);
                            }
                        }
                    }
                    for t in 0..T {
                        rest[t] = lanes.shift_right(rest[t], (SHIFT * BITS) as u32);
                    }
                }
            }
            for m in 0..M {
                let scores = scores[m * stride..].as_chunks_mut::<LANES>().0;
                let sum = lanes.splat(of_offsets[m]);
                for t in 0..T {
                    let half = first + t;
                    let before = if is_first { lanes.splat(0.0) } else { lanes.floats(&scores[half]) };
                    let scaled = lanes.mul_add(sums[m][t], lanes.floats(&scales[half]), before);
                    scores[half] = lanes.array(lanes.mul_add(lanes.floats(&offsets[half]), sum, scaled));
                }
            }
        }
    }
}

/// Words of [`TILE`] tokens, `WIDTH` words each, to be transposed.
struct Transposition<'a, const WIDTH: usize> {
    words: &'a [u32],
    block: &'a mut Block,
}

impl<const WIDTH: usize> Work for Transposition<'_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let words = self.words.as_chunks::<LANES>().0;
        for half in 0..2 {
            let mut vectors = [lanes.integers(0); WIDTH];
            for i in 0..WIDTH {
                vectors[i] = lanes.words(&words[half * WIDTH + i]);
            }
            // Each step halves the distance between the words of a column.
            for _ in 0..WIDTH.ilog2() {
                let before = vectors;
                for i in 0..WIDTH / 2 {
                    [vectors[i], vectors[WIDTH / 2 + i]] = lanes.unzip(before[2 * i], before[2 * i + 1]);
                }
            }
            for i in 0..WIDTH {
                self.block[i].as_chunks_mut::<LANES>().0[half] = lanes.word_array(vectors[i]);
            }
        }
    }
}
