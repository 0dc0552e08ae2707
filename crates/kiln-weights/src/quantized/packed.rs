//! Conversion of quantized matrices to blocks that kernels compute with.

use std::ops::Range;

use super::{Quantized, check, codes::Codes, scaling::Scaling, wrong};
use crate::{Error, Format, formats::pytorch, streams::Table};

impl Format {
    /// Returns the format for integers of `bits` bits in rows of `columns`, where `group` consecutive numbers
    /// share a scale; `None` if rows or groups are not whole blocks. Integers of 2 bits take 4.
    pub fn of_integers(bits: usize, group: usize, columns: usize) -> Option<Self> {
        let formats: &[Self] = match bits {
            2 | 4 => &[Self::Int4In128, Self::Int4In64, Self::Int4In32],
            8 => &[Self::Int8],
            _ => &[],
        };
        let fits =
            |format: &&Self| group.is_multiple_of(format.block()) && columns.is_multiple_of(format.block());
        formats.iter().find(fits).filter(|_| group > 0).copied()
    }

    /// Returns the format for indices into a table, in rows of `columns`, where `group` consecutive numbers
    /// share a scale; `None` for tables other than those of bitsandbytes, and if rows or groups are not whole
    /// blocks.
    pub fn of_table(table: &[f32], group: usize, columns: usize) -> Option<Self> {
        let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        let formats = [(Self::Nf4, Table::Nf4), (Self::Fp4, Table::Fp4)];
        let (format, _) = formats.into_iter().find(|(_, known)| bits(&known.numbers()) == bits(table))?;
        let fits = group.is_multiple_of(format.block()) && columns.is_multiple_of(format.block());
        (fits && group > 0).then_some(format)
    }
}

impl Quantized {
    /// Returns the format whose blocks can hold the matrix; `None` if there is none.
    pub fn format(&self) -> Option<Format> {
        let group = self.scaling.group(self.columns)?;
        match &self.codes {
            Codes::Table(table) => Format::of_table(table, group, self.columns),
            Codes::LowFirst(_) => Some(Self::MXFP4),
            codes => Format::of_integers(codes.integer_bits()?, group, self.columns),
        }
    }

    /// Writes these rows as consecutive blocks of [`format`](Self::format). `codes` are the bytes in
    /// [`codes_of`](Self::codes_of).
    ///
    /// The blocks unpack to the numbers of [`unpack`](Self::unpack) bit for bit. For LLM.int8(), they are up
    /// to four units in the last place off, because both factors of a row become one scale.
    ///
    /// # Errors
    /// [`Error::Quantized`] if the matrix has no format, lengths do not match, or a zero point is not one of
    /// its codes.
    pub fn pack(&self, rows: Range<usize>, codes: &[u8], blocks: &mut [u8]) -> Result<(), Error> {
        let format = self.format().ok_or_else(|| wrong("codes", "fit no blocks".to_owned()))?;
        let numbers = rows.len().saturating_mul(self.columns);
        let bytes = format.bytes_of(numbers).unwrap_or(0);
        check("bytes of blocks", blocks.len(), bytes)?;
        let codes = self.read(rows.clone(), codes, numbers)?;
        if let (Codes::LowFirst(_), Scaling::Blocks { scales, block }) = (&self.codes, &self.scaling) {
            let first = rows.start * self.columns / block;
            Self::pack_mxfp4(&codes, scales.get(first..).unwrap_or_default(), blocks);
            return Ok(());
        }
        let starts =
            rows.flat_map(|row| (0..self.columns).step_by(format.block()).map(move |column| (row, column)));
        let blocks = blocks.chunks_exact_mut(format.block_bytes()).zip(codes.chunks_exact(format.block()));
        for ((row, column), (block, codes)) in starts.zip(blocks) {
            let scaled = self.scaling.of_block(row, column, self.columns);
            let (scale, zero) = scaled.ok_or_else(|| wrong("scales", format!("lack one of row {row}")))?;
            let zero = match &self.codes {
                Codes::Table(_) | Codes::LowFirst(_) => None,
                codes => {
                    let zero = zero + codes.zero();
                    let code = Some(zero as u8).filter(|code| f32::from(*code) == zero);
                    Some(code.ok_or_else(|| wrong("zero points", format!("have {zero}, which is no code")))?)
                }
            };
            pytorch::write(scale, zero, codes, block);
        }
        Ok(())
    }
}
