//! Activations on the CPU, with SIMD.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use pulp::{Simd, WithSimd};

use super::Activate;
use crate::{
    linear::activation::{Activation, activate},
    runtime::native::{Storage, by_storage, pieces, primitive, work},
};

/// Applies the activation.
///
/// # Errors
/// Returns the inputs, for types without an implementation.
#[allow(clippy::result_large_err, reason = "the inputs are given back")]
pub(super) fn activated(kernel: Activate) -> Result<Tensor<3>, Activate> {
    by_storage!(kernel.x.dtype(), E => Ok(activated_in::<E>(kernel)), else Err(kernel))
}

fn activated_in<E: Storage>(Activate { x, activation }: Activate) -> Tensor<3> {
    let dims = x.dims();
    let x = primitive(x).to_contiguous();
    let x: &[E] = x.as_slice().expect("the type was looked at");
    let mut y = vec![E::default(); x.len()];
    // Estimated operations per number.
    let products = 16 * x.len();
    let each = x.len().div_ceil(pieces(products)).next_multiple_of(BLOCK).max(BLOCK);
    let piece = |(x, y)| Piece { x, y, activation };
    work(products, x.chunks(each).zip(y.chunks_mut(each)).map(piece).collect());
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, dims)))
}

struct Piece<'a, E> {
    x: &'a [E],
    y: &'a mut [E],
    activation: Activation,
}

/// Numbers that are widened at a time.
const BLOCK: usize = 256;

impl<E: Storage> WithSimd for Piece<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let mut numbers = [0.0; BLOCK];
        for (x, y) in self.x.chunks(BLOCK).zip(self.y.chunks_mut(BLOCK)) {
            let numbers = &mut numbers[..x.len()];
            E::widen(x, numbers);
            activate(numbers, self.activation);
            E::narrow(numbers, y);
        }
    }
}
