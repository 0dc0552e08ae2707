//! AWQ, in the layout of its kernel GEMM.
//!
//! Sources: J. Lin et al., "AWQ", <https://arxiv.org/abs/2306.00978>; `dequantize_gemm` of AutoAWQ.

use super::{
    Quantized, check,
    codes::{Codes, awq},
    product,
    scaling::{Groups, Scaling, transposed},
    wrong,
};
use crate::Error;

impl Quantized {
    /// Creates an AWQ matrix. Codes are `[columns, rows / 8]` words of 4-bit codes, `scales` are
    /// `[groups, rows]`, and `zeros` are `[groups, rows / 8]` words (`qzeros`). `group` is the number of
    /// consecutive columns in a group.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths contradict each other.
    pub fn awq(
        rows: usize,
        columns: usize,
        scales: &[f32],
        zeros: &[u32],
        group: usize,
    ) -> Result<Self, Error> {
        if !rows.is_multiple_of(8) {
            return Err(wrong("rows", format!("are {rows}, no multiple of 8")));
        }
        let groups = scales.len().checked_div(rows).unwrap_or(0);
        check("words of zero points", zeros.len(), product("zero points", groups, rows / 8)?)?;
        let zeros: Vec<f32> =
            zeros.iter().flat_map(|word| (0..8).map(move |row| f32::from(awq(*word, row)))).collect();
        let (scales, zeros) = (transposed(scales, rows), transposed(&zeros, rows));
        let groups = Groups::new([rows, columns], group, None, scales, zeros)?;
        Self::new(rows, columns, Codes::Awq, Scaling::Groups(groups))
    }
}
