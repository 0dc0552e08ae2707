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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use super::*;

    /// Values of the codes, by the standard.
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    #[test]
    fn numbers_are_those_of_the_standard_unpacked_and_in_blocks() {
        let (rows, columns) = (3, 64);
        let exponents = [127, 120, 0, 1, 2, 254];
        let codes: Vec<u8> = (0..rows * columns / 2).map(|i| (i * 37 % 256) as u8).collect();
        let number = |i: usize| {
            let code = codes[i / 2] >> (i % 2 * 4) & 15;
            let power = f64::from(exponents[i / 32] as i32 - 127).exp2();
            let value = f64::from(VALUES[usize::from(code & 7)]) * power;
            (if code > 7 { -value } else { value }) as f32
        };
        let want: Vec<f32> = (0..rows * columns).map(number).collect();
        let matrix = Quantized::mxfp4(rows, columns, &exponents).unwrap();
        for range in [0..3, 1..3, 2..3] {
            let own = &codes[matrix.codes_of(range.clone())];
            let (mut numbers, mut blocks) = (vec![0.0; range.len() * columns], vec![0; range.len() * 34]);
            matrix.unpack(range.clone(), own, &mut numbers).unwrap();
            assert_eq!(numbers, want[range.start * columns..range.end * columns], "{range:?}");
            matrix.pack(range.clone(), own, &mut blocks).unwrap();
            let mut again = vec![0.0; numbers.len()];
            matrix.format().unwrap().unpack(&blocks, &mut again).unwrap();
            assert_eq!(again, numbers, "{range:?} in blocks");
        }
    }

    #[test]
    fn sizes_that_contradict_each_other_are_errors() {
        for (columns, exponents) in [(48, 3), (64, 5), (0, 1)] {
            let error = Quantized::mxfp4(2, columns, &vec![127; exponents]).unwrap_err().to_string();
            assert!(error.contains("rows") || error.contains("exponents"), "{error}");
        }
    }
}
