//! Rows of a tensor as they are stored in a file.

use std::ops::Range;

use kiln_core::{Error, Result};
use kiln_weights::{Format, gguf::names::Undo};

use super::{Checkpoint, Entry, convert::Failed};

/// Consecutive rows of a tensor in a file.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    pub(super) rows: usize,
    /// Number of the first row.
    pub(super) first: usize,
    /// Number of rows of the whole tensor.
    pub(super) of: usize,
    /// Numbers per row.
    pub(super) columns: usize,
    /// Offset of the tensor in the file's data.
    pub(super) start: u64,
    /// Size of a row in the file in bytes.
    pub(super) row: usize,
    /// The change that the conversion of the file made, to be undone.
    pub(super) undo: Undo,
}

impl Piece<'_> {
    pub(super) fn elements(&self) -> u64 {
        (self.rows * self.columns) as u64
    }

    /// Offset of a row of the tensor.
    pub(super) fn row_start(&self, row: usize) -> u64 {
        self.start + self.undo.row(row, self.of) as u64 * self.row as u64
    }

    /// Range of row numbers in the tensor.
    pub(super) fn rows(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    /// Returns the runs of rows that are contiguous in the file: offset and number of rows of each.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, usize)> {
        let each = if matches!(self.undo, Undo::Permuted { .. }) { 1 } else { self.rows.max(1) };
        self.rows().step_by(each).map(move |row| (self.row_start(row), each))
    }
}

/// An error about the tensor of a piece.
pub(super) fn of_piece(checkpoint: &Checkpoint, piece: &Piece<'_>, why: String) -> Error {
    Error::File { path: checkpoint.path(piece.entry), why: format!("`{}` {why}", piece.name) }
}

/// Converts a failure to read rows of a piece into an error.
pub(super) fn failed(checkpoint: &Checkpoint, piece: &Piece<'_>, failed: Failed) -> Error {
    match failed {
        Failed::Read(error) => error,
        Failed::Convert(why) => of_piece(checkpoint, piece, why),
    }
}

/// Writes the row at offset `start` in `format`: copied as it is stored, or packed now.
pub(super) fn packed_row(
    checkpoint: &Checkpoint,
    piece: &Piece<'_>,
    start: u64,
    format: Format,
    to: &mut [u8],
) -> Result<()> {
    let stored = &piece.entry.stored;
    if stored.format() == Some(format) {
        return checkpoint.read(piece.entry, start, to);
    }
    let wrong = |why: String| of_piece(checkpoint, piece, why);
    let (mut bytes, mut numbers) = (vec![0; piece.row], vec![0.0; piece.columns]);
    checkpoint.read(piece.entry, start, &mut bytes)?;
    stored.unpack(&bytes, &mut numbers).map_err(wrong)?;
    format.pack(&numbers, to).map_err(|e| wrong(e.to_string()))
}
