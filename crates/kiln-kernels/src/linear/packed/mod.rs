//! Products with packed matrices on the CPU, computed from the codes.
//!
//! Decoding reads every weight once a token, so it takes as long as reading does: bits are speed. A lane is a row of the matrix
//! ([`kiln_simd`]), and sixteen rows meet a few vectors at a time. In integers (`integers.rs`), vectors become signed bytes with a scale for each
//! 32, and a product of two bytes is exact. In floats (`floats.rs`), codes become float32 in registers.
//!
//! A number of the result is one sum in one order. So its bits do not depend on how many vectors are multiplied together,
//! or on how rows are shared among threads.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

mod floats;
mod formats;
mod integers;

use std::ops::Range;

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::{Order, SIXTEEN};

use self::formats::{Packed, Plain, RUN, Visitor};
use crate::{
    Arithmetic, PackedLayout,
    native::{ONE_THREAD, pieces, share},
};

/// Bytes of vectors that stay in the second cache while weights pass by.
const CACHE: usize = 256 << 10;

/// Bytes of packed weights, once for each vector, that take more time to multiply than it takes to share them.
const WORTH_SHARING: usize = 512 << 10;

/// Vectors that meet the same rows.
pub(crate) struct Group<'a> {
    /// Which of all vectors they are.
    pub(crate) vectors: Range<usize>,
    /// The words of the rows
    pub(crate) words: &'a [u32],
    /// The result of each vector, as long as there are rows.
    pub(crate) y: Vec<&'a mut [f32]>,
}

/// The products of each group of vectors `x` `[vectors, columns]`, with matrices in [`Order::Sixteens`]. `None` where words are not
/// those of the rows, and then some results may be written.
pub(crate) fn products_of_groups(
    x: &[f32],
    columns: usize,
    PackedLayout { format, order }: PackedLayout,
    arithmetic: Arithmetic,
    groups: Vec<Group<'_>>,
) -> Option<()> {
    let stride = format.words(order, SIXTEEN, columns).filter(|stride| *stride > 0)?;
    if order != Order::Sixteens {
        return None;
    }
    // Few vectors take as long as memory does, and many take as long as sums do: what counts is bytes.
    let bytes: usize = groups.iter().map(|group| size_of_val(group.words) * group.y.len()).sum();
    let worth = bytes / (WORTH_SHARING / ONE_THREAD);
    let pieces_of_each = pieces(worth).div_ceil(groups.len().max(1));
    let mut all = Vec::new();
    for Group { vectors, words, y } in groups {
        let rows = y.first().map_or(0, |y| y.len());
        if rows == 0 || words.len() != rows.div_ceil(SIXTEEN) * stride || vectors.len() != y.len() {
            return None;
        }
        let sixteens = rows.div_ceil(SIXTEEN).div_ceil(pieces_of_each);
        let first = all.len();
        let piece = |words| Piece { vectors: vectors.clone(), words, stride, y: Vec::with_capacity(y.len()) };
        all.extend(words.chunks(sixteens * stride).map(piece));
        for row in y {
            let parts = row.chunks_mut(sixteens * SIXTEEN);
            all[first..].iter_mut().zip(parts).for_each(|(piece, part)| piece.y.push(part));
        }
    }
    formats::visit(format, Products { x, columns, arithmetic, worth, pieces: all });
    Some(())
}

/// Some rows of a matrix, and their part of each vector's result.
struct Piece<'a> {
    vectors: Range<usize>,
    words: &'a [u32],
    /// Words of sixteen rows
    stride: usize,
    y: Vec<&'a mut [f32]>,
}

struct Products<'a> {
    x: &'a [f32],
    columns: usize,
    arithmetic: Arithmetic,
    /// Pairs of numbers whose products take about as long
    worth: usize,
    pieces: Vec<Piece<'a>>,
}

impl Products<'_> {
    fn compute<K: Kernel>(self, x: &[K::Run]) {
        let runs = K::runs(self.columns);
        share(self.worth, self.pieces, |piece| kiln_simd::run(Tiles::<K> { x, runs, piece }));
    }
}

impl Visitor for Products<'_> {
    fn packed<P: Packed>(self) {
        match self.arithmetic {
            Arithmetic::Integers => {
                let x = in_runs(self.x, |x, runs| kiln_simd::run(integers::Rounding::<P>::new(x, runs)));
                self.compute::<integers::Integers<P>>(&x);
            }
            Arithmetic::Floats => {
                let x = in_runs(self.x, floats::fill);
                self.compute::<floats::Floats<P>>(&x);
            }
        }
    }

    fn looked_up<P: Packed>(self) {
        let x = in_runs(self.x, floats::fill);
        self.compute::<floats::Floats<P>>(&x);
    }

    fn plain<N: Plain>(self) {
        let x = self.x;
        self.compute::<floats::Numbers<N>>(x);
    }
}

/// Vectors in runs of [`RUN`] numbers, as `fill` makes them.
fn in_runs<R: Clone + Default + Send>(x: &[f32], fill: impl Fn(&[f32], &mut [R]) + Sync) -> Vec<R> {
    let mut runs = vec![R::default(); x.len() / RUN];
    // About as many operations a number.
    let worth = 8 * x.len();
    let each = runs.len().div_ceil(pieces(worth)).max(1);
    share(worth, x.chunks(each * RUN).zip(runs.chunks_mut(each)).collect(), |(x, runs)| fill(x, runs));
    runs
}

/// How sixteen rows are multiplied by vectors.
trait Kernel {
    /// A part of a vector
    type Run: Sync;

    /// Runs of a vector of so many numbers.
    fn runs(columns: usize) -> usize;

    /// The products of sixteen rows with `T` vectors. Those of a vector do not depend on `T`. It is to be inlined.
    fn products<L: Lanes, const T: usize>(lanes: L, words: &[u32], x: [&[Self::Run]; T]) -> [L::Floats; T];
}

/// A piece of work, in tiles of sixteen rows and a few vectors.
struct Tiles<'a, K: Kernel> {
    x: &'a [K::Run],
    /// Runs of a vector
    runs: usize,
    piece: Piece<'a>,
}

impl<K: Kernel> Work for Tiles<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { x, runs, piece: Piece { vectors, words, stride, mut y } } = self;
        let x = &x[vectors.start * runs..vectors.end * runs];
        let together = (CACHE / (runs * size_of::<K::Run>()).max(1)).next_multiple_of(8);
        for (x, y) in x.chunks(together * runs).zip(y.chunks_mut(together)) {
            for (i, words) in words.chunks(stride).enumerate() {
                let (mut x, mut y, column) = (x, &mut y[..], i * SIXTEEN);
                if L::REGISTERS >= 32 {
                    (x, y) = tiles::<L, K, 8>(lanes, words, x, runs, y, column);
                }
                (x, y) = tiles::<L, K, 4>(lanes, words, x, runs, y, column);
                tiles::<L, K, 1>(lanes, words, x, runs, y, column);
            }
        }
    }
}

/// Multiplies as many vectors as there are tiles of `T`, and returns the others.
#[inline(always)]
fn tiles<'x, 'y, 'z, L: Lanes, K: Kernel, const T: usize>(
    lanes: L,
    words: &[u32],
    mut x: &'x [K::Run],
    runs: usize,
    mut y: &'y mut [&'z mut [f32]],
    column: usize,
) -> (&'x [K::Run], &'y mut [&'z mut [f32]]) {
    while y.len() >= T {
        let (tile, others) = x.split_at(T * runs);
        let (results, rest) = y.split_at_mut(T);
        let mut vectors = [&tile[..0]; T];
        for t in 0..T {
            vectors[t] = &tile[t * runs..(t + 1) * runs];
        }
        let products = K::products::<L, T>(lanes, words, vectors);
        for t in 0..T {
            let (row, sums) = (&mut results[t][column..], lanes.array(products[t]));
            match row.first_chunk_mut::<SIXTEEN>() {
                Some(row) => *row = sums,
                None => row.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
            }
        }
        (x, y) = (others, rest);
    }
    (x, y)
}
