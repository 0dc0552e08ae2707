//! Rows of a tensor as they lie in a file.

use std::ops::Range;

use kiln_core::{Error, Result};
use kiln_weights::{Format, gguf::names::Undo};

use super::{Checkpoint, Entry, convert::Failed};

/// Some rows of a tensor in a file.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    pub(super) rows: usize,
    /// The number of the first row.
    pub(super) first: usize,
    /// Rows of the whole tensor.
    pub(super) of: usize,
    /// Numbers of a row.
    pub(super) columns: usize,
    /// Where the tensor begins, from the beginning of the file's data.
    pub(super) start: usize,
    /// Bytes of a row in the file.
    pub(super) row: usize,
    /// What the conversion of the file did to it.
    pub(super) undo: Undo,
}

impl Piece<'_> {
    pub(super) fn elements(&self) -> u64 {
        (self.rows * self.columns) as u64
    }

    /// Where each row begins.
    pub(super) fn row_starts(&self) -> impl Iterator<Item = usize> {
        self.rows().map(|row| self.row_start(row))
    }

    /// Where a row of the tensor begins.
    pub(super) fn row_start(&self, row: usize) -> usize {
        self.start + self.undo.row(row, self.of) * self.row
    }

    /// The numbers of its rows.
    pub(super) fn rows(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }

    /// Rows that follow each other in the file: where each run begins, and its bytes.
    pub(super) fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let each = if matches!(self.undo, Undo::Permuted { .. }) { 1 } else { self.rows.max(1) };
        self.row_starts().step_by(each).map(move |start| (start, each * self.row))
    }
}

/// What is wrong with a tensor.
pub(super) fn of_piece(checkpoint: &Checkpoint, piece: &Piece<'_>, why: String) -> Error {
    Error::File { path: checkpoint.path(piece.entry), why: format!("`{}` {why}", piece.name) }
}

/// Why rows of a piece could not be had.
pub(super) fn failed(checkpoint: &Checkpoint, piece: &Piece<'_>, failed: Failed) -> Error {
    match failed {
        Failed::Read(error) => error,
        Failed::Convert(why) => of_piece(checkpoint, piece, why),
    }
}

/// A row that begins there in the file, in a format: as it is stored, or packed now.
pub(super) fn packed_row(
    checkpoint: &Checkpoint,
    piece: &Piece<'_>,
    start: usize,
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
