//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::threads::share;

/// Number of bytes of vectors that stay in the second-level cache while weights pass by.
const CACHE: usize = 256 << 10;

/// Number of operations that take about as long as copying one element of a vector.
const COPYING: usize = 4;

/// No limit on the number of vectors.
const ALL: usize = usize::MAX;

/// How sixteen rows are multiplied by vectors. The product of a vector has the same bits, whichever function
/// computes it.
///
/// All functions must be inlined. They use loops throughout: closures over arrays are not always inlined, and
/// then vectors would leave their registers.
pub(crate) trait Kernel {
    /// A part of a vector.
    type Run: Copy + Default + Send + Sync;

    /// Sixteen rows, or a part of them, in the form in which several vectors are multiplied by them.
    type Rows: Default;

    /// Number of runs per part. The sums over one part are completed before those over the next, so that the
    /// rows for several vectors stay in the first-level cache.
    const PART: usize;

    /// Multiplies vectors by `rows`, in tiles as large as registers allow.
    fn meet<L: Lanes>(rows: &SixteenRows<'_, Self>, lanes: L, x: &[Self::Run], y: &mut [[f32; SIXTEEN]])
    where
        Self: Sized;

    /// Number of runs of a vector with `columns` elements.
    fn runs(columns: usize) -> usize;

    /// Returns the products of sixteen rows with one vector.
    fn product<L: Lanes>(lanes: L, words: &[u32], x: &[Self::Run]) -> L::Floats;

    /// Writes the products of all rows with one vector; each sixteen rows take `stride` words.
    #[inline(always)]
    fn write_products<L: Lanes>(lanes: L, words: &[u32], stride: usize, x: &[Self::Run], y: &mut [f32]) {
        for (words, y) in words.chunks(stride).zip(y.chunks_mut(SIXTEEN)) {
            store(lanes.array(Self::product(lanes, words, x)), y);
        }
    }

    /// Unpacks the words of a part of sixteen rows into `rows`.
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Self::Rows);

    /// Returns the products of `rows` with `T` vectors, added to `start`.
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
    /// Number of words of sixteen rows.
    pub(crate) stride: usize,
    pub(crate) y: Vec<&'a mut [f32]>,
}

/// Vectors, in the form in which the products of a kernel read them.
pub(crate) struct Vectors<'a, R> {
    /// One vector after the other.
    x: &'a [R],
    /// Number of runs per vector.
    runs: usize,
    /// Number of runs per part.
    part: usize,
    /// The first part of each vector, then the second part of each. They are adjacent, so that those of a
    /// tile do not compete for the same lines of the first-level cache. Empty if no two vectors are
    /// multiplied by the same rows.
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

    /// Returns the part of some vectors that begins with run `first`.
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
            // In the order of tiles: in a result, sixteen rows are far from the next sixteen, and often
            // compete for the same cache lines.
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

/// A part of sixteen rows, to be multiplied by vectors.
pub(crate) struct SixteenRows<'a, K: Kernel> {
    rows: &'a K::Rows,
    /// Number of runs in a part of a vector.
    runs: usize,
    /// Whether this is the first part, with which sums begin.
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

    /// Multiplies vectors in tiles of six, of four if seven or eight are left over, of three and of one: a
    /// tile of one has to wait for its sums.
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

    /// Multiplies whole tiles of `T` vectors, out of the first `most` vectors, and returns the remaining
    /// vectors.
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

/// Writes the sums of sixteen rows, or of as many as `y` has.
#[inline(always)]
pub(crate) fn store(sums: [f32; SIXTEEN], y: &mut [f32]) {
    match y.first_chunk_mut::<SIXTEEN>() {
        Some(y) => *y = sums,
        None => y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
    }
}
