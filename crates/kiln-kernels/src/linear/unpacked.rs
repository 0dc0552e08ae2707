//! Products of many rows with packed weights, on CUDA and on software GPUs: some rows of the weight are
//! unpacked at a time, and multiplied like dense ones.

use burn::tensor::Tensor;

use super::{Linear, finished, takes_packed};
use crate::{
    linear::{matrix::Matrix, unpack::Unpack},
    runtime::{choice::Implementation, kernel::Kernel},
};

/// Most bytes of numbers that are unpacked at a time, unless a row has more. A GPU is busy with the product
/// of a prompt if it has some thousand rows of the weight, whatever their length, and every part of a product
/// costs launches and a copy.
const AT_ONCE: usize = 128 << 20;

/// Computes the product if the weight is packed, with this implementation of unpacking. If it does not take
/// its inputs, the reference runs.
///
/// # Errors
/// Returns the inputs otherwise.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(super) fn product_of(
    linear: Linear,
    unpack: impl Fn(Unpack) -> Result<Tensor<2>, Unpack>,
) -> Result<Tensor<3>, Linear> {
    let Matrix::Packed(packed) = &linear.weight else { return Err(linear) };
    let ([rows, tokens, input], output) = (linear.x.dims(), packed.rows());
    let is_read = takes_packed(Implementation::Wgsl, packed.layout);
    if !is_read || linear.x.dtype() != linear.weight.dtype() || rows * tokens * input * output == 0 {
        return Err(linear);
    }
    let at_once = (AT_ONCE / (linear.x.dtype().size() * input)).max(1);
    let mut products = Vec::with_capacity(output.div_ceil(at_once));
    for first in (0..output).step_by(at_once) {
        let matrix = packed.narrow(first..(first + at_once).min(output));
        let weight = Matrix::Dense(unpack(Unpack::all(matrix)).unwrap_or_else(Unpack::reference));
        let product = Linear { x: linear.x.clone(), weight, bias: None, residual: None };
        products.push(product.reference());
    }
    let y = if products.len() == 1 { products.remove(0) } else { Tensor::cat(products, 2) };
    Ok(finished(y, linear.bias, linear.residual))
}
