//! Keys and values as numbers: float32, float16 or bfloat16.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};

use super::{
    few::{Mixes, Scores},
    segments::{LANES, Segment},
};
use crate::formats::Plain;

/// Number of keys whose sums are in registers together.
const KEYS: usize = 4;

/// Number of keys that stay in the first-level cache while they are multiplied by the queries of all rows.
const TILE: usize = 16;

/// Keys and values of one head, slot by slot.
#[derive(Clone, Copy, Debug)]
pub struct Dense<'a> {
    pub numbers: Numbers<'a>,
    /// Widths of a key and of a value.
    pub widths: [usize; 2],
    /// Distance from one key to the next, and from one value to the next.
    pub strides: [usize; 2],
    /// Whether each key is followed by its value, so that queries are as wide as both.
    pub latent: bool,
}

/// Keys and values of one type; 16-bit numbers are given by their bits.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    Float32([&'a [f32]; 2]),
    Float16([&'a [u16]; 2]),
    Bfloat16([&'a [u16]; 2]),
}

/// Vectors, each `stride` numbers after the previous one.
pub(super) struct Vectors<'a, N: Plain> {
    numbers: &'a [N::Number],
    width: usize,
    stride: usize,
}

impl<'a, N: Plain> Vectors<'a, N> {
    pub(super) fn new(numbers: &'a [N::Number], width: usize, stride: usize) -> Self {
        Self { numbers, width, stride }
    }

    /// The part of the vector in `slot`.
    #[inline(always)]
    fn part(&self, slot: usize, part: Range<usize>) -> &'a [N::Number] {
        &self.numbers[slot * self.stride..][part]
    }
}

/// The last numbers of a vector, followed by zeros.
#[inline(always)]
fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut padded = [T::default(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

/// Computes the scores of several queries over the same keys. The score of a query and a key has the same
/// bits whatever is computed beside it.
pub(super) struct DenseScorer<'a, N: Plain> {
    /// The vectors that a key consists of.
    parts: Vec<Vectors<'a, N>>,
    /// For each part `[rows, width]`, in whole vectors.
    queries: Vec<Vec<[f32; LANES]>>,
    rows: usize,
}

impl<'a, N: Plain> DenseScorer<'a, N> {
    /// Prepares queries `[rows, width]`, as wide as all parts.
    pub(super) fn new(parts: Vec<Vectors<'a, N>>, queries: &[f32], rows: usize) -> Self {
        let width = queries.len() / rows.max(1);
        let mut first = 0;
        let of_part = |part: &Vectors<'_, N>| {
            let own = queries.chunks_exact(width).map(|query| &query[first..first + part.width]);
            let vectors = own.flat_map(|query| query.chunks(LANES).map(padded)).collect();
            first += part.width;
            vectors
        };
        let queries = parts.iter().map(of_part).collect();
        Self { parts, queries, rows }
    }
}

impl<N: Plain> Scores for DenseScorer<'_, N> {
    #[inline(always)]
    fn write<L: Lanes>(&mut self, lanes: L, segment: Segment, scores: &mut [f32], stride: usize) {
        for (index, (part, queries)) in self.parts.iter().zip(&self.queries).enumerate() {
            for first in (0..segment.len).step_by(TILE) {
                let tile = Tile {
                    part,
                    queries,
                    slot: segment.slot + first,
                    len: TILE.min(segment.len - first),
                    is_first: index == 0,
                    stride,
                };
                let mut row = 0;
                while row < self.rows {
                    let scores = &mut scores[row * stride + first..];
                    row += if const { L::REGISTERS >= 32 } {
                        match self.rows - row {
                            4.. => tile.score::<L, 4>(lanes, row, scores),
                            3 => tile.score::<L, 3>(lanes, row, scores),
                            2 => tile.score::<L, 2>(lanes, row, scores),
                            _ => tile.score::<L, 1>(lanes, row, scores),
                        }
                    } else {
                        tile.score::<L, 1>(lanes, row, scores)
                    };
                }
            }
        }
    }
}

/// Adjacent keys, and the queries of all rows.
struct Tile<'a, N: Plain> {
    part: &'a Vectors<'a, N>,
    queries: &'a [[f32; LANES]],
    slot: usize,
    len: usize,
    /// Whether scores are written instead of added to.
    is_first: bool,
    stride: usize,
}

impl<N: Plain> Tile<'_, N> {
    /// Computes the scores of M rows from `row` on. Returns M.
    #[inline(always)]
    fn score<L: Lanes, const M: usize>(&self, lanes: L, row: usize, scores: &mut [f32]) -> usize {
        let vectors = self.part.width.div_ceil(LANES);
        let mut queries = [&[][..]; M];
        for m in 0..M {
            queries[m] = &self.queries[(row + m) * vectors..][..vectors];
        }
        lanes.call(Dots { tile: self, queries, ahead: row == 0, scores });
        M
    }
}

/// The scores of M rows.
struct Dots<'a, N: Plain, const M: usize> {
    tile: &'a Tile<'a, N>,
    queries: [&'a [[f32; LANES]]; M],
    /// Whether later keys are requested from memory.
    ahead: bool,
    scores: &'a mut [f32],
}

impl<N: Plain, const M: usize> Work for Dots<'_, N, M> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { tile: &Tile { part, slot, len, is_first, stride, .. }, queries, ahead, scores } = self;
        let whole = part.width / LANES;
        for first in (0..len).step_by(KEYS) {
            let (mut keys, mut vectors) = ([&[][..]; KEYS], [&[][..]; KEYS]);
            for n in 0..KEYS {
                // Beyond the last key, the last one is scored again; these scores are not read.
                keys[n] = part.part(slot + (first + n).min(len - 1), 0..part.width);
                vectors[n] = &keys[n].as_chunks::<LANES>().0[..whole];
                if ahead {
                    lanes.prefetch(keys[n]);
                }
            }
            let mut sums = [[lanes.splat(0.0); KEYS]; M];
            for i in 0..whole {
                let mut of_rows = [lanes.splat(0.0); M];
                for m in 0..M {
                    of_rows[m] = lanes.floats(&queries[m][i]);
                }
                for n in 0..KEYS {
                    let key = N::floats(lanes, &vectors[n][i]);
                    for m in 0..M {
                        sums[m][n] = lanes.mul_add(key, of_rows[m], sums[m][n]);
                    }
                }
            }
            if whole * LANES < part.width {
                for n in 0..KEYS {
                    let key = N::floats(lanes, &padded(&keys[n][whole * LANES..]));
                    for m in 0..M {
                        sums[m][n] = lanes.mul_add(key, lanes.floats(&queries[m][whole]), sums[m][n]);
                    }
                }
            }
            for m in 0..M {
                let sums = lanes.sums(sums[m]);
                let scores = &mut scores[m * stride + first..][..KEYS];
                for n in 0..KEYS {
                    scores[n] = if is_first { sums[n] } else { scores[n] + sums[n] };
                }
            }
        }
    }
}

/// Sums of weighted values. The sums of a row have the same bits whatever is computed beside them.
pub(super) struct DenseMixer<'a, N: Plain> {
    values: Vectors<'a, N>,
    rows: usize,
    /// `[rows, width]`, in whole vectors.
    mixed: Vec<[f32; LANES]>,
    /// The last numbers of each value of a segment, if they do not fill a vector.
    rests: Vec<[N::Number; LANES]>,
}

impl<'a, N: Plain> DenseMixer<'a, N> {
    pub(super) fn new(values: Vectors<'a, N>, rows: usize) -> Self {
        let mixed = vec![[0.0; LANES]; rows * values.width.div_ceil(LANES)];
        Self { values, rows, mixed, rests: Vec::new() }
    }
}

impl<N: Plain> Mixes for DenseMixer<'_, N> {
    #[inline(always)]
    fn add<L: Lanes>(&mut self, lanes: L, segment: Segment, weights: &[f32], stride: usize) {
        let Self { values, rows, mixed, rests } = self;
        let (whole, vectors) = (values.width / LANES, values.width.div_ceil(LANES));
        let Segment { slot, len, .. } = segment;
        let mut columns = Columns { values, slot, len, column: 0, rows: *rows, weights, stride };
        while columns.column < whole {
            let mixed = &mut mixed[columns.column..];
            columns.column += if const { L::REGISTERS >= 32 } {
                match whole - columns.column {
                    4.. => columns.add::<L, 4>(lanes, mixed, vectors),
                    2.. => columns.add::<L, 2>(lanes, mixed, vectors),
                    _ => columns.add::<L, 1>(lanes, mixed, vectors),
                }
            } else {
                match whole - columns.column {
                    2.. => columns.add::<L, 2>(lanes, mixed, vectors),
                    _ => columns.add::<L, 1>(lanes, mixed, vectors),
                }
            };
        }
        if whole < vectors {
            let rest = |slot| padded(values.part(slot, whole * LANES..values.width));
            rests.clear();
            rests.extend((slot..slot + len).map(rest));
            let values = Vectors::<N>::new(rests.as_flattened(), LANES, LANES);
            let columns = Columns { values: &values, slot: 0, column: 0, ..columns };
            columns.add::<L, 1>(lanes, &mut mixed[whole..], vectors);
        }
    }

    #[inline(always)]
    fn write(&self, row: usize, mixed: &mut [f32]) {
        let vectors = self.values.width.div_ceil(LANES);
        let sums = self.mixed[row * vectors..][..vectors].as_flattened();
        mixed.copy_from_slice(&sums[..mixed.len()]);
    }
}

/// Some vectors of adjacent values, and the weights of all rows.
#[derive(Clone, Copy)]
struct Columns<'a, N: Plain> {
    values: &'a Vectors<'a, N>,
    slot: usize,
    len: usize,
    /// The first vector of each value.
    column: usize,
    rows: usize,
    weights: &'a [f32],
    /// Distance between the weights of two rows.
    stride: usize,
}

impl<N: Plain> Columns<'_, N> {
    /// Adds C vectors of each value to `mixed`, in which rows are `vectors` apart. Returns C.
    #[inline(always)]
    fn add<L: Lanes, const C: usize>(&self, lanes: L, mixed: &mut [[f32; LANES]], vectors: usize) -> usize {
        let mut row = 0;
        while row < self.rows {
            let mixed = &mut mixed[row * vectors..];
            row += if const { L::REGISTERS >= 32 } {
                match self.rows - row {
                    4.. => self.add_rows::<L, 4, C>(lanes, row, mixed, vectors),
                    3 => self.add_rows::<L, 3, C>(lanes, row, mixed, vectors),
                    2 => self.add_rows::<L, 2, C>(lanes, row, mixed, vectors),
                    _ => self.add_rows::<L, 1, C>(lanes, row, mixed, vectors),
                }
            } else {
                match self.rows - row {
                    2.. => self.add_rows::<L, 2, C>(lanes, row, mixed, vectors),
                    _ => self.add_rows::<L, 1, C>(lanes, row, mixed, vectors),
                }
            };
        }
        C
    }

    #[inline(always)]
    fn add_rows<L: Lanes, const M: usize, const C: usize>(
        &self,
        lanes: L,
        row: usize,
        mixed: &mut [[f32; LANES]],
        vectors: usize,
    ) -> usize {
        let mut weights = [&[][..]; M];
        for m in 0..M {
            weights[m] = &self.weights[(row + m) * self.stride..][..self.len];
        }
        lanes.call(Mix::<N, M, C> { columns: self, ahead: row == 0, weights, mixed, vectors });
        M
    }
}

/// M rows and C vectors of values.
struct Mix<'a, N: Plain, const M: usize, const C: usize> {
    columns: &'a Columns<'a, N>,
    /// Whether later values are requested from memory.
    ahead: bool,
    weights: [&'a [f32]; M],
    mixed: &'a mut [[f32; LANES]],
    vectors: usize,
}

impl<N: Plain, const M: usize, const C: usize> Work for Mix<'_, N, M, C> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { columns: &Columns { values, slot, len, column, .. }, ahead, weights, mixed, vectors } =
            self;
        let mut sums = [[lanes.splat(0.0); C]; M];
        for m in 0..M {
            for c in 0..C {
                sums[m][c] = lanes.floats(&mixed[m * vectors + c]);
            }
        }
        for key in 0..len {
            let value = values.part(slot + key, column * LANES..(column + C) * LANES);
            if ahead {
                lanes.prefetch(value);
            }
            let value = value.as_chunks::<LANES>().0;
            for c in 0..C {
                let number = N::floats(lanes, &value[c]);
                for m in 0..M {
                    sums[m][c] = lanes.mul_add(lanes.splat(weights[m][key]), number, sums[m][c]);
                }
            }
        }
        for m in 0..M {
            for c in 0..C {
                mixed[m * vectors + c] = lanes.array(sums[m][c]);
            }
        }
    }
}
