//! Division of the rows of matrices among threads.

use std::ops::Range;

use kiln_weights::{
    Format,
    streams::{Arithmetic, Order, SIXTEEN},
};

use crate::{
    floats,
    formats::{self, Packed, Plain, RUN, Visitor},
    integers,
    threads::{ONE_THREAD, pieces, share},
    tiles::{Kernel, Piece, Tiles},
    vectors::Vectors,
};

/// Number of bytes of packed weights, counted once per vector, above which multiplying takes longer than
/// sharing the work.
const WORTH_SHARING: usize = 512 << 10;

/// Vectors that are multiplied by the same rows.
#[derive(Debug)]
pub struct Group<'a> {
    /// Indices of the vectors among all vectors.
    pub vectors: Range<usize>,
    /// Words of the rows.
    pub words: &'a [u32],
    /// Result of each vector, with one number per row.
    pub y: Vec<&'a mut [f32]>,
}

/// Computes the products of each group of vectors `x` `[vectors, columns]` with matrices in
/// [`Order::Sixteens`]. Returns `None` if the words do not match the rows; then some results may have been
/// written.
pub fn products_of_groups(
    x: &[f32],
    columns: usize,
    format: Format,
    arithmetic: Arithmetic,
    groups: Vec<Group<'_>>,
) -> Option<()> {
    let stride = format.words(Order::Sixteens, SIXTEEN, columns).filter(|stride| *stride > 0)?;
    // The time for few vectors is that of memory accesses, and the time for many vectors is that of sums:
    // bytes are a measure of both.
    let bytes: usize = groups.iter().map(|group| size_of_val(group.words) * group.y.len()).sum();
    let worth = bytes / (WORTH_SHARING / ONE_THREAD);
    let pieces_of_each = pieces(worth).div_ceil(groups.len().max(1));
    let mut all = Vec::new();
    let mut of_each = Vec::with_capacity(groups.len());
    for (group, Group { vectors, words, y }) in groups.into_iter().enumerate() {
        let rows = y.first().map_or(0, |y| y.len());
        if rows == 0 || words.len() != rows.div_ceil(SIXTEEN) * stride || vectors.len() != y.len() {
            return None;
        }
        let sixteens = rows.div_ceil(SIXTEEN).div_ceil(pieces_of_each);
        let first = all.len();
        let piece = |words| Piece { group, words, stride, y: Vec::with_capacity(y.len()) };
        all.extend(words.chunks(sixteens * stride).map(piece));
        for row in y {
            let parts = row.chunks_mut(sixteens * SIXTEEN);
            all[first..].iter_mut().zip(parts).for_each(|(piece, part)| piece.y.push(part));
        }
        of_each.push(vectors);
    }
    formats::visit(format, Products { x, columns, arithmetic, worth, groups: of_each, pieces: all });
    Some(())
}

struct Products<'a> {
    x: &'a [f32],
    columns: usize,
    arithmetic: Arithmetic,
    /// Number of products of pairs of numbers that take about as long as all pieces.
    worth: usize,
    /// Vectors of each group.
    groups: Vec<Range<usize>>,
    pieces: Vec<Piece<'a>>,
}

impl Products<'_> {
    fn compute<K: Kernel>(self, x: &[K::Run]) {
        let x = Vectors::new::<K>(x, self.columns, self.groups);
        share(self.worth, self.pieces, |piece| kiln_simd::run(Tiles::<K> { x: &x, piece }));
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

/// Splits vectors into runs of [`RUN`] elements, by means of `fill`.
fn in_runs<R: Clone + Default + Send>(x: &[f32], fill: impl Fn(&[f32], &mut [R]) + Sync) -> Vec<R> {
    let mut runs = vec![R::default(); x.len() / RUN];
    // About this many operations per element.
    let worth = 8 * x.len();
    let each = runs.len().div_ceil(pieces(worth)).max(1);
    share(worth, x.chunks(each * RUN).zip(runs.chunks_mut(each)).collect(), |(x, runs)| fill(x, runs));
    runs
}
