//! compressed-tensors: 2-, 4- and 8-bit integers in words, signed bytes, and 8-bit floats.
//!
//! Source: `compressors/pack_quantized` and `quantization/lifecycle/forward.py` of compressed-tensors.

use super::{
    Quantized, check,
    codes::{Codes, split},
    product,
    scaling::{Groups, Scaling},
    wrong,
};
use crate::Error;

/// The encoding of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// `pack-quantized`: 2-, 4- or 8-bit integers, in words along columns.
    Packed { bits: usize },
    /// `int-quantized`: signed bytes.
    Int8,
    /// `float-quantized`: 8-bit floats (E4M3).
    Float8,
}

impl Quantized {
    /// Creates a matrix of integers or floats `[rows, columns]` with `scales` `[rows, groups]`: one for each
    /// group of columns, or one for each row. A single scale applies to the whole matrix. There are equally
    /// many `zeros`; see [`packed_zeros`](Self::packed_zeros). `columns_in_groups` has the group of each
    /// column (`weight_g_idx`), if they are not in order.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other, or if a column belongs to no group.
    pub fn compressed(
        rows: usize,
        columns: usize,
        codes: CodeType,
        scales: &[f32],
        zeros: Option<&[f32]>,
        columns_in_groups: Option<&[i32]>,
    ) -> Result<Self, Error> {
        let codes = match codes {
            CodeType::Packed { bits: bits @ (2 | 4 | 8) } => Codes::Rows { bits },
            CodeType::Packed { bits } => {
                return Err(wrong("codes", format!("have {bits} bits; 2, 4 and 8 are read")));
            }
            CodeType::Int8 => Codes::Int8,
            CodeType::Float8 => Codes::Float8,
        };
        let every = |numbers: &[f32]| match numbers {
            [one] => vec![*one; rows],
            _ => numbers.to_vec(),
        };
        // A row has at least one byte of codes, so that a single scale for all rows requires no more than a
        // few times their memory.
        if columns == 0 {
            return Err(wrong("columns", "are 0".to_owned()));
        }
        let scales = every(scales);
        let zeros = zeros.map_or_else(|| vec![0.0; scales.len()], every);
        let groups = scales.len().checked_div(rows).unwrap_or(0).max(1);
        if columns_in_groups.is_none() && !columns.is_multiple_of(groups) {
            return Err(wrong("scales", format!("divide a row of {columns} columns into {groups} groups")));
        }
        let groups =
            Groups::new([rows, columns], (columns / groups).max(1), columns_in_groups, scales, zeros)?;
        Self::new(rows, columns, codes, Scaling::Groups(groups))
    }

    /// Unpacks zero points `[rows, groups]` from words `[rows * bits / 32, groups]` along rows. The number of
    /// words is rounded up.
    ///
    /// # Errors
    /// [`Error::Quantized`] if the number of words is wrong.
    pub fn packed_zeros(rows: usize, groups: usize, bits: usize, words: &[u32]) -> Result<Vec<f32>, Error> {
        if ![2, 4, 8].contains(&bits) {
            return Err(wrong("zero points", format!("have {bits} bits; 2, 4 and 8 are read")));
        }
        let per_word = 32 / bits;
        check("words of zero points", words.len(), product("zero points", rows.div_ceil(per_word), groups)?)?;
        let half = (1 << (bits - 1)) as f32;
        let mut zeros = vec![0.0; product("zero points", rows, groups)?];
        let mut codes = [0; 16];
        let lines = zeros.chunks_mut((per_word * groups).max(1)).zip(words.chunks_exact(groups.max(1)));
        for (rows, words) in lines {
            for (group, &word) in words.iter().enumerate() {
                split(word, bits, &mut codes[..per_word]);
                for (row, code) in rows.chunks_exact_mut(groups).zip(codes) {
                    row[group] = f32::from(code) - half;
                }
            }
        }
        Ok(zeros)
    }
}
