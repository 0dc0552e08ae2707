//! GPTQ.
//!
//! Sources: E. Frantar et al., "GPTQ", <https://arxiv.org/abs/2210.17323>;
//! `PackableQuantLinear.dequantize_weight` and
//! `convert_gptq_v1_to_v2_format_module` of GPTQModel.

use super::{
    Quantized, check,
    codes::{Codes, split},
    product,
    scaling::{Groups, Scaling, transposed},
    wrong,
};
use crate::Error;

/// The storage format of zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// `checkpoint_format` `gptq`: zero points minus 1. A zero point of 0 borrows from the next one in its
    /// word, so 1 is added to all of a word at once.
    LessOne,
    /// `checkpoint_format` `gptq_v2`.
    Plain,
}

/// A GPTQ matrix. Its codes are `[columns * bits / 32, rows]` words.
#[derive(Clone, Copy, Debug)]
pub struct Gptq<'a> {
    pub rows: usize,
    pub columns: usize,
    /// Bits per code: 2, 4 or 8.
    pub bits: usize,
    /// Scales `[groups, rows]`.
    pub scales: &'a [f32],
    /// Zero points, `[groups, rows * bits / 32]` words (`qzeros`).
    pub zeros: &'a [u32],
    pub stored_zeros: Zeros,
    /// Columns per group.
    pub group: usize,
    /// The group of each column (`g_idx`), if they are not in order.
    pub columns_in_groups: Option<&'a [i32]>,
}

impl Gptq<'_> {
    /// Creates the quantized matrix.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other, or if a column belongs to no group.
    pub fn quantized(self) -> Result<Quantized, Error> {
        let Self { rows, columns, bits, scales, zeros, stored_zeros, group, columns_in_groups } = self;
        // With 3 bits, GPTQModel adds 1 to other bits of a word than those of the zero points. Nothing in a
        // file says whether it was written that way.
        if ![2, 4, 8].contains(&bits) {
            return Err(wrong("codes", format!("have {bits} bits; 2, 4 and 8 are read")));
        }
        let per_word = 32 / bits;
        if !rows.is_multiple_of(per_word) {
            return Err(wrong("rows", format!("are {rows}, no multiple of {per_word}")));
        }
        let groups = scales.len().checked_div(rows).unwrap_or(0);
        check("words of zero points", zeros.len(), product("zero points", groups, rows / per_word)?)?;
        // A 1 in the place of each code.
        let ones = (0..per_word).fold(0, |ones, place| ones | 1 << (place * bits));
        let mut unpacked = vec![0; groups * rows];
        for (&word, zeros) in zeros.iter().zip(unpacked.chunks_exact_mut(per_word)) {
            let word = match stored_zeros {
                Zeros::LessOne => word.wrapping_add(ones),
                Zeros::Plain => word,
            };
            split(word, bits, zeros);
        }
        let (scales, zeros) =
            (transposed(scales, rows), transposed(&unpacked, rows).into_iter().map(f32::from).collect());
        let groups = Groups::new([rows, columns], group, columns_in_groups, scales, zeros)?;
        Quantized::new(rows, columns, Codes::Columns { bits }, Scaling::Groups(groups))
    }
}
