//! Layouts of a matrix's codes, and the numbers that codes represent before scaling.

use std::ops::Range;

use super::float8;

/// A layout of codes. Words have 32 bits and are little endian; the first code of a word is in its lowest
/// bits.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Codes {
    /// bitsandbytes: 4-bit indices into a table, two per byte, the first in its high bits. Rows follow each
    /// other without a gap, so two rows may share a byte.
    Table([f32; 16]),
    /// MXFP4: 4-bit indices into a table, two per byte, the first in its low bits. Rows are whole bytes.
    LowFirst([f32; 16]),
    /// A signed byte per number.
    Int8,
    /// An 8-bit float per number (E4M3).
    Float8,
    /// compressed-tensors: each row consists of words along its columns. Codes are numbers plus
    /// `2^(bits - 1)`.
    Rows { bits: usize },
    /// GPTQ: `[columns * bits / 32, rows]` words along columns.
    Columns { bits: usize },
    /// AWQ: `[columns, rows / 8]` words of eight 4-bit codes along rows, in the order of [`PLACES`].
    Awq,
}

/// Position of the code of each of 8 rows in a word of AWQ: the order 0, 2, 4, 6, 1, 3, 5, 7, inverted.
pub(super) const PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Bits per word.
const WORD: usize = 32;

impl Codes {
    /// Returns the size of all codes in bytes; `None` if a matrix of this shape cannot have this layout, or
    /// if the size overflows.
    pub(super) fn bytes(&self, rows: usize, columns: usize) -> Option<usize> {
        let numbers = rows.checked_mul(columns)?;
        match self {
            Self::Table(_) => Some(numbers.div_ceil(2)),
            Self::LowFirst(_) => columns.is_multiple_of(2).then_some(numbers / 2),
            Self::Int8 | Self::Float8 => Some(numbers),
            Self::Rows { bits } => row_bytes(columns, *bits)?.checked_mul(rows),
            Self::Columns { bits } => {
                let whole = columns.checked_mul(*bits).filter(|bits| bits % WORD == 0);
                (whole? / 8).checked_mul(rows)
            }
            Self::Awq => rows.is_multiple_of(8).then_some(numbers / 2),
        }
    }

    /// Returns the byte range that holds the codes of `range` of `rows` rows.
    pub(super) fn range(&self, range: Range<usize>, rows: usize, columns: usize) -> Range<usize> {
        let all = self.bytes(rows, columns).unwrap_or(0);
        let each = match self {
            Self::Table(_) => return range.start * columns / 2..(range.end * columns).div_ceil(2),
            Self::Columns { .. } | Self::Awq => return 0..all,
            Self::Int8 | Self::Float8 | Self::Rows { .. } | Self::LowFirst(_) => {
                all.checked_div(rows).unwrap_or(0)
            }
        };
        range.start * each..range.end * each
    }

    /// Returns the number of bits in a code, if codes are integers.
    pub(super) fn integer_bits(&self) -> Option<usize> {
        match self {
            Self::Rows { bits } | Self::Columns { bits } => Some(*bits),
            Self::Awq => Some(4),
            Self::Int8 => Some(8),
            Self::Table(_) | Self::LowFirst(_) | Self::Float8 => None,
        }
    }

    /// Returns the code of the number 0, for integer codes.
    pub(super) fn zero(&self) -> f32 {
        match self {
            Self::Rows { bits } => (1 << (bits - 1)) as f32,
            Self::Int8 => 128.0,
            Self::Table(_) | Self::LowFirst(_) | Self::Float8 | Self::Columns { .. } | Self::Awq => 0.0,
        }
    }

    /// Returns the number that each code represents.
    pub(super) fn numbers(&self) -> [f32; 256] {
        let number = |code: u8| match self {
            Self::Table(table) | Self::LowFirst(table) => table[usize::from(code & 15)],
            Self::Float8 => float8::widen(code),
            _ => f32::from(code) - self.zero(),
        };
        std::array::from_fn(|code| number(code as u8))
    }

    /// Reads the codes of `range` of `rows` rows, one byte each; signed bytes are increased by 128. `codes`
    /// are the bytes in [`range`](Self::range); lengths were checked.
    pub(super) fn read(&self, range: Range<usize>, rows: usize, columns: usize, codes: &[u8], to: &mut [u8]) {
        match self {
            Self::Table(_) => {
                // The first code may be the second one of its byte.
                let skipped = range.start * columns % 2;
                let (begun, codes) = codes.split_at(skipped);
                let (first, rest) = to.split_at_mut(skipped);
                for (to, byte) in first.iter_mut().zip(begun) {
                    *to = byte & 15;
                }
                for (to, &byte) in rest.chunks_mut(2).zip(codes) {
                    for (to, code) in to.iter_mut().zip([byte >> 4, byte & 15]) {
                        *to = code;
                    }
                }
            }
            Self::LowFirst(_) => {
                for (to, &byte) in to.chunks_exact_mut(2).zip(codes) {
                    to.copy_from_slice(&[byte & 15, byte >> 4]);
                }
            }
            Self::Int8 => {
                for (to, code) in to.iter_mut().zip(codes) {
                    *to = code ^ 128;
                }
            }
            Self::Float8 => to.copy_from_slice(codes),
            Self::Rows { bits } => {
                let bytes = row_bytes(columns, *bits).unwrap_or(0).max(1);
                for (row, codes) in to.chunks_exact_mut(columns).zip(codes.chunks_exact(bytes)) {
                    match bits {
                        2 => read_row::<2>(codes, row),
                        4 => read_row::<4>(codes, row),
                        _ => row.copy_from_slice(&codes[..columns]),
                    }
                }
            }
            Self::Columns { bits } => {
                // A few rows at a time, so that the output stays in the L1 cache.
                for (i, to) in to.chunks_mut(8 * columns).enumerate() {
                    // A line has one word per row.
                    for (line, words) in codes.as_chunks().0.chunks_exact(rows).enumerate() {
                        let words = words[range.start + 8 * i..].iter().map(|word| u32::from_le_bytes(*word));
                        let rows = to.chunks_exact_mut(columns);
                        match bits {
                            2 => read_line::<2>(words, line, rows),
                            4 => read_line::<4>(words, line, rows),
                            _ => read_line::<8>(words, line, rows),
                        }
                    }
                }
            }
            Self::Awq => {
                for eight in range.start / 8..range.end.div_ceil(8) {
                    let own = range.start.max(8 * eight)..range.end.min(8 * eight + 8);
                    let to = &mut to[(own.start - range.start) * columns..(own.end - range.start) * columns];
                    let words = codes.as_chunks().0.iter().skip(eight).step_by(rows / 8);
                    for (column, word) in words.enumerate() {
                        for (row, to) in own.clone().zip(to.chunks_exact_mut(columns)) {
                            to[column] = awq(u32::from_le_bytes(*word), row);
                        }
                    }
                }
            }
        }
    }
}

/// Reads the codes of a row of bytes, the last of which may have more codes than the row.
fn read_row<const BITS: usize>(codes: &[u8], row: &mut [u8]) {
    for (to, &byte) in row.chunks_mut(8 / BITS).zip(codes) {
        split(byte.into(), BITS, to);
    }
}

/// Reads one word per row; all words hold the codes of the same columns.
fn read_line<'a, const BITS: usize>(
    words: impl Iterator<Item = u32>,
    line: usize,
    rows: impl Iterator<Item = &'a mut [u8]>,
) {
    let per_word = WORD / BITS;
    for (row, word) in rows.zip(words) {
        if let Some(to) = row.get_mut(line * per_word..(line + 1) * per_word) {
            split(word, BITS, to);
        }
    }
}

/// Returns the size in bytes of the whole words that hold `columns` codes.
fn row_bytes(columns: usize, bits: usize) -> Option<usize> {
    columns.checked_mul(bits)?.div_ceil(WORD).checked_mul(WORD / 8)
}

/// Splits a word into its codes, the first of which is in the lowest bits.
#[inline(always)]
pub(super) fn split(word: u32, bits: usize, codes: &mut [u8]) {
    let mask = ((1_u32 << bits) - 1) as u8;
    for (place, code) in codes.iter_mut().enumerate() {
        *code = (word >> (place * bits)) as u8 & mask;
    }
}

/// Returns the code of row `row` in its AWQ word.
pub(super) fn awq(word: u32, row: usize) -> u8 {
    (word >> (4 * PLACES[row % 8]) & 15) as u8
}
