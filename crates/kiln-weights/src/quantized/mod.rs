//! Matrices in the formats of PyTorch's quantizers: bitsandbytes, GPTQ, AWQ, compressed-tensors and MXFP4.
//!
//! A matrix consists of several tensors: codes, scales, zero points, an order of columns. [`Quantized`]
//! contains everything except the codes, which are passed in for the rows to unpack, or to pack in blocks of
//! a [`Format`](crate::Format).

mod awq;
mod bitsandbytes;
mod codes;
mod compressed_tensors;
mod float8;
mod gptq;
mod mxfp4;
mod packed;
mod scaling;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use self::bitsandbytes::{Blocks, Nested};
pub use self::compressed_tensors::CodeType;
pub use self::gptq::{Gptq, Zeros};
pub use self::scaling::group_in_order;

use self::codes::Codes;
use self::scaling::Scaling;
use crate::Error;

/// A quantized matrix `[rows, columns]` without its codes.
#[derive(Clone, Debug)]
pub struct Quantized {
    rows: usize,
    columns: usize,
    codes: Codes,
    scaling: Scaling,
}

impl Quantized {
    /// Creates a matrix, and checks its sizes.
    ///
    /// # Errors
    /// [`Error::Quantized`] if there are more codes or numbers than can be addressed, or if the layout cannot
    /// have this many rows.
    fn new(rows: usize, columns: usize, codes: Codes, scaling: Scaling) -> Result<Self, Error> {
        let sizes = codes.bytes(rows, columns).zip(rows.checked_mul(columns));
        match sizes {
            Some(_) => Ok(Self { rows, columns, codes, scaling }),
            None => Err(wrong("codes", format!("do not fit a matrix of {rows} rows and {columns} columns"))),
        }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Size of all codes in bytes.
    pub fn code_bytes(&self) -> usize {
        self.codes.bytes(self.rows, self.columns).unwrap_or(0)
    }

    /// Returns the byte range of the codes that [`unpack`](Self::unpack) needs for these rows: all bytes if
    /// codes are stored column by column.
    pub fn codes_of(&self, rows: Range<usize>) -> Range<usize> {
        let end = rows.end.min(self.rows);
        self.codes.range(rows.start.min(end)..end, self.rows, self.columns)
    }

    /// Unpacks these rows to `numbers`, which has `columns` numbers per row. `codes` are the bytes in
    /// [`codes_of`](Self::codes_of).
    ///
    /// The numbers are computed in float32, from scales that are exact in float32. For bitsandbytes, they
    /// equal its own numbers bit for bit. For the other methods, they do after rounding to the type of the
    /// scales, in which these methods compute.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths do not match. Nothing is written in that case.
    pub fn unpack(&self, rows: Range<usize>, codes: &[u8], numbers: &mut [f32]) -> Result<(), Error> {
        let first = rows.start;
        let codes = self.read(rows, codes, numbers.len())?;
        let numbers_of = self.codes.numbers();
        for (number, code) in numbers.iter_mut().zip(codes) {
            *number = numbers_of[usize::from(code)];
        }
        if !numbers.is_empty() {
            self.scaling.apply(first, self.columns, numbers);
        }
        Ok(())
    }

    /// Reads the codes of these rows, one byte each, after checking their number.
    fn read(&self, rows: Range<usize>, codes: &[u8], wanted: usize) -> Result<Vec<u8>, Error> {
        let count = rows.end.checked_sub(rows.start).filter(|_| rows.end <= self.rows);
        let count = count.ok_or_else(|| wrong("rows", format!("{rows:?} are not among {}", self.rows)))?;
        // Cannot overflow: all numbers of the matrix were counted.
        check("numbers", wanted, count * self.columns)?;
        check("bytes of codes", codes.len(), self.codes_of(rows.clone()).len())?;
        let mut read = vec![0; wanted];
        if wanted > 0 {
            self.codes.read(rows, self.rows, self.columns, codes, &mut read);
        }
        Ok(read)
    }
}

/// Creates an error about a part of a matrix.
fn wrong(part: &'static str, why: String) -> Error {
    Error::Quantized { part, why }
}

/// Checks the number of elements of `part`.
///
/// # Errors
/// [`Error::Quantized`] if `found` differs from `wanted`.
fn check(part: &'static str, found: usize, wanted: usize) -> Result<(), Error> {
    match found == wanted {
        true => Ok(()),
        false => Err(wrong(part, format!("are {found} where {wanted} are needed"))),
    }
}

/// Multiplies two sizes.
///
/// # Errors
/// [`Error::Quantized`] if the product is more than can be addressed.
fn product(part: &'static str, one: usize, other: usize) -> Result<usize, Error> {
    one.checked_mul(other).ok_or_else(|| wrong(part, format!("would be {one} times {other}")))
}
