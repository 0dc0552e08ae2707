//! MXFP4, as gpt-oss is published: 4-bit floats (E2M1), 32 of which share a power of two.
//!
//! Sources: OCP Microscaling Formats 1.0; `convert_moe_packed_tensors` of transformers.

use super::{Quantized, check, codes::Codes, product, scaling::Scaling, wrong};
use crate::{
    Error, Format,
    formats::tables::{E2M1, half_power, mxfp4_block},
};

/// Numbers that share an exponent.
const BLOCK: usize = 32;

impl Quantized {
    /// Creates an MXFP4 matrix. Codes are `[rows, columns / 2]` bytes, with the first of two in the low bits,
    /// and `exponents` are `[rows, columns / 32]`: a number is its code's value times `2^(exponent - 127)`.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other, or rows are not whole blocks.
    pub fn mxfp4(rows: usize, columns: usize, exponents: &[u8]) -> Result<Self, Error> {
        if !columns.is_multiple_of(BLOCK) {
            return Err(wrong("rows", format!("of {columns} numbers are no whole blocks of {BLOCK}")));
        }
        check("exponents", exponents.len(), product("numbers", rows, columns)? / BLOCK)?;
        // The values of the table are doubled, as in ggml.
        let scales = exponents.iter().map(|exponent| half_power(*exponent)).collect();
        Self::new(
            rows,
            columns,
            Codes::LowFirst(E2M1.map(f32::from)),
            Scaling::Blocks { scales, block: BLOCK },
        )
    }

    /// Writes codes as blocks of [`Format::Mxfp4`]. `scales` are those of the blocks.
    pub(super) fn pack_mxfp4(codes: &[u8], scales: &[f32], blocks: &mut [u8]) {
        let codes = codes.as_chunks().0;
        for ((block, codes), scale) in blocks.as_chunks_mut().0.iter_mut().zip(codes).zip(scales) {
            mxfp4_block(*scale, codes, block);
        }
    }

    /// The format of matrices whose codes have their first number in the low bits.
    pub(super) const MXFP4: Format = Format::Mxfp4;
}
