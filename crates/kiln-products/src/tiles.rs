//! Tiles of sixteen rows and a few vectors, whose sums stay in registers.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::{marker::PhantomData, ops::Range};

use kiln_simd::{Lanes, Work};
use kiln_weights::streams::SIXTEEN;

use crate::threads::share;

/// Number of bytes of vectors that stay in the second-level cache while rows pass by, and of rows while tiles
/// of vectors pass by.
const CACHE: usize = 256 << 10;

/// Number of operations that take about as long as copying one byte of a vector.
const COPYING: usize = 8;

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

/// Width of the next tile of at most sixteen, if this many vectors are left. The last tile may have room for
/// more: a tile takes at least as long as one sum has to wait for the one before, so a tile that is not full
/// is faster than several small ones.
pub(crate) fn of_sixteen(vectors: usize) -> usize {
    match vectors {
        1 | 2 => vectors,
        3..=4 => 4,
        5..=8 => 8,
        9..=12 => 12,
        _ => 16,
    }
}

/// Width of the next tile of at most eight, if this many vectors are left.
pub(crate) fn of_eight(vectors: usize) -> usize {
    match vectors {
        1 | 2 => vectors,
        3..=4 => 4,
        _ => 8,
    }
}

/// Width of the next tile of at most six, and of four if seven or eight vectors are left.
pub(crate) fn of_six(vectors: usize) -> usize {
    match vectors {
        ..=3 => vectors,
        4 | 7 | 8 => 4,
        _ => 6,
    }
}

/// Width of the next tile of at most three, if this many vectors are left.
pub(crate) fn of_three(vectors: usize) -> usize {
    vectors.min(3)
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

/// Vectors, in the form in which the products of a kernel read them.
pub(crate) struct Vectors<'a, R> {
    /// One vector after the other.
    x: &'a [R],
    /// Number of runs per vector.
    runs: usize,
    groups: Vec<TilesOfGroup>,
    /// The tiles of each group that has several vectors.
    tiles: Vec<R>,
}

/// Vectors that are multiplied by the same rows, in tiles: the first part of each tile, then the second part
/// of each. A part of a tile has the first run of each of its vectors, then the second run of each, so that
/// it is read in order.
struct TilesOfGroup {
    vectors: Range<usize>,
    tiles: Vec<Tile>,
    /// Index of the first run among those of all tiles.
    first: usize,
    /// Number of runs per part.
    part: usize,
}

/// Some vectors that are multiplied together.
struct Tile {
    vectors: Range<usize>,
    /// Number of vectors that the tile has room for.
    width: usize,
    /// Sum of the widths of the tiles before it.
    place: usize,
}

impl TilesOfGroup {
    /// Sum of the widths of all tiles.
    fn places(&self) -> usize {
        self.tiles.last().map_or(0, |tile| tile.place + tile.width)
    }

    /// Returns the runs of each part, of `runs`.
    fn parts(&self, runs: usize) -> impl Iterator<Item = Range<usize>> {
        let part = self.part;
        (0..runs).step_by(part).map(move |first| first..runs.min(first + part))
    }
}

/// Returns [`Kernel::width`] for the lanes of this machine.
struct Width<K>(PhantomData<K>);

impl<K: Kernel> Work for Width<K> {
    type Output = fn(usize) -> usize;

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) -> Self::Output {
        K::width::<L>
    }
}

/// Divides the vectors of each group into tiles.
fn divide<K: Kernel>(groups: Vec<Range<usize>>, runs: usize) -> Vec<TilesOfGroup> {
    let width_of = kiln_simd::run(Width::<K>(PhantomData));
    let mut first = 0;
    let divide = |vectors: Range<usize>| {
        let (mut tiles, mut place, mut left) = (Vec::new(), 0, vectors.clone());
        while !left.is_empty() {
            let width = width_of(left.len());
            let end = left.end.min(left.start + width);
            tiles.push(Tile { vectors: left.start..end, width, place });
            (place, left.start) = (place + width, end);
        }
        let part = runs_of_part::<K>(runs, tiles.first().map_or(1, |tile: &Tile| tile.width));
        let group = TilesOfGroup { vectors, tiles, first, part };
        if place > 1 {
            first += place * runs;
        }
        group
    };
    groups.into_iter().map(divide).collect()
}

/// Returns the number of runs per part, so that a part of a tile stays in the cache.
fn runs_of_part<K: Kernel>(runs: usize, width: usize) -> usize {
    let units = runs.div_ceil(K::UNIT);
    let most = (CACHE / (size_of::<K::Run>() * width * K::UNIT)).max(1);
    runs.min(units.div_ceil(units.div_ceil(most)) * K::UNIT)
}

impl<'a, R: Copy + Default + Send + Sync> Vectors<'a, R> {
    pub(crate) fn new<K: Kernel<Run = R>>(x: &'a [R], columns: usize, groups: Vec<Range<usize>>) -> Self {
        let runs = K::runs(columns);
        let groups = divide::<K>(groups, runs);
        let places = groups.iter().map(TilesOfGroup::places).filter(|places| *places > 1).sum::<usize>();
        let mut tiles = vec![R::default(); places * runs];
        let (mut pieces, mut rest) = (Vec::new(), &mut tiles[..]);
        for group in groups.iter().filter(|group| group.places() > 1) {
            for part in group.parts(runs) {
                for tile in &group.tiles {
                    let (to, others) = std::mem::take(&mut rest).split_at_mut(part.len() * tile.width);
                    pieces.push((to, tile, part.clone()));
                    rest = others;
                }
            }
        }
        share(COPYING * size_of::<R>() * places * runs, pieces, |(to, tile, part)| {
            let vectors = x[tile.vectors.start * runs..tile.vectors.end * runs].chunks(runs);
            for (t, from) in vectors.enumerate() {
                let to = to.iter_mut().skip(t).step_by(tile.width);
                to.zip(&from[part.clone()]).for_each(|(to, from)| *to = *from);
            }
        });
        Self { x, runs, groups, tiles }
    }

    /// Returns a part of a tile of a group.
    fn part(&self, group: &TilesOfGroup, tile: &Tile, part: &Range<usize>) -> &[R] {
        if group.places() == 1 {
            return &self.x[tile.vectors.start * self.runs..][part.clone()];
        }
        let before = group.first + group.places() * part.start + tile.place * part.len();
        &self.tiles[before..before + tile.width * part.len()]
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

/// A tile to be computed by a function for its width.
pub(crate) trait Computation: Sized {
    /// Number of vectors that the tile has room for.
    fn width(&self) -> usize;

    /// Computes a tile that has room for `T` vectors.
    fn run<L: Lanes, const T: usize>(self, lanes: L);

    /// Computes a tile of at most sixteen.
    #[inline(always)]
    fn of_sixteen<L: Lanes>(self, lanes: L) {
        match self.width() {
            1 => lanes.call(Of::<Self, 1>(self)),
            2 => lanes.call(Of::<Self, 2>(self)),
            4 => lanes.call(Of::<Self, 4>(self)),
            8 => lanes.call(Of::<Self, 8>(self)),
            12 => lanes.call(Of::<Self, 12>(self)),
            _ => lanes.call(Of::<Self, 16>(self)),
        }
    }

    /// Computes a tile of at most eight.
    #[inline(always)]
    fn of_eight<L: Lanes>(self, lanes: L) {
        match self.width() {
            1 => lanes.call(Of::<Self, 1>(self)),
            2 => lanes.call(Of::<Self, 2>(self)),
            4 => lanes.call(Of::<Self, 4>(self)),
            _ => lanes.call(Of::<Self, 8>(self)),
        }
    }

    /// Computes a tile of six or of at most four.
    #[inline(always)]
    fn of_six<L: Lanes>(self, lanes: L) {
        match self.width() {
            4 => lanes.call(Of::<Self, 4>(self)),
            6 => lanes.call(Of::<Self, 6>(self)),
            _ => self.of_three(lanes),
        }
    }

    /// Computes a tile of at most three.
    #[inline(always)]
    fn of_three<L: Lanes>(self, lanes: L) {
        match self.width() {
            1 => lanes.call(Of::<Self, 1>(self)),
            2 => lanes.call(Of::<Self, 2>(self)),
            _ => lanes.call(Of::<Self, 3>(self)),
        }
    }
}

/// A tile that has room for `T` vectors.
struct Of<C, const T: usize>(C);

impl<C: Computation, const T: usize> Work for Of<C, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        self.0.run::<L, T>(lanes);
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
