//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

/// Bytes of vectors that stay in the second cache while weights pass by.
const CACHE: usize = 256 << 10;

/// How sixteen rows are multiplied by vectors. The product of a vector has the same bits, whichever function computes it. All of them
/// are to be inlined. Loops throughout: closures of arrays are not always inlined, and then vectors would leave their registers.
pub(crate) trait Kernel {
    /// A part of a vector
    type Run: Sync;

    /// Sixteen rows as several vectors meet them.
    type Rows: Default;

    /// How many vectors a tile has, so that their sums stay in registers: 8, 6 or 3.
    fn together<L: Lanes>() -> usize;

    /// Runs of a vector of so many numbers.
    fn runs(columns: usize) -> usize;

    /// The products of sixteen rows with one vector.
    fn product<L: Lanes>(lanes: L, words: &[u32], rows: &mut Self::Rows, x: &[Self::Run]) -> L::Floats;

    /// Makes `rows` of the words of sixteen rows.
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Self::Rows);

    /// The products of sixteen rows, which are in `rows`, with `T` vectors.
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        words: &[u32],
        rows: &Self::Rows,
        x: [&[Self::Run]; T],
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
        let mut rows = K::Rows::default();
        if let [y] = &mut y[..] {
            for (words, y) in words.chunks(stride).zip(y.chunks_mut(SIXTEEN)) {
                store(lanes.array(K::product(lanes, words, &mut rows, x)), y);
            }
            return;
        }
        let together = (CACHE / (runs * size_of::<K::Run>()).max(1)).next_multiple_of(8);
        for (x, y) in x.chunks(together * runs).zip(y.chunks_mut(together)) {
            for (i, words) in words.chunks(stride).enumerate() {
                let (mut x, mut y) = (x, &mut y[..]);
                K::unpack(lanes, words, &mut rows);
                let rows = SixteenRows::<K> { words, rows: &rows, column: i * SIXTEEN };
                match K::together::<L>() {
                    8 => {
                        (x, y) = rows.meet::<L, 8>(lanes, x, runs, y);
                        (x, y) = rows.meet::<L, 4>(lanes, x, runs, y);
                    }
                    6 => {
                        (x, y) = rows.meet::<L, 6>(lanes, x, runs, y);
                        (x, y) = rows.meet::<L, 3>(lanes, x, runs, y);
                    }
                    _ => (x, y) = rows.meet::<L, 3>(lanes, x, runs, y),
                }
                rows.meet::<L, 1>(lanes, x, runs, y);
            }
        }
    }
}

/// Sixteen rows that vectors meet.
struct SixteenRows<'a, K: Kernel> {
    words: &'a [u32],
    rows: &'a K::Rows,
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
        runs: usize,
        mut y: &'y mut [&'z mut [f32]],
    ) -> (&'x [K::Run], &'y mut [&'z mut [f32]]) {
        while y.len() >= T {
            let (tile, others) = x.split_at(T * runs);
            let (results, rest) = y.split_at_mut(T);
            let mut vectors = [&tile[..0]; T];
            for t in 0..T {
                vectors[t] = &tile[t * runs..(t + 1) * runs];
            }
            let products = K::products::<L, T>(lanes, self.words, self.rows, vectors);
            for t in 0..T {
                store(lanes.array(products[t]), &mut results[t][self.column..]);
            }
            (x, y) = (others, rest);
        }
        (x, y)
    }
}

/// Writes the sums of sixteen rows, or of as many as there are.
#[inline(always)]
fn store(sums: [f32; SIXTEEN], y: &mut [f32]) {
    match y.first_chunk_mut::<SIXTEEN>() {
        Some(y) => *y = sums,
        None => y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
    }
}
