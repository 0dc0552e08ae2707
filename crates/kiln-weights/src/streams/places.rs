//! Locations of the parts of blocks in words.

use super::{Order, SIXTEEN, Streams};

/// Computes the locations of the parts of blocks.
#[derive(Clone, Copy)]
pub(super) struct Places<'a> {
    pub(super) streams: &'a Streams,
    pub(super) order: Order,
    /// Blocks per row.
    pub(super) blocks: usize,
}

impl Places<'_> {
    /// Returns the offset of the bytes `at` and following of a part. Bytes of a unit stay together.
    fn of(&self, row: usize, block: usize, part: usize, at: usize, unit: usize) -> usize {
        let parts = self.streams.parts();
        match self.order {
            Order::Rows => {
                let before: usize =
                    parts[..part].iter().map(|bytes| (bytes * self.blocks).next_multiple_of(4)).sum();
                row * self.streams.row_words(self.blocks) * 4 + before + block * parts[part] + at
            }
            Order::Sixteens => {
                let sixteen = (row / SIXTEEN * self.blocks + block) * self.streams.block_words() * 4;
                let [low, high, scales, minimums, whole] = parts;
                let runs = self.streams.block / 32;
                // Codes are read run by run, after the data of the whole block.
                let before = match part {
                    0 => whole + scales + minimums + at / (low / runs) * (high / runs),
                    1 => whole + scales + minimums + (at / (high / runs) + 1) * (low / runs),
                    2 => whole,
                    3 => whole + scales,
                    _ => 0,
                };
                sixteen + (before + at) * SIXTEEN + row % SIXTEEN * unit
            }
        }
    }

    /// Returns the offset of the bytes `at` and following of a part, and the distance from unit to unit.
    #[inline]
    fn steps(&self, row: usize, block: usize, part: usize, at: usize, unit: usize) -> (usize, usize) {
        let together = if self.order == Order::Sixteens { SIXTEEN } else { 1 };
        (self.of(row, block, part, at, unit), unit * together)
    }

    #[inline]
    pub(super) fn put<const UNIT: usize>(
        &self,
        to: &mut [u8],
        [row, block, part, at]: [usize; 4],
        bytes: &[u8],
    ) {
        let (start, step) = self.steps(row, block, part, at, UNIT);
        let places = to.get_mut(start..).unwrap_or_default().chunks_mut(step);
        for (to, from) in places.zip(bytes.as_chunks::<UNIT>().0) {
            if let Some(to) = to.first_chunk_mut() {
                *to = *from;
            }
        }
    }

    #[inline]
    pub(super) fn get<const UNIT: usize>(
        &self,
        from: &[u8],
        [row, block, part, at]: [usize; 4],
        bytes: &mut [u8],
    ) {
        let (start, step) = self.steps(row, block, part, at, UNIT);
        let places = from.get(start..).unwrap_or_default().chunks(step);
        for (from, to) in places.zip(bytes.as_chunks_mut::<UNIT>().0) {
            if let Some(from) = from.first_chunk() {
                *to = *from;
            }
        }
    }
}
