//! Matrices from PyTorch's quantizers: the tensors that a folder stores for each, and how rows are unpacked,
//! or packed in blocks.
//!
//! All tensors of a matrix become one entry of the checkpoint, with the name and the shape that the matrix
//! has in an unquantized folder.

mod gather;
mod group;
mod method;

use std::ops::Range;

use kiln_core::Error;
use kiln_weights::{Format, quantized::Quantized};

pub(super) use self::{group::Group, method::Method};
use super::{
    Checkpoint, Entry,
    convert::{BLOCK, Failed, Number, pack},
};

/// Minimum number of rows to unpack at a time. Codes may be stored column by column, where fewer rows would
/// read the same memory several times.
const AT_ONCE: usize = 16;

/// A matrix whose rows are being read. Everything but its codes is in memory.
#[derive(Debug)]
pub(super) struct Unpacking {
    name: String,
    matrix: Quantized,
    /// The codes that were read last; `range` is their place in the file.
    codes: Vec<u8>,
    range: Range<usize>,
}

/// Fills a buffer with bytes of the codes, starting at an offset.
type Read<'a> = &'a (dyn Fn(usize, &mut [u8]) -> Result<(), Error> + Sync);

impl Unpacking {
    pub(super) fn begin(
        checkpoint: &Checkpoint,
        name: &str,
        entry: &Entry,
        group: &Group,
    ) -> Result<Self, Failed> {
        let &[rows, columns] = &entry.shape[..] else {
            return Err(Failed::Convert("is no matrix".to_owned()));
        };
        let matrix = group.read(checkpoint, rows, columns)?;
        if matrix.code_bytes() as u64 != entry.len() {
            let why = format!("has {} bytes of codes, and {} are needed", entry.len(), matrix.code_bytes());
            return Err(Failed::Convert(why));
        }
        Ok(Self { name: name.to_owned(), matrix, codes: Vec::new(), range: 0..0 })
    }

    pub(super) fn is_of(&self, name: &str) -> bool {
        self.name == name
    }

    /// Reads the codes of these rows, unless they were read last.
    pub(super) fn prepare(&mut self, rows: Range<usize>, read: Read<'_>) -> Result<(), Failed> {
        let range = self.matrix.codes_of(rows);
        if range != self.range {
            self.range = 0..0;
            self.codes.resize(range.len(), 0);
            read(range.start, &mut self.codes)?;
            self.range = range;
        }
        Ok(())
    }

    /// Writes rows as blocks of `format`: the codes themselves if it is the matrix's own format, or else
    /// their numbers. Codes must be [prepared](Self::prepare).
    pub(super) fn pack(&self, rows: Range<usize>, format: Format, blocks: &mut [u8]) -> Result<(), Failed> {
        let range = self.matrix.codes_of(rows.clone());
        let own = range.start.wrapping_sub(self.range.start)..range.end.wrapping_sub(self.range.start);
        let codes = self.codes.get(own).ok_or_else(|| Failed::Convert("has no such rows".to_owned()))?;
        if self.matrix.format() == Some(format) {
            return Ok(self.matrix.pack(rows, codes, blocks)?);
        }
        let mut numbers = vec![0.0; rows.len() * self.matrix.columns()];
        self.matrix.unpack(rows, codes, &mut numbers)?;
        pack(format, &numbers, blocks)
    }

    /// Unpacks rows into `numbers`, starting at row `first`.
    pub(super) fn rows<T: Number>(
        &mut self,
        first: usize,
        read: Read<'_>,
        numbers: &mut [T],
    ) -> Result<(), Failed> {
        let columns = self.matrix.columns().max(1);
        let at_once = (BLOCK / columns).max(AT_ONCE);
        let mut wide = vec![0.0; numbers.len().min(at_once.saturating_mul(columns))];
        let starts = (first..).step_by(at_once);
        for (start, numbers) in starts.zip(numbers.chunks_mut(at_once.saturating_mul(columns))) {
            let rows = start..start + numbers.len() / columns;
            self.prepare(rows.clone(), read)?;
            let wide = &mut wide[..numbers.len()];
            self.matrix.unpack(rows, &self.codes, wide)?;
            T::round(wide, numbers)?;
        }
        Ok(())
    }
}
