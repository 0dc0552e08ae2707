//! What native code on the CPU shares: tensors as the backend sees them.

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{BackendPrimitive, Tensor, kind::Basic},
};

/// # Panics
/// On a tensor of another backend, as Burn does wherever devices are mixed.
pub(crate) fn primitive<const D: usize, K>(tensor: Tensor<D, K>) -> FlexTensor
where
    K: Basic + BackendPrimitive<Flex, Primitive = FlexTensor>,
{
    tensor.try_into_primitive::<Flex>().expect("the tensors of a kernel are on its device")
}
