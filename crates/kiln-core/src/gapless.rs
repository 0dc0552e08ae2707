//! Tensors whose rows follow each other without gaps.
//!
//! CUDA's allocator in cubecl lets rows begin at multiples of a power of two, up to 512 bytes. Rows of 80
//! float16 numbers would take 256 bytes instead of 160. A tensor with one dimension has one row, and keeps
//! its place in memory when it is reshaped. So what is large, weights and caches, is created by these
//! functions.

use burn::tensor::{
    Tensor, TensorCreationOptions, TensorData,
    kind::{Basic, Numeric},
};

/// Creates a tensor of zeros.
pub fn zeros<const D: usize, K: Numeric>(
    shape: [usize; D],
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D, K> {
    match shape.iter().product() {
        // To `reshape`, a 0 means another thing.
        0 => Tensor::zeros(shape, options),
        len => Tensor::<1, K>::zeros([len], options).reshape(shape),
    }
}

/// Creates a tensor whose numbers are not set.
pub fn empty<const D: usize, K: Basic>(
    shape: [usize; D],
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D, K> {
    match shape.iter().product() {
        0 => Tensor::empty(shape, options),
        len => Tensor::<1, K>::empty([len], options).reshape(shape),
    }
}

/// Creates a tensor with the numbers of `data`, whose shape it has.
///
/// # Panics
/// If `data` has another number of dimensions.
pub fn from_data<const D: usize, K: Basic>(
    data: TensorData,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D, K> {
    let (bytes, shape, dtype) = data.into_parts();
    match shape.num_elements() {
        0 => Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), options),
        len => Tensor::<1, K>::from_data(TensorData::from_bytes(bytes, [len], dtype), options).reshape(shape),
    }
}
