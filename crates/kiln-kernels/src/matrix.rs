//! A weight, as it is stored.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor};

use crate::{Kernels, Unpack};

/// A weight `[rows, columns]`. Vectors are multiplied by its rows ([`Linear`](crate::Linear)), or its rows are
/// looked up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Matrix {
    /// Numbers of one type.
    Dense(Tensor<2>),
    /// Numbers that several share a word. GPU kernels read the words.
    Packed(PackedMatrix),
}

/// A weight `[rows, columns]` in words of 32 bits.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    /// `[rows, words of a row]`
    pub(crate) words: Tensor<2, Int>,
    pub(crate) format: PackedFormat,
}

/// What a word of a [`PackedMatrix`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedFormat {
    /// Two bfloat16 numbers; the first is the low half. They are float32 numbers that end early, so every device computes with them, also those
    /// that do not have the type.
    Bf16,
}

impl PackedFormat {
    /// Numbers of a word.
    pub fn numbers_a_word(self) -> usize {
        match self {
            Self::Bf16 => 2,
        }
    }

    /// The words of so many columns, where kernels take them: a lane reads four numbers at once.
    pub fn words(self, columns: usize) -> Option<usize> {
        columns.is_multiple_of(4).then(|| columns / self.numbers_a_word())
    }
}

impl PackedMatrix {
    /// A matrix of `words` `[rows, words of a row]`, int32 on the device: the bits count.
    pub fn new(words: Tensor<2, Int>, format: PackedFormat) -> Self {
        Self { words, format }
    }

    pub fn rows(&self) -> usize {
        self.words.dims()[0]
    }

    pub fn columns(&self) -> usize {
        self.words.dims()[1] * self.format.numbers_a_word()
    }

    /// Some of its rows.
    pub(crate) fn narrow(&self, rows: Range<usize>) -> Self {
        Self { words: self.words.clone().narrow(0, rows.start, rows.len()), ..*self }
    }
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

    /// The type of its numbers. Packed ones are computed with in float32.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Dense(numbers) => numbers.dtype(),
            Self::Packed(_) => DType::F32,
        }
    }

    /// Its rows `ids` `[n]`: `[n, columns]`.
    pub fn select(&self, ids: Tensor<1, Int>, kernels: &Kernels) -> Tensor<2> {
        match self {
            Self::Dense(numbers) => numbers.clone().select(0, ids),
            Self::Packed(packed) => {
                let words = packed.words.clone().select(0, ids);
                kernels.run(Unpack { matrix: PackedMatrix { words, ..*packed } })
            }
        }
    }

    /// All its numbers, in plain operations.
    pub(crate) fn numbers(self) -> Tensor<2> {
        match self {
            Self::Dense(numbers) => numbers,
            Self::Packed(matrix) => Unpack { matrix }.numbers(),
        }
    }
}

/// As many matrices of one shape, one above the other: a weight of every expert of a layer. They are in blocks that a kernel can
/// bind. Their numbers are of one type, and not packed.
#[derive(Clone, Debug)]
pub struct MatrixStack {
    /// How many there are, then the rows and the columns of each.
    shape: [usize; 3],
    blocks: Vec<StackBlock>,
}

/// All rows of some of the matrices, or some rows of one of them.
#[derive(Clone, Debug)]
pub(crate) struct StackBlock {
    /// `[members · rows, columns]`
    pub(crate) numbers: Tensor<2>,
    pub(crate) members: Range<usize>,
    pub(crate) rows: Range<usize>,
}

impl MatrixStack {
    /// Matrices of this shape, `[count, rows, columns]`, in blocks of up to `most` rows. `read` is asked for some rows of all of
    /// them, one above the other.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn read<E>(
        shape: [usize; 3],
        most: usize,
        mut read: impl FnMut(Range<usize>) -> Result<Tensor<2>, E>,
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
                let numbers = read(start..start + members.len() * rows_of_each.len())?;
                blocks.push(StackBlock { numbers, members: members.clone(), rows: rows_of_each });
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
        self.blocks
            .iter()
            .map(|block| block.numbers.shape().num_elements() * block.numbers.dtype().size())
            .sum()
    }

    pub(crate) fn blocks(&self) -> &[StackBlock] {
        &self.blocks
    }

    /// The rows of matrix `member`, piece by piece.
    pub(crate) fn pieces(&self, member: usize) -> impl Iterator<Item = Tensor<2>> {
        let own = self.blocks.iter().filter(move |block| block.members.contains(&member));
        own.map(move |StackBlock { numbers, members, rows }| {
            numbers.clone().narrow(0, (member - members.start) * rows.len(), rows.len())
        })
    }
}
