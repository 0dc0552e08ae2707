//! A weight in the form in which it is stored.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};

use crate::{
    linear::{packed::PackedMatrix, unpack::Unpack},
    runtime::{kernel::Kernel, kernels::Kernels},
};

/// A weight `[rows, columns]`. Vectors are multiplied by its rows ([`Linear`](crate::Linear)), or its rows
/// are looked up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Matrix {
    /// Numbers of one type.
    Dense(Tensor<2>),
    /// Words, each with one number or several, which kernels read.
    Packed(PackedMatrix),
}

impl Matrix {
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.dims()[0],
            Self::Packed(packed) => packed.rows(),
        }
    }

    pub fn columns(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.dims()[1],
            Self::Packed(packed) => packed.columns(),
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(numbers) => numbers.shape().num_elements() * numbers.dtype().size(),
            Self::Packed(packed) => packed.words.shape().num_elements() * packed.words.dtype().size(),
        }
    }

    pub fn device(&self) -> Device {
        match self {
            Self::Dense(numbers) => numbers.device(),
            Self::Packed(packed) => packed.words.device(),
        }
    }

    /// The type of the vectors that the weight is multiplied with.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Dense(numbers) => numbers.dtype(),
            Self::Packed(packed) => packed.use_as.dtype,
        }
    }

    /// Looks up the rows `ids` `[n]`: `[n, columns]`.
    pub fn select(&self, ids: Tensor<1, Int>, kernels: &Kernels) -> Tensor<2> {
        match self {
            Self::Dense(numbers) => numbers.clone().select(0, ids),
            Self::Packed(packed) => kernels.run(Unpack { matrix: packed.clone(), ids: Some(ids) }),
        }
    }

    /// Unpacks all numbers, as in the reference.
    pub(crate) fn numbers(self) -> Tensor<2> {
        match self {
            Self::Dense(numbers) => numbers,
            Self::Packed(matrix) => Unpack::all(matrix).reference(),
        }
    }
}

/// A stack of matrices of one shape, such as a weight of every expert in a layer. The matrices are in blocks
/// that are small enough for a kernel to bind. A block is dense or packed.
#[derive(Clone, Debug)]
pub struct MatrixStack {
    /// Number of matrices, then the rows and the columns of each.
    shape: [usize; 3],
    blocks: Vec<StackBlock>,
}

/// All rows of some of the matrices, or some rows of one of them.
#[derive(Clone, Debug)]
pub(crate) struct StackBlock {
    /// `[members · rows, columns]`
    pub(crate) matrix: Matrix,
    pub(crate) members: Range<usize>,
    pub(crate) rows: Range<usize>,
}

impl MatrixStack {
    /// Reads matrices of shape `[count, rows, columns]`, in blocks of up to `most` rows. `read` is given a
    /// range of rows, counted through all matrices one above the other.
    ///
    /// # Errors
    /// Returns errors of `read`.
    ///
    /// # Panics
    /// If a block in [`Order::Sixteens`](kiln_weights::streams::Order::Sixteens) has several matrices whose
    /// number of rows is not a multiple of 16.
    pub fn read<E>(
        shape: [usize; 3],
        most: usize,
        mut read: impl FnMut(Range<usize>) -> Result<Matrix, E>,
    ) -> Result<Self, E> {
        let [count, rows, _] = shape;
        let most = most.max(1);
        let together = (most / rows.max(1)).max(1);
        let mut blocks = Vec::new();
        for first in (0..count).step_by(together) {
            let members = first..first.saturating_add(together).min(count);
            for first_row in (0..rows).step_by(most) {
                let rows_of_each = first_row..first_row.saturating_add(most).min(rows);
                let start = members.start * rows + rows_of_each.start;
                let matrix = read(start..start + members.len() * rows_of_each.len())?;
                if let Matrix::Packed(packed) = &matrix {
                    let fits = members.len() == 1 || packed.layout.is_for_stacks(rows);
                    assert!(fits, "matrix stack: {rows} rows in {:?}", packed.layout.order);
                }
                blocks.push(StackBlock { matrix, members: members.clone(), rows: rows_of_each });
            }
        }
        Ok(Self { shape, blocks })
    }

    /// `[count, rows, columns]`
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.matrix.bytes()).sum()
    }

    pub(crate) fn blocks(&self) -> &[StackBlock] {
        &self.blocks
    }

    /// Whether any block is packed.
    #[cfg(feature = "cube")]
    pub(crate) fn is_packed(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block.matrix, Matrix::Packed(_)))
    }

    /// Returns the rows of matrix `member`, piece by piece.
    pub(crate) fn pieces(&self, member: usize) -> impl Iterator<Item = Matrix> {
        let own = self.blocks.iter().filter(move |block| block.members.contains(&member));
        own.map(move |StackBlock { matrix, members, rows }| {
            let first = (member - members.start) * rows.len();
            match matrix {
                Matrix::Dense(numbers) => Matrix::Dense(numbers.clone().narrow(0, first, rows.len())),
                Matrix::Packed(packed) => Matrix::Packed(packed.narrow(first..first + rows.len())),
            }
        })
    }
}
