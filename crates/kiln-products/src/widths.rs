//! Widths of tiles: how many vectors are multiplied together, and the functions that are compiled for each.

use kiln_simd::{Lanes, Work};

/// Width of the next tile of at most sixteen, if this many vectors are left. The last tile may have room for
/// more: a tile takes at least as long as one sum has to wait for the one before, so a tile that is not full
/// is faster than several small ones.
pub(crate) fn of_sixteen(vectors: usize) -> usize {
    match vectors {
        ..=8 => of_eight(vectors),
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
            12 => lanes.call(Of::<Self, 12>(self)),
            16 => lanes.call(Of::<Self, 16>(self)),
            _ => self.of_eight(lanes),
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
