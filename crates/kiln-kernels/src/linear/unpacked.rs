//! Products of many rows with packed weights, on CUDA, on software GPUs and where lanes multiply matrices:
//! some rows of the weight are unpacked at a time, and multiplied like dense ones.

use burn::tensor::Tensor;

use super::{Linear, finished, takes_packed};
use crate::{
    linear::{matrix::Matrix, unpack::Unpack},
    runtime::{choice::Implementation, kernel::Kernel},
};

/// Most bytes of numbers that are unpacked at a time, unless a row has more or a device binds fewer. They are
/// enough for any matrix of a layer of Llama-3-8B: every part of a product costs launches and a copy.
const AT_ONCE: usize = 256 << 20;

/// Computes the product if the weight is packed, with these implementations of unpacking and of the product
/// with a dense weight. If that of unpacking does not take its inputs, its reference runs. `most`: bytes of
/// the largest tensor.
///
/// # Errors
/// Returns the inputs otherwise.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(super) fn product_of(
    linear: Linear,
    most: usize,
    unpack: impl Fn(Unpack) -> Result<Tensor<2>, Unpack>,
    multiply: impl Fn(Linear) -> Tensor<3>,
) -> Result<Tensor<3>, Linear> {
    let Matrix::Packed(packed) = &linear.weight else { return Err(linear) };
    let ([rows, tokens, input], output) = (linear.x.dims(), packed.rows());
    let is_read = takes_packed(Implementation::Wgsl, packed.layout);
    if !is_read || linear.x.dtype() != linear.weight.dtype() || rows * tokens * input * output == 0 {
        return Err(linear);
    }
    let at_once = (most.min(AT_ONCE) / (linear.x.dtype().size() * input)).max(1);
    let unpacked = |rows| {
        let rows = Unpack::all(packed.narrow(rows));
        Matrix::Dense(unpack(rows).unwrap_or_else(Unpack::reference))
    };
    if output <= at_once {
        let weight = unpacked(0..output);
        return Ok(multiply(Linear { weight, ..linear }));
    }
    let product_of_part = |first: usize| {
        let weight = unpacked(first..(first + at_once).min(output));
        multiply(Linear { x: linear.x.clone(), weight, bias: None, residual: None })
    };
    let y = Tensor::cat((0..output).step_by(at_once).map(product_of_part).collect(), 2);
    Ok(finished(y, linear.bias, linear.residual))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};
    use kiln_weights::{
        Format,
        streams::{Arithmetic, Order},
    };

    use super::*;
    use crate::{
        linear::packed::PackedLayout,
        testing::numbers::{Layout, Numbers},
    };

    #[test]
    fn parts_of_a_matrix_have_the_product_of_the_whole() {
        let mut numbers = Numbers::new(&Device::flex(), DType::F32);
        let layout = PackedLayout { format: Format::Q4_0, order: Order::Rows };
        let linear = Linear {
            x: numbers.tensor([2, 3, 64], Layout::Plain),
            weight: Matrix::Packed(numbers.packed_matrix([7, 64], layout, Arithmetic::Floats)),
            bias: Some(numbers.tensor([7], Layout::Plain)),
            residual: Some(numbers.tensor([2, 3, 7], Layout::Plain)),
        };
        let want = linear.clone().reference().into_data();
        // Rows have 256 bytes: parts of 1, of 3 and a last one of 1, and the whole.
        for most in [0, 1023, 1 << 20] {
            let y = product_of(linear.clone(), most, Err, Linear::reference);
            let y = y.expect("the weight is packed");
            y.into_data().assert_approx_eq::<f32>(&want, burn::tensor::Tolerance::absolute(1e-6));
        }
    }
}
