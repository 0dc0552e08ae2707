//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::{vectors::Vectors, widths::Computation};

/// Number of bytes of vectors that stay in the second-level cache while rows pass by, and of rows while tiles
/// of vectors pass by.
pub(crate) const CACHE: usize = 256 << 10;

/// How sixteen rows are multiplied by vectors. The product of a vector has the same bits, whichever function
/// computes it.
///
/// All functions must be inlined. They use loops throughout: closures over arrays are not always inlined, and
/// then vectors would leave their registers.
pub(crate) trait Kernel {
    /// A part of a vector.
    type Run: Copy + Default + Send + Sync;

    /// Parts of vectors are multiples of this many runs, so that none ends within a block of codes.
    const UNIT: usize;

    /// Width of the next tile if this many vectors are left.
    fn width<L: Lanes>(vectors: usize) -> usize;

    /// Computes a tile with a function for its width.
    fn in_width<L: Lanes>(tile: impl Computation, lanes: L);

    /// Computes a piece of work.
    #[inline(always)]
    fn compute<L: Lanes>(tiles: Tiles<'_, Self>, lanes: L)
    where
        Self: Sized,
    {
        tiles.of_words(lanes);
    }

    /// Number of runs of a vector with `columns` elements.
    fn runs(columns: usize) -> usize;

    /// Returns the products of sixteen rows with `T` vectors, added to `start`.
    fn products<L: Lanes, const T: usize>(
        lanes: L,
        words: &[u32],
        x: &[[Self::Run; T]],
        start: [L::Floats; T],
    ) -> [L::Floats; T];

    /// Adds the products of rows with `T` vectors to `sums`.
    #[inline(always)]
    fn add_products<L: Lanes, const T: usize>(
        lanes: L,
        rows: Rows<'_>,
        x: &[[Self::Run; T]],
        sums: &mut Sums<'_, '_>,
    ) {
        for i in 0..rows.sixteens() {
            let start = sums.start::<L, T>(lanes, i);
            let products = Self::products::<L, T>(lanes, rows.words(i), x, start);
            sums.store::<L, T>(lanes, i, products);
        }
    }
}

/// A kernel that can unpack rows, so that they are decoded once for many vectors.
pub(crate) trait Unpacking: Kernel {
    /// A part of the columns of sixteen rows.
    type Unpacked: Default;

    /// Unpacks the words of a part of sixteen rows.
    fn unpack<L: Lanes>(lanes: L, words: &[u32], rows: &mut Self::Unpacked);

    /// Returns the products of sixteen rows with `T` vectors, added to `start`.
    fn products_of_unpacked<L: Lanes, const T: usize>(
        lanes: L,
        rows: &Self::Unpacked,
        x: &[[Self::Run; T]],
        start: [L::Floats; T],
    ) -> [L::Floats; T];
}

/// A part of the columns of some rows.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    words: &'a [u32],
    /// Number of words of sixteen rows.
    stride: usize,
    /// First word of the part, and its end.
    part: [usize; 2],
}

impl<'a> Rows<'a> {
    /// Number of blocks of sixteen rows.
    #[inline(always)]
    pub(crate) fn sixteens(&self) -> usize {
        self.words.len() / self.stride
    }

    /// Returns the words of a block of sixteen rows.
    #[inline(always)]
    pub(crate) fn words(&self, i: usize) -> &'a [u32] {
        &self.words[i * self.stride..][self.part[0]..self.part[1]]
    }
}

/// Sums of the products of some rows with the vectors of a tile.
pub(crate) struct Sums<'a, 'y> {
    /// Results of each vector.
    y: &'a mut [&'y mut [f32]],
    /// Index of the first row.
    first: usize,
    /// Whether the sums begin at 0.
    begin: bool,
}

impl Sums<'_, '_> {
    /// Returns the sums so far of a block of sixteen rows.
    #[inline(always)]
    pub(crate) fn start<L: Lanes, const T: usize>(&self, lanes: L, i: usize) -> [L::Floats; T] {
        let mut start = [lanes.splat(0.0); T];
        if !self.begin {
            for (t, y) in self.y.iter().enumerate().take(T) {
                let y = &y[self.first + i * SIXTEEN..];
                let mut sums = [0.0; SIXTEEN];
                let len = y.len().min(SIXTEEN);
                sums[..len].copy_from_slice(&y[..len]);
                start[t] = lanes.floats(&sums);
            }
        }
        start
    }

    /// Writes the sums of a block of sixteen rows, or of as many as there are.
    #[inline(always)]
    pub(crate) fn store<L: Lanes, const T: usize>(&mut self, lanes: L, i: usize, sums: [L::Floats; T]) {
        for t in 0..T {
            if let Some(y) = self.y.get_mut(t) {
                let (y, sums) = (&mut y[self.first + i * SIXTEEN..], lanes.array(sums[t]));
                match y.first_chunk_mut::<SIXTEEN>() {
                    Some(y) => *y = sums,
                    None => y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum),
                }
            }
        }
    }
}

/// Some rows of a matrix, and their part of each vector's result.
pub(crate) struct Piece<'a> {
    /// Index of the group of vectors.
    pub(crate) group: usize,
    pub(crate) words: &'a [u32],
    /// Number of words of sixteen rows.
    pub(crate) stride: usize,
    pub(crate) y: Vec<&'a mut [f32]>,
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
        K::compute(self, lanes);
    }
}

impl<K: Kernel> Tiles<'_, K> {
    /// Number of vectors.
    pub(crate) fn vectors(&self) -> usize {
        self.piece.y.len()
    }

    /// Computes all tiles from the words of rows.
    #[inline(always)]
    pub(crate) fn of_words<L: Lanes>(self, lanes: L) {
        let group = &self.x.groups[self.piece.group];
        let all = self.piece.words.len() / self.piece.stride;
        let bytes = self.piece.stride * size_of::<u32>() / self.x.runs * group.part;
        // Rows that stay in the cache while the vectors of all tiles pass by; an even number, because kernels
        // may take two blocks at a time.
        let together = match group.tiles.len() == 1 && group.part == self.x.runs {
            true => all,
            false => (CACHE / bytes.max(1)).next_multiple_of(2).max(2),
        };
        self.for_each_tile(together, |tile, _| K::in_width(tile, lanes));
    }

    /// Calls a function for each tile, with `sixteens` blocks of rows, and whether it is the first tile of
    /// these.
    #[inline(always)]
    fn for_each_tile(self, sixteens: usize, mut compute: impl FnMut(OfWords<'_, '_, K>, bool)) {
        let Self { x, piece: Piece { group, words, stride, mut y } } = self;
        let (runs, group) = (x.runs, &x.groups[group]);
        for (i, words) in words.chunks(sixteens * stride).enumerate() {
            for part in group.parts(runs) {
                let word = |run: usize| (stride as u64 * run as u64 / runs as u64) as usize;
                let rows = Rows { words, stride, part: [word(part.start), word(part.end)] };
                for tile in &group.tiles {
                    let [start, end] =
                        [tile.vectors.start, tile.vectors.end].map(|at| at - group.vectors.start);
                    let y = &mut y[start..end];
                    let sums = Sums { y, first: i * sixteens * SIXTEEN, begin: part.start == 0 };
                    let x = x.part(group, tile, &part);
                    compute(OfWords { rows, x, width: tile.width, sums }, start == 0);
                }
            }
        }
    }
}

impl<K: Unpacking> Tiles<'_, K> {
    /// Computes all tiles from rows that are unpacked once.
    #[inline(always)]
    pub(crate) fn of_unpacked<L: Lanes>(self, lanes: L) {
        let mut unpacked = K::Unpacked::default();
        self.for_each_tile(1, |tile, is_first| {
            if is_first {
                lanes.call(Unpack::<K> { words: tile.rows.words(0), rows: &mut unpacked });
            }
            K::in_width(OfUnpacked { rows: &unpacked, tile }, lanes);
        });
    }
}

/// Some rows, and the vectors of a tile.
struct OfWords<'a, 'y, K: Kernel> {
    rows: Rows<'a>,
    x: &'a [K::Run],
    width: usize,
    sums: Sums<'a, 'y>,
}

impl<K: Kernel> Computation for OfWords<'_, '_, K> {
    #[inline(always)]
    fn width(&self) -> usize {
        self.width
    }

    #[inline(always)]
    fn run<L: Lanes, const T: usize>(mut self, lanes: L) {
        K::add_products::<L, T>(lanes, self.rows, self.x.as_chunks().0, &mut self.sums);
    }
}

/// Unpacks the words of a part of sixteen rows.
struct Unpack<'a, K: Unpacking> {
    words: &'a [u32],
    rows: &'a mut K::Unpacked,
}

impl<K: Unpacking> Work for Unpack<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        K::unpack(lanes, self.words, self.rows);
    }
}

/// Sixteen rows, unpacked, and the vectors of a tile.
struct OfUnpacked<'a, 'y, K: Unpacking> {
    rows: &'a K::Unpacked,
    tile: OfWords<'a, 'y, K>,
}

impl<K: Unpacking> Computation for OfUnpacked<'_, '_, K> {
    #[inline(always)]
    fn width(&self) -> usize {
        self.tile.width
    }

    #[inline(always)]
    fn run<L: Lanes, const T: usize>(self, lanes: L) {
        let (x, mut sums) = (self.tile.x.as_chunks().0, self.tile.sums);
        let start = sums.start::<L, T>(lanes, 0);
        let products = K::products_of_unpacked::<L, T>(lanes, self.rows, x, start);
        sums.store::<L, T>(lanes, 0, products);
    }
}
