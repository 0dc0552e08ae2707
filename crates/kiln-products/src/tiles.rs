//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

/// Bytes of parts of vectors that stay in the second cache while weights pass by.
const CACHE: usize = 256 << 10;

/// How sixteen rows are multiplied by vectors. The product of a vector has the same bits, whichever function computes it. All of them
/// are to be inlined. Loops throughout: closures of arrays are not always inlined, and then vectors would leave their registers.
pub(crate) trait Kernel {
    /// A part of a vector
    type Run: Copy + Sync;

    /// Sixteen rows, or a part of them, as several vectors meet them.
    type Rows: Default;

    /// Runs of a part: sums of one are added up before those of the next, so that the rows of several vectors stay in the first cache.
    const PART: usize;

    /// How many vectors a tile has, so that their sums stay in registers: 8, 6 or 3.
    fn together<L: Lanes>() -> usize;

    /// Runs of a vector of so many numbers.
    fn runs(columns: usize) -> usize;

    /// The products of sixteen rows with one vector.
    fn product<L: Lanes>(lanes: L, words: &[u32], x: &[Self::Run]) -> L::Floats;

    /// Writes the products of all rows with one vector; `stride` words are of sixteen rows.
    #[inline(always)]
    fn write_products<L: Lanes>(lanes: L, words: &[u32], stride: usize, x: &[Self::Run], y: &mut [f32]) {
        for (words, y) in words.chunks(stride).zip(y.chunks_mut(SIXTEEN)) {
            store(lanes.array(Self::product(lanes, words, x)), y);
        }
    }

    /// Makes `rows` of the words of a part of sixteen rows.
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Self::Rows);

    /// The products of `rows` with `T` vectors, added to `start`.
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        rows: &Self::Rows,
        x: [&[Self::Run]; T],
        start: [L::Floats; T],
    ) -> [L::Floats; T];
}

/// Some rows of a matrix, and their part of each vector's result.
pub(crate) struct Piece<'a> {
    pub(crate) vectors: Range<usize>,
    pub(crate) words: &'a [u32],
    /// Words of sixteen rows
    pub(crate) stride: usize,
    pub(crate) y: Vec<&'a mut [f32]>,
}

/// A piece of work, in tiles.
pub(crate) struct Tiles<'a, K: Kernel> {
    pub(crate) x: &'a [K::Run],
    /// Runs of a vector
    pub(crate) runs: usize,
    pub(crate) piece: Piece<'a>,
}

impl<K: Kernel> Work for Tiles<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { x, runs, piece: Piece { vectors, words, stride, mut y } } = self;
        let x = &x[vectors.start * runs..vectors.end * runs];
        if let [y] = &mut y[..] {
            K::write_products(lanes, words, stride, x, y);
            return;
        }
        let part = K::PART.min(runs);
        let (mut rows, mut parts) = (K::Rows::default(), Vec::new());
        let together = (CACHE / (part * size_of::<K::Run>()).max(1)).next_multiple_of(8);
        for (x, y) in x.chunks(together * runs).zip(y.chunks_mut(together)) {
            for first in (0..runs).step_by(part) {
                let part = first..runs.min(first + part);
                // Next to each other, so that those of a tile are not in the same lines of the first cache.
                parts.clear();
                x.chunks(runs).for_each(|x| parts.extend_from_slice(&x[part.clone()]));
                for (i, words) in words.chunks(stride).enumerate() {
                    let words = &words[stride * part.start / runs..stride * part.end / runs];
                    K::unpack(lanes, words, &mut rows);
                    let (is_first, runs) = (first == 0, part.len());
                    let rows = SixteenRows::<K> { rows: &rows, runs, is_first, column: i * SIXTEEN };
                    let (mut x, mut y) = (&parts[..], &mut y[..]);
                    match K::together::<L>() {
                        8 => {
                            (x, y) = rows.meet::<L, 8>(lanes, x, y);
                            (x, y) = rows.meet::<L, 4>(lanes, x, y);
                        }
                        6 => {
                            (x, y) = rows.meet::<L, 6>(lanes, x, y);
                            (x, y) = rows.meet::<L, 3>(lanes, x, y);
                        }
                        _ => (x, y) = rows.meet::<L, 3>(lanes, x, y),
                    }
                    rows.meet::<L, 1>(lanes, x, y);
                }
            }
        }
    }
}

/// A part of sixteen rows that vectors meet.
struct SixteenRows<'a, K: Kernel> {
    rows: &'a K::Rows,
    /// Runs of a part of a vector
    runs: usize,
    /// Whether results are written, not added to.
    is_first: bool,
    /// Where their products are in a result
    column: usize,
}

impl<K: Kernel> SixteenRows<'_, K> {
    /// Multiplies as many vectors as there are tiles of `T`, and returns the others.
    #[inline(always)]
    fn meet<'x, 'y, 'z, L: Lanes, const T: usize>(
        &self,
        lanes: L,
        mut x: &'x [K::Run],
        mut y: &'y mut [&'z mut [f32]],
    ) -> (&'x [K::Run], &'y mut [&'z mut [f32]]) {
        while y.len() >= T {
            let (tile, others) = x.split_at(T * self.runs);
            let (results, rest) = y.split_at_mut(T);
            let (mut vectors, mut start) = ([&tile[..0]; T], [lanes.splat(0.0); T]);
            for t in 0..T {
                vectors[t] = &tile[t * self.runs..][..self.runs];
            }
            if !self.is_first {
                for t in 0..T {
                    start[t] = lanes.floats(&load(&results[t][self.column..]));
                }
            }
            let products = K::products::<L, T>(lanes, self.rows, vectors, start);
            for t in 0..T {
                store(lanes.array(products[t]), &mut results[t][self.column..]);
            }
            (x, y) = (others, rest);
        }
        (x, y)
    }
}

/// The sums of sixteen rows, or of as many as there are.
#[inline(always)]
fn load(y: &[f32]) -> [f32; SIXTEEN] {
    y.first_chunk().copied().unwrap_or_else(|| std::array::from_fn(|i| y.get(i).copied().unwrap_or(0.0)))
}

/// Writes the sums of sixteen rows, or of as many as there are.
#[inline(always)]
pub(crate) fn store(sums: [f32; SIXTEEN], y: &mut [f32]) {
    match y.first_chunk_mut::<SIXTEEN>() {
        Some(y) => *y = sums,
        None => y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
    }
}
