//! Hadamard rotation of heads: no channel stands out afterwards, so codes of few bits lose less (QuaRot,
//! Ashkboos et al., 2024, <https://arxiv.org/abs/2404.00456>).
//!
//! The matrix is orthogonal: scores of rotated queries and keys equal those of unrotated ones, and mixed
//! values are rotated back.

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::Result;

use super::QUANTIZED;

/// Smallest block for which the rotation is worth its cost.
const SMALLEST: usize = 8;

/// Number of channels that are rotated together: the largest power of two that divides `width`.
pub(super) fn block(width: usize) -> Result<usize> {
    let block = 1usize << width.trailing_zeros().min(16);
    if block < SMALLEST {
        return Err(QUANTIZED.wrong(format!(
            "`rotate=on` needs heads whose size is divided by {SMALLEST}, 16, or another power of two from there on; \
             this model's have {width}"
        )));
    }
    Ok(block)
}

/// Returns the rotation `[width, width]`: Sylvester's matrix on the diagonal, orthogonal and symmetric.
pub(super) fn matrix(width: usize, dtype: DType, device: &Device) -> Result<Tensor<2>> {
    let block = block(width)?;
    let root = (block as f32).sqrt();
    let numbers = (0..width * width).map(|at| {
        let (row, column) = (at / width, at % width);
        match row / block == column / block {
            true if ((row % block) & (column % block)).count_ones() % 2 == 0 => 1.0 / root,
            true => -1.0 / root,
            false => 0.0,
        }
    });
    let data = TensorData::new(numbers.collect::<Vec<f32>>(), [width, width]);
    Ok(Tensor::from_data(data, (device, dtype)))
}
