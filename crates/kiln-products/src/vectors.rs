//! Vectors in tiles, in the order in which products read them.

use std::{marker::PhantomData, ops::Range};

use kiln_simd::{Lanes, Work};

use crate::{
    threads::share,
    tiles::{CACHE, Kernel},
};

/// Number of operations that take about as long as copying one byte of a vector.
const COPYING: usize = 8;

/// Vectors, in the form in which the products of a kernel read them.
pub(crate) struct Vectors<'a, R> {
    /// One vector after the other.
    x: &'a [R],
    /// Number of runs per vector.
    pub(crate) runs: usize,
    pub(crate) groups: Vec<TilesOfGroup>,
    /// The tiles of each group that has several vectors.
    tiles: Vec<R>,
}

/// Vectors that are multiplied by the same rows, in tiles: the first part of each tile, then the second part
/// of each. A part of a tile has the first run of each of its vectors, then the second run of each, so that
/// it is read in order.
pub(crate) struct TilesOfGroup {
    pub(crate) vectors: Range<usize>,
    pub(crate) tiles: Vec<Tile>,
    /// Index of the first run among those of all tiles.
    first: usize,
    /// Number of runs per part.
    pub(crate) part: usize,
}

/// Some vectors that are multiplied together.
pub(crate) struct Tile {
    pub(crate) vectors: Range<usize>,
    /// Number of vectors that the tile has room for.
    pub(crate) width: usize,
    /// Sum of the widths of the tiles before it.
    place: usize,
}

impl TilesOfGroup {
    /// Sum of the widths of all tiles.
    fn places(&self) -> usize {
        self.tiles.last().map_or(0, |tile| tile.place + tile.width)
    }

    /// Returns the runs of each part, of `runs`.
    pub(crate) fn parts(&self, runs: usize) -> impl Iterator<Item = Range<usize>> {
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
    pub(crate) fn part(&self, group: &TilesOfGroup, tile: &Tile, part: &Range<usize>) -> &[R] {
        if group.places() == 1 {
            return &self.x[tile.vectors.start * self.runs..][part.clone()];
        }
        let before = group.first + group.places() * part.start + tile.place * part.len();
        &self.tiles[before..before + tile.width * part.len()]
    }
}
