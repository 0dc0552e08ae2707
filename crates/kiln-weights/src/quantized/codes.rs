//! Where the codes of a matrix are, and which numbers they stand for before they are scaled.

use std::ops::Range;

use super::float8;

/// A layout of codes. Words have 32 bits and are little endian; the first code of a word is in its lowest
/// bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Codes {
    /// bitsandbytes: 4 bits that are the index in a table, two in a byte, the first in its high bits. Rows
    /// follow each other without a gap, so a byte may belong to two.
    Table([f32; 16]),
    /// A signed byte for each number.
    Int8,
    /// A float of 8 bits for each number (E4M3).
    Float8,
    /// compressed-tensors: each row is words along its columns. Codes are numbers plus `2^(bits - 1)`.
    Rows { bits: usize },
    /// GPTQ: `[columns * bits / 32, rows]` words along columns.
    Columns { bits: usize },
    /// AWQ: `[columns, rows / 8]` words of 8 codes of 4 bits along rows, in the order of [`PLACES`].
    Awq,
}

/// Where in a word of AWQ the code of each of 8 rows is: the order 0, 2, 4, 6, 1, 3, 5, 7, inverted.
pub(super) const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Bits of a word
const WORD: usize = 32;

impl Codes {
    /// Bytes of all codes; `None` where a matrix of this shape cannot have this layout, or the bytes
    /// overflow.
    pub(super) fn bytes(&self, rows: usize, columns: usize) -> Option<usize> {
        let numbers = rows.checked_mul(columns)?;
        match self {
            Self::Table(_) => Some(numbers.div_ceil(2)),
            Self::Int8 | Self::Float8 => Some(numbers),
            Self::Rows { bits } => row_bytes(columns, *bits)?.checked_mul(rows),
            Self::Columns { bits } => {
                let whole = columns.checked_mul(*bits).filter(|bits| bits % WORD == 0);
                (whole? / 8).checked_mul(rows)
            }
            Self::Awq => rows.is_multiple_of(8).then_some(numbers / 2),
        }
    }

    /// The bytes that hold the codes of `range` of `rows` rows.
    pub(super) fn range(&self, range: Range<usize>, rows: usize, columns: usize) -> Range<usize> {
        let all = self.bytes(rows, columns).unwrap_or(0);
        let each = match self {
            Self::Table(_) => return range.start * columns / 2..(range.end * columns).div_ceil(2),
            Self::Columns { .. } | Self::Awq => return 0..all,
            Self::Int8 | Self::Float8 | Self::Rows { .. } => all.checked_div(rows).unwrap_or(0),
        };
        range.start * each..range.end * each
    }

    /// What the codes of `range` of `rows` rows stand for. `codes` are those of [`range`](Self::range);
    /// lengths were checked.
    pub(super) fn unpack(
        &self,
        range: Range<usize>,
        rows: usize,
        columns: usize,
        codes: &[u8],
        numbers: &mut [f32],
    ) {
        match self {
            Self::Table(table) => {
                // The first number may be the second of a byte.
                let skipped = range.start * columns % 2;
                let (begun, codes) = codes.split_at(skipped);
                let (first, numbers) = numbers.split_at_mut(skipped);
                for (number, byte) in first.iter_mut().zip(begun) {
                    *number = table[usize::from(byte & 15)];
                }
                for (numbers, &byte) in numbers.chunks_mut(2).zip(codes) {
                    for (number, code) in numbers.iter_mut().zip([byte >> 4, byte & 15]) {
                        *number = table[usize::from(code)];
                    }
                }
            }
            Self::Int8 => {
                for (number, &code) in numbers.iter_mut().zip(codes) {
                    *number = f32::from(code.cast_signed());
                }
            }
            Self::Float8 => {
                for (number, &code) in numbers.iter_mut().zip(codes) {
                    *number = float8::widen(code);
                }
            }
            Self::Rows { bits } => {
                let bytes = row_bytes(columns, *bits).unwrap_or(0).max(1);
                for (row, codes) in numbers.chunks_exact_mut(columns).zip(codes.chunks_exact(bytes)) {
                    match bits {
                        2 => unpack_row::<2>(codes, row),
                        4 => unpack_row::<4>(codes, row),
                        _ => unpack_row::<8>(codes, row),
                    }
                }
            }
            Self::Columns { bits } => {
                // A line has a word of each row.
                for (line, words) in codes.as_chunks().0.chunks_exact(rows).enumerate() {
                    let words = words.iter().skip(range.start).map(|word| u32::from_le_bytes(*word));
                    let rows = numbers.chunks_exact_mut(columns);
                    match bits {
                        2 => unpack_line::<2>(words, line, rows),
                        4 => unpack_line::<4>(words, line, rows),
                        _ => unpack_line::<8>(words, line, rows),
                    }
                }
            }
            Self::Awq => {
                for (row, numbers) in range.zip(numbers.chunks_exact_mut(columns)) {
                    let words = codes.as_chunks().0.iter().skip(row / 8).step_by(rows / 8);
                    for (number, word) in numbers.iter_mut().zip(words) {
                        *number = awq(u32::from_le_bytes(*word), row);
                    }
                }
            }
        }
    }
}

/// The codes of a row of words, less half of their range.
fn unpack_row<const BITS: usize>(codes: &[u8], row: &mut [f32]) {
    let half = (1 << (BITS - 1)) as f32;
    let whole = row.len() / (8 / BITS);
    let mut bytes = row.chunks_exact_mut(8 / BITS);
    for (numbers, &byte) in bytes.by_ref().zip(codes) {
        split(byte.into(), BITS, numbers);
        numbers.iter_mut().for_each(|number| *number -= half);
    }
    // The last byte may have more codes than the row.
    let rest = bytes.into_remainder();
    if let Some(&byte) = codes.get(whole) {
        split(byte.into(), BITS, rest);
        rest.iter_mut().for_each(|number| *number -= half);
    }
}

/// The codes of a word of each row, which are those of the same columns.
fn unpack_line<'a, const BITS: usize>(
    words: impl Iterator<Item = u32>,
    line: usize,
    rows: impl Iterator<Item = &'a mut [f32]>,
) {
    let per_word = WORD / BITS;
    for (row, word) in rows.zip(words) {
        if let Some(numbers) = row.get_mut(line * per_word..(line + 1) * per_word) {
            split(word, BITS, numbers);
        }
    }
}

/// Bytes of the whole words that hold so many codes.
fn row_bytes(columns: usize, bits: usize) -> Option<usize> {
    columns.checked_mul(bits)?.div_ceil(WORD).checked_mul(WORD / 8)
}

/// The codes of a word, the first in its lowest bits.
#[inline(always)]
pub(super) fn split(word: u32, bits: usize, codes: &mut [f32]) {
    let mask = (1 << bits) - 1;
    for (place, code) in codes.iter_mut().enumerate() {
        *code = (word >> (place * bits) & mask) as f32;
    }
}

/// The code of row `row` in its word of AWQ.
pub(super) fn awq(word: u32, row: usize) -> f32 {
    (word >> (4 * PLACES[row % 8]) & 15) as f32
}
