//! The memory layout of packed matrices: the parts of blocks are separated, in words of 32 bits.
//!
//! Blocks in a file have 17 to 210 bytes, which vector units and GPUs cannot read as words. Therefore codes,
//! scales and minimums become separate streams. Nothing is rounded, and the number of bytes is that of the
//! file, except that 6-bit scales get eight bits, and that rows may end with words of no use.
//!
//! Codes are placed so that a shift and a mask extract vectors of four bytes from words. Four adjacent codes
//! are a quad; a run of 32 numbers has eight quads. Quad q is, byte for byte, in
//!
//! | bits | words of a run | word | shifted by |
//! |---|---|---|---|
//! | 8 | 8 | q | 0 |
//! | 4 | 4 | q % 4 | 4 (q / 4) |
//! | 2 | 2 | q / 4 | 2 (q % 4) |
//! | 1 | 1 | 0 | q |

mod places;

pub use crate::formats::Table;

use self::places::Places;
use crate::{Error, Format};

/// Number of rows whose words are interleaved in [`Order::Sixteens`].
pub const SIXTEEN: usize = 16;

/// The order of rows and their words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Row after row, each of which begins at a multiple of four words. A row has the low bits of all codes,
    /// then the high bits, the scales of groups, the minimums of groups, and the scales of blocks, each of
    /// which begins at a word. A float16 scale and minimum share a word.
    Rows,
    /// Sixteen rows at a time, block after block. A block has the scales of sixteen rows, then their
    /// minimums, the scales of each group, the minimums of each group, and then the codes of each run of 32:
    /// low bits, word by word, and high bits. Therefore vector units whose lanes are rows read it
    /// sequentially. Missing rows are 0.
    Sixteens,
}

/// The arithmetic of products with packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Vectors are rounded to signed bytes, with a scale per 32 numbers, and multiplied in integers. Weights
    /// that are floats, or indices into a table of floats, are multiplied in float32; on GPUs all with tables
    /// are.
    Integers,
    /// Products are computed in float32, or in the type of the vectors.
    Floats,
}

/// The representation of group scales in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupScales {
    /// The block is one group.
    One,
    /// Signed bytes.
    Signed,
    /// Bytes for scales, and as many for minimums.
    Bytes,
    /// Four bits for the scale, and four for the minimum.
    Nibbles,
    /// The block is one group, and has the code of the number 0 in a byte.
    Zeros,
}

/// The type of the scale of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    F16,
    Bf16,
    F32,
}

impl ScaleType {
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Returns the scale that has these bits.
    fn read(self, bits: u32) -> f32 {
        match self {
            Self::F16 => half::f16::from_bits(bits as u16).to_f32(),
            Self::Bf16 => half::bf16::from_bits(bits as u16).to_f32(),
            Self::F32 => f32::from_bits(bits),
        }
    }
}

/// The parameters of a packed layout.
///
/// A number is `scale · s · (byte - offset) - minimum · m`, or `scale · (byte - offset) + minimum` in a block
/// that is one group. A table entry replaces the byte, and a zero point replaces the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Streams {
    /// Numbers per block.
    pub block: usize,
    /// Low bits per code.
    pub low: usize,
    /// High bits per code.
    pub high: usize,
    /// Numbers that share a scale: 16, or a multiple of 32.
    pub group: usize,
    pub groups: GroupScales,
    /// Whether there is a minimum in addition to the float16 scale.
    pub has_minimum: bool,
    pub scale: ScaleType,
    /// The table that codes are indices into, if there is one.
    pub table: Option<Table>,
    /// Offset that is subtracted from a code.
    pub offset: u8,
}

/// The parts of a block.
#[derive(Clone, Debug)]
pub(crate) struct Parts<const N: usize> {
    pub(crate) codes: [u8; N],
    /// Scale or zero point of each group.
    pub(crate) scales: [u8; 16],
    /// Minimum of each group.
    pub(crate) minimums: [u8; 16],
    /// Bits of the block's scale, in its type.
    pub(crate) scale: u32,
    /// Bits of the block's minimum, a float16.
    pub(crate) minimum: u16,
}

impl<const N: usize> Default for Parts<N> {
    fn default() -> Self {
        Self { codes: [0; N], scales: [0; 16], minimums: [0; 16], scale: 0, minimum: 0 }
    }
}

impl Streams {
    /// Creates the layout of blocks of 32 that are one group.
    pub(crate) const fn of_32(low: usize, high: usize, offset: u8, has_minimum: bool) -> Self {
        let (groups, scale) = (GroupScales::One, ScaleType::F16);
        Self { block: 32, low, high, group: 32, groups, has_minimum, scale, table: None, offset }
    }

    /// Creates the layout of blocks that are one group, with a float32 scale.
    pub(crate) const fn in_float32(block: usize, bits: usize, groups: GroupScales) -> Self {
        Self { block, low: bits, group: block, groups, scale: ScaleType::F32, ..Self::of_32(0, 0, 0, false) }
    }

    /// Creates the layout of blocks of 256.
    pub(crate) const fn of_256(
        low: usize,
        high: usize,
        offset: u8,
        group: usize,
        groups: GroupScales,
    ) -> Self {
        let has_minimum = !matches!(groups, GroupScales::Signed);
        Self { block: 256, low, high, group, groups, has_minimum, scale: ScaleType::F16, table: None, offset }
    }

    pub(crate) const fn with_table(self, table: Table) -> Self {
        Self { table: Some(table), ..self }
    }

    /// Returns the sizes of the parts of a block in bytes: low bits, high bits, scales or zero points of
    /// groups, minimums of groups, and the scale of the block with its minimum.
    pub const fn parts(&self) -> [usize; 5] {
        let groups = self.block / self.group;
        let (scales, minimums) = match self.groups {
            GroupScales::One => (0, 0),
            GroupScales::Signed | GroupScales::Nibbles | GroupScales::Zeros => (groups, 0),
            GroupScales::Bytes => (groups, groups),
        };
        let whole = self.scale.bytes() + if self.has_minimum { 2 } else { 0 };
        [self.block * self.low / 8, self.block * self.high / 8, scales, minimums, whole]
    }

    /// Returns the number of words in a row of `blocks` blocks: every row begins at a multiple of 16 bytes.
    pub fn row_words(&self, blocks: usize) -> usize {
        let words: usize = self.parts().iter().map(|bytes| (bytes * blocks).div_ceil(4)).sum();
        words.next_multiple_of(4)
    }

    /// Returns the number of words in a block of sixteen rows.
    pub const fn block_words(&self) -> usize {
        let [low, high, scales, minimums, whole] = self.parts();
        (low + high + scales + minimums + whole) * SIXTEEN / 4
    }

    /// Returns the number of words in `rows` rows of `blocks` blocks.
    pub fn words(&self, order: Order, rows: usize, blocks: usize) -> usize {
        match order {
            Order::Rows => rows * self.row_words(blocks),
            Order::Sixteens => rows.div_ceil(SIXTEEN) * blocks * self.block_words(),
        }
    }

    /// Arranges rows of blocks of `B` bytes into words. `to` has the size of their [`words`](Self::words).
    pub(crate) fn arrange<const N: usize, const B: usize>(
        &self,
        parts_of: impl Fn(&[u8; B]) -> Parts<N>,
        rows: &[&[u8]],
        order: Order,
        to: &mut [u8],
    ) {
        let blocks = rows.first().map_or(0, |row| row.len() / B);
        let places = Places { streams: self, order, blocks };
        for (row, of_row) in rows.iter().enumerate() {
            for (block, of_block) in of_row.as_chunks().0.iter().enumerate() {
                self.put(&parts_of(of_block), places, row, block, to);
            }
        }
    }

    fn put<const N: usize>(
        &self,
        parts: &Parts<N>,
        places: Places<'_>,
        row: usize,
        block: usize,
        to: &mut [u8],
    ) {
        let low = (1u16 << self.low) - 1;
        for (run, codes) in parts.codes.as_chunks::<32>().0.iter().enumerate() {
            let bytes = packed(self.low, &codes.map(|code| code & low as u8));
            places.put::<4>(to, [row, block, 0, run * 4 * self.low], &bytes[..4 * self.low]);
            if self.high > 0 {
                let bytes = packed(self.high, &codes.map(|code| code >> self.low));
                places.put::<4>(to, [row, block, 1, run * 4 * self.high], &bytes[..4 * self.high]);
            }
        }
        let groups = self.block / self.group;
        match self.groups {
            GroupScales::One => {}
            GroupScales::Signed | GroupScales::Zeros => {
                places.put::<1>(to, [row, block, 2, 0], &parts.scales[..groups]);
            }
            GroupScales::Bytes => {
                places.put::<1>(to, [row, block, 2, 0], &parts.scales[..groups]);
                places.put::<1>(to, [row, block, 3, 0], &parts.minimums[..groups]);
            }
            GroupScales::Nibbles => {
                let both: [u8; 16] = std::array::from_fn(|i| parts.scales[i] | parts.minimums[i] << 4);
                places.put::<1>(to, [row, block, 2, 0], &both[..groups]);
            }
        }
        let scale = parts.scale.to_le_bytes();
        match self.scale {
            ScaleType::F32 => places.put::<4>(to, [row, block, 4, 0], &scale),
            ScaleType::F16 | ScaleType::Bf16 => places.put::<2>(to, [row, block, 4, 0], &scale[..2]),
        }
        if self.has_minimum {
            places.put::<2>(to, [row, block, 4, 2], &parts.minimum.to_le_bytes());
        }
    }

    fn parts_at(&self, places: Places<'_>, row: usize, block: usize, from: &[u8]) -> Parts<256> {
        let mut parts = Parts::default();
        for (run, codes) in parts.codes.as_chunks_mut::<32>().0.iter_mut().take(self.block / 32).enumerate() {
            let mut bytes = [0; 32];
            places.get::<4>(from, [row, block, 0, run * 4 * self.low], &mut bytes[..4 * self.low]);
            *codes = unpacked(self.low, &bytes);
            if self.high > 0 {
                let mut bytes = [0; 32];
                places.get::<4>(from, [row, block, 1, run * 4 * self.high], &mut bytes[..4 * self.high]);
                let high = unpacked(self.high, &bytes);
                codes.iter_mut().zip(high).for_each(|(code, high)| *code |= high << self.low);
            }
        }
        let groups = self.block / self.group;
        if self.groups != GroupScales::One {
            places.get::<1>(from, [row, block, 2, 0], &mut parts.scales[..groups]);
        }
        match self.groups {
            GroupScales::Bytes => places.get::<1>(from, [row, block, 3, 0], &mut parts.minimums[..groups]),
            GroupScales::Nibbles => {
                parts.minimums = parts.scales.map(|both| both >> 4);
                parts.scales = parts.scales.map(|both| both & 15);
            }
            GroupScales::One | GroupScales::Signed | GroupScales::Zeros => {}
        }
        let mut scale = [0; 4];
        match self.scale {
            ScaleType::F32 => places.get::<4>(from, [row, block, 4, 0], &mut scale),
            ScaleType::F16 | ScaleType::Bf16 => places.get::<2>(from, [row, block, 4, 0], &mut scale[..2]),
        }
        parts.scale = u32::from_le_bytes(scale);
        if self.has_minimum {
            let mut half = [0; 2];
            places.get::<2>(from, [row, block, 4, 2], &mut half);
            parts.minimum = u16::from_le_bytes(half);
        }
        parts
    }

    /// Computes the numbers of a block.
    fn numbers(&self, parts: &Parts<256>, numbers: &mut [f32]) {
        let scale = self.scale.read(parts.scale);
        let minimum = half::f16::from_bits(parts.minimum).to_f32();
        let table = self.table.map(Table::numbers);
        let groups = numbers.chunks_mut(self.group).zip(parts.codes.chunks(self.group)).enumerate();
        for (group, (numbers, codes)) in groups {
            let (s, m) = (parts.scales[group % 16], f32::from(parts.minimums[group % 16]));
            let (scale, minimum) = match self.groups {
                GroupScales::One => (scale, self.has_minimum.then_some(minimum)),
                GroupScales::Signed => (scale * f32::from(s as i8), None),
                GroupScales::Bytes | GroupScales::Nibbles => (scale * f32::from(s), Some(-(minimum * m))),
                GroupScales::Zeros => (scale, None),
            };
            let zero = if self.groups == GroupScales::Zeros { s } else { self.offset };
            for (number, &code) in numbers.iter_mut().zip(codes) {
                let value = match table {
                    Some(table) => table[usize::from(code & 15)],
                    None => f32::from(code) - f32::from(zero),
                };
                *number = scale * value;
                if let Some(minimum) = minimum {
                    *number += minimum;
                }
            }
        }
    }
}

/// Interleaves units of `N` bytes from up to sixteen rows, column after column.
fn interleave<const N: usize>(rows: &[&[u8]], to: &mut [u8]) {
    let mut columns = rows.iter().map(|row| row.as_chunks::<N>().0.iter()).collect::<Vec<_>>();
    for sixteen in to.as_chunks_mut::<N>().0.as_chunks_mut::<SIXTEEN>().0 {
        for (to, from) in sixteen.iter_mut().zip(&mut columns) {
            if let Some(from) = from.next() {
                *to = *from;
            }
        }
    }
}

/// Packs a run of codes of `bits` bits; only the first `4 · bits` bytes are used.
fn packed(bits: usize, codes: &[u8; 32]) -> [u8; 32] {
    let mut bytes = [0; 32];
    let words = bits;
    for (quad, codes) in codes.as_chunks::<4>().0.iter().enumerate() {
        let (word, shift) = place_of(bits, words, quad);
        for (byte, code) in bytes.iter_mut().skip(4 * word).zip(codes) {
            *byte |= code << shift;
        }
    }
    bytes
}

fn unpacked(bits: usize, bytes: &[u8; 32]) -> [u8; 32] {
    let mask = ((1u16 << bits) - 1) as u8;
    let mut codes = [0; 32];
    for (quad, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let (word, shift) = place_of(bits, bits, quad);
        for (code, byte) in codes.iter_mut().zip(bytes.iter().skip(4 * word)) {
            *code = byte >> shift & mask;
        }
    }
    codes
}

/// Returns the word of a run that contains a quad, and its shift within each byte.
fn place_of(bits: usize, words: usize, quad: usize) -> (usize, usize) {
    match bits {
        4 => (quad % words, quad / words * bits),
        2 => (quad / 4, quad % 4 * bits),
        1 => (0, quad),
        _ => (quad, 0),
    }
}

impl Format {
    /// Returns the arrangement of blocks in words; `None` for floats.
    pub const fn streams(self) -> Option<Streams> {
        self.layout().streams
    }

    /// Returns the number of words in a matrix `[rows, columns]`; `None` if a row is not a whole number of
    /// blocks, or of words, or if the matrix is larger than memory can be.
    pub fn words(self, order: Order, rows: usize, columns: usize) -> Option<usize> {
        let Some(streams) = self.streams() else {
            let row = columns.checked_mul(self.block_bytes())?;
            return match order {
                Order::Rows => rows.checked_mul(row).filter(|_| row.is_multiple_of(4)).map(|bytes| bytes / 4),
                Order::Sixteens => {
                    rows.checked_next_multiple_of(SIXTEEN)?.checked_mul(row).map(|bytes| bytes / 4)
                }
            };
        };
        columns.is_multiple_of(streams.block).then(|| streams.words(order, rows, columns / streams.block))
    }

    /// Arranges rows, which are consecutive in `bytes` as in a file, into words (little endian).
    ///
    /// # Errors
    /// [`Error::Length`] if the lengths of bytes and words do not match. Nothing is written in that case.
    pub fn arrange(self, order: Order, columns: usize, bytes: &[u8], words: &mut [u8]) -> Result<(), Error> {
        let wrong = || Error::Length { format: self, bytes: bytes.len(), numbers: columns };
        let row = self.bytes_of(columns).filter(|row| *row > 0).ok_or_else(wrong)?;
        let rows: Vec<&[u8]> = bytes.chunks_exact(row).collect();
        if Some(words.len()) != self.words(order, rows.len(), columns).map(|words| words * 4) {
            return Err(wrong());
        }
        match (self.streams(), order) {
            (Some(streams), _) => (self.layout().arrange)(&streams, &rows, order, words),
            (None, Order::Rows) => words.copy_from_slice(bytes),
            (None, Order::Sixteens) => {
                for (sixteen, words) in rows.chunks(SIXTEEN).zip(words.chunks_mut(SIXTEEN * row)) {
                    match self.block_bytes() {
                        2 => interleave::<2>(sixteen, words),
                        _ => interleave::<4>(sixteen, words),
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the numbers of rows of a matrix in words, equal to those of [`unpack`](Self::unpack).
    ///
    /// # Errors
    /// [`Error::Length`] if the lengths of words and columns do not match, or if a row does not exist.
    pub fn numbers_of_rows(
        self,
        order: Order,
        columns: usize,
        words: &[u8],
        rows: impl IntoIterator<Item = usize>,
    ) -> Result<Vec<f32>, Error> {
        let wrong = || Error::Length { format: self, bytes: words.len(), numbers: columns };
        let row_bytes = self.bytes_of(columns).filter(|row| *row > 0).ok_or_else(wrong)?;
        let mut numbers = Vec::new();
        for row in rows {
            if self.words(order, row + 1, columns).is_none_or(|needed| needed * 4 > words.len()) {
                return Err(wrong());
            }
            let start = numbers.len();
            numbers.resize(start + columns, 0.0);
            let numbers = &mut numbers[start..];
            match (self.streams(), order) {
                (Some(streams), _) => {
                    let places = Places { streams: &streams, order, blocks: columns / streams.block };
                    for (block, numbers) in numbers.chunks_mut(streams.block).enumerate() {
                        streams.numbers(&streams.parts_at(places, row, block, words), numbers);
                    }
                }
                (None, Order::Rows) => self.unpack(&words[row * row_bytes..][..row_bytes], numbers)?,
                (None, Order::Sixteens) => {
                    let number = self.block_bytes();
                    let sixteen = &words[row / SIXTEEN * SIXTEEN * row_bytes..];
                    let places = sixteen.chunks_exact(number).skip(row % SIXTEEN).step_by(SIXTEEN);
                    for (to, from) in numbers.iter_mut().zip(places) {
                        self.unpack(from, std::slice::from_mut(to))?;
                    }
                }
            }
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests;
