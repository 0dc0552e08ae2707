//! A weight, as it is stored.

use burn::tensor::{Int, Tensor};

/// A weight `[rows, columns]`. Vectors are multiplied by its rows ([`Linear`](crate::Linear)), or its rows are
/// looked up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Matrix {
    /// Numbers of one type.
    Dense(Tensor<2>),
}

impl Matrix {
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.dims()[0],
        }
    }

    pub fn columns(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.dims()[1],
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.shape().num_elements() * numbers.dtype().size(),
        }
    }

    /// Its rows `ids` `[n]`: `[n, columns]`.
    pub fn select(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        match self {
            Self::Dense(numbers) => numbers.clone().select(0, ids),
        }
    }
}
