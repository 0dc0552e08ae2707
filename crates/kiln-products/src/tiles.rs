//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::threads::share;

/// Bytes of parts of vectors that stay in the second cache while weights pass by.
const CACHE: usize = 256 << 10;

/// Operations that copying a number of a vector takes about as long as.
const COPYING: usize = 4;

/// As many vectors as there are.
const ALL: usize = usize::MAX;

/// How sixteen rows are multiplied by vectors. The product of a vector has the same bits, whichever function computes it. All of them
/// are to be inlined. Loops throughout: closures of arrays are not always inlined, and then vectors would leave their registers.
pub(crate) trait Kernel {
    /// A part of a vector
    type Run: Copy + Default + Send + Sync;

    /// Sixteen rows, or a part of them, as several vectors meet them.
    type Rows: Default;

    /// Runs of a part: sums of one are added up before those of the next, so that the rows of several vectors stay in the first cache.
    const PART: usize;

    /// Multiplies vectors by `rows`, in tiles as large as registers allow.
    fn meet<L: Lanes>(rows: &SixteenRows<'_, Self>, lanes: L, x: &[Self::Run], y: &mut [[f32; SIXTEEN]])
    where
        Self: Sized;

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

/// Vectors, as the products of a kernel read them.
pub(crate) struct Vectors<'a, R> {
    /// One after the other
    x: &'a [R],
    /// Runs of a vector
    runs: usize,
    /// Runs of a part
    part: usize,
    /// The first part of each vector, then the second of each: next to each other, so that those of a tile are not in the same
    /// lines of the first cache. Empty if no two vectors meet the same rows.
    parts: Vec<R>,
}

impl<'a, R: Copy + Default + Send + Sync> Vectors<'a, R> {
    pub(crate) fn new<K: Kernel<Run = R>>(x: &'a [R], columns: usize, in_tiles: bool) -> Self {
        let runs = K::runs(columns);
        let part = K::PART.min(runs).max(1);
        let mut parts = vec![R::default(); if in_tiles { x.len() } else { 0 }];
        let of_each = parts.chunks_mut((part * x.len() / runs.max(1)).max(1)).enumerate().collect();
        share(COPYING * size_of_val(x), of_each, |(i, parts): (usize, &mut [R])| {
            let part = i * part..runs.min((i + 1) * part);
            let vectors = x.chunks(runs).map(|x| &x[part.clone()]);
            parts.chunks_mut(part.len()).zip(vectors).for_each(|(to, from)| to.copy_from_slice(from));
        });
        Self { x, runs, part, parts }
    }

    /// The part of some vectors that begins with run `first`.
    fn part(&self, vectors: &Range<usize>, first: usize) -> &[R] {
        let len = self.part.min(self.runs - first);
        let before = first * (self.x.len() / self.runs);
        &self.parts[before + vectors.start * len..before + vectors.end * len]
    }
}

/// A piece of work, in tiles.
pub(crate) struct Tiles<'a, K: Kernel> {
    pub(crate) x: &'a Vectors<'a, K::Run>,
    pub(crate) piece: Piece<'a>,
}

impl<K: Kernel> Work for Tiles<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { x, piece: Piece { vectors, words, stride, mut y } } = self;
        let (runs, mut from) = (x.runs, vectors.start);
        if let [y] = &mut y[..] {
            K::write_products(lanes, words, stride, &x.x[from * runs..][..runs], y);
            return;
        }
        let (mut rows, mut sums) = (K::Rows::default(), Vec::new());
        let together = (CACHE / (x.part * size_of::<K::Run>()).max(1)).next_multiple_of(8);
        for y in y.chunks_mut(together) {
            let vectors = from..from + y.len();
            from = vectors.end;
            // In the order of tiles: sixteen rows of a result are far from those of the next, and often in the same lines of a cache.
            sums.resize(words.len().div_ceil(stride) * y.len(), [0.0; SIXTEEN]);
            for first in (0..runs).step_by(x.part) {
                let parts = x.part(&vectors, first);
                let part = first..runs.min(first + x.part);
                for (words, sums) in words.chunks(stride).zip(sums.chunks_mut(y.len())) {
                    let words = &words[stride * part.start / runs..stride * part.end / runs];
                    K::unpack(lanes, words, &mut rows);
                    let rows = SixteenRows::<K> { rows: &rows, runs: part.len(), is_first: first == 0 };
                    K::meet(&rows, lanes, parts, sums);
                }
            }
            for (i, sums) in sums.chunks(y.len()).enumerate() {
                sums.iter().zip(y.iter_mut()).for_each(|(sums, y)| store(*sums, &mut y[i * SIXTEEN..]));
            }
        }
    }
}

/// A part of sixteen rows that vectors meet.
pub(crate) struct SixteenRows<'a, K: Kernel> {
    rows: &'a K::Rows,
    /// Runs of a part of a vector
    runs: usize,
    /// Whether it is the first part, with which sums begin.
    is_first: bool,
}

impl<K: Kernel> SixteenRows<'_, K> {
    /// Multiplies vectors in tiles of eight, of four and of one.
    #[inline(always)]
    pub(crate) fn in_eights<L: Lanes>(&self, lanes: L, x: &[K::Run], y: &mut [[f32; SIXTEEN]]) {
        let (x, y) = self.in_tiles::<L, 8>(lanes, x, y, ALL);
        let (x, y) = self.in_tiles::<L, 4>(lanes, x, y, ALL);
        self.in_tiles::<L, 1>(lanes, x, y, ALL);
    }

    /// Multiplies vectors in tiles of six, of four where seven or eight are left over, of three and of one: a tile of one waits for
    /// its sums.
    #[inline(always)]
    pub(crate) fn in_sixes_and_fours<L: Lanes>(&self, lanes: L, x: &[K::Run], y: &mut [[f32; SIXTEEN]]) {
        let sixes = match y.len() % 6 {
            left @ (1 | 2) if y.len() > 6 => y.len() - left - 6,
            left => y.len() - left,
        };
        let (x, y) = self.in_tiles::<L, 6>(lanes, x, y, sixes);
        let (x, y) = self.in_tiles::<L, 4>(lanes, x, y, ALL);
        self.in_threes(lanes, x, y);
    }

    /// Multiplies vectors in tiles of six, of three and of one.
    #[inline(always)]
    pub(crate) fn in_sixes<L: Lanes>(&self, lanes: L, x: &[K::Run], y: &mut [[f32; SIXTEEN]]) {
        let (x, y) = self.in_tiles::<L, 6>(lanes, x, y, ALL);
        self.in_threes(lanes, x, y);
    }

    /// Multiplies vectors in tiles of three and of one.
    #[inline(always)]
    pub(crate) fn in_threes<L: Lanes>(&self, lanes: L, x: &[K::Run], y: &mut [[f32; SIXTEEN]]) {
        let (x, y) = self.in_tiles::<L, 3>(lanes, x, y, ALL);
        self.in_tiles::<L, 1>(lanes, x, y, ALL);
    }

    /// Multiplies the tiles of `T` vectors that there are, of `most` vectors, and returns the others.
    #[inline(always)]
    fn in_tiles<'x, 'y, L: Lanes, const T: usize>(
        &self,
        lanes: L,
        x: &'x [K::Run],
        y: &'y mut [[f32; SIXTEEN]],
        most: usize,
    ) -> (&'x [K::Run], &'y mut [[f32; SIXTEEN]]) {
        let vectors = most.min(y.len()) / T * T;
        let (x, other_x) = x.split_at(vectors * self.runs);
        let (y, other_y) = y.split_at_mut(vectors);
        if vectors > 0 {
            lanes.call(TilesOf::<K, T> { rows: self, x, y });
        }
        (other_x, other_y)
    }
}

/// Tiles of `T` vectors.
struct TilesOf<'a, K: Kernel, const T: usize> {
    rows: &'a SixteenRows<'a, K>,
    x: &'a [K::Run],
    y: &'a mut [[f32; SIXTEEN]],
}

impl<K: Kernel, const T: usize> Work for TilesOf<'_, K, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let &SixteenRows { rows, runs, is_first } = self.rows;
        for (tile, results) in self.x.chunks_exact(T * runs).zip(self.y.as_chunks_mut::<T>().0) {
            let (mut vectors, mut start) = ([&tile[..0]; T], [lanes.splat(0.0); T]);
            for t in 0..T {
                vectors[t] = &tile[t * runs..][..runs];
            }
            if !is_first {
                for t in 0..T {
                    start[t] = lanes.floats(&results[t]);
                }
            }
            let products = K::products::<L, T>(lanes, rows, vectors, start);
            for t in 0..T {
                results[t] = lanes.array(products[t]);
            }
        }
    }
}

/// Writes the sums of sixteen rows, or of as many as there are.
#[inline(always)]
pub(crate) fn store(sums: [f32; SIXTEEN], y: &mut [f32]) {
    match y.first_chunk_mut::<SIXTEEN>() {
        Some(y) => *y = sums,
        None => y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
    }
}
