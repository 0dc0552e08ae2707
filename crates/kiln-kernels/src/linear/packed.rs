//! Packed weights, as they lie in memory.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order, SIXTEEN},
};

use crate::{linear::packed_lines, runtime::choice::Path, testing::numbers::Numbers};

/// A weight `[rows, columns]` in words of 32 bits, from whose codes products are computed.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    /// Those of a row in each row, or of sixteen rows in [`Order::Sixteens`]
    pub(crate) words: Tensor<2, Int>,
    pub(crate) layout: PackedLayout,
    /// Rows and columns
    pub(crate) shape: [usize; 2],
    pub(crate) use_as: Use,
}

/// What the words of a [`PackedMatrix`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    pub format: Format,
    pub order: Order,
}

/// How a [`PackedMatrix`] is computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The type of the vectors that meet it, and of results
    pub dtype: DType,
    pub arithmetic: Arithmetic,
}

impl PackedLayout {
    /// Rows whose words are mixed with each other's.
    pub fn together(self) -> usize {
        if self.order == Order::Sixteens { SIXTEEN } else { 1 }
    }

    /// The shape of the words of a matrix `[rows, columns]`; `None` where a row is no whole number of blocks, or of words.
    pub fn words(self, [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        let together = self.together();
        // Lanes of GPUs read four numbers at once.
        let fits = self.order == Order::Sixteens || columns.is_multiple_of(4);
        let words = self.format.words(self.order, together, columns).filter(|_| fits)?;
        Some([rows.div_ceil(together), words])
    }

    /// Whether matrices of that many rows can be one above the other: none begins within a sixteen.
    pub fn is_for_stacks(self, rows: usize) -> bool {
        rows.is_multiple_of(self.together())
    }
}

impl PackedMatrix {
    /// A matrix `[rows, columns]` of `words`, int32 on the device: the bits count. They have the shape that
    /// [`PackedLayout::words`] says.
    ///
    /// # Panics
    /// If they have another.
    pub fn new(words: Tensor<2, Int>, layout: PackedLayout, shape: [usize; 2], use_as: Use) -> Self {
        assert_eq!(Some(words.dims()), layout.words(shape), "packed matrix: words of {shape:?}");
        Self { words, layout, shape, use_as }
    }

    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    pub fn columns(&self) -> usize {
        self.shape[1]
    }

    pub fn format(&self) -> Format {
        self.layout.format
    }

    /// Some of its rows. In [`Order::Sixteens`] they begin with a whole sixteen.
    pub(crate) fn narrow(&self, rows: Range<usize>) -> Self {
        let together = self.layout.together();
        let words = self.words.clone().narrow(0, rows.start / together, rows.len().div_ceil(together));
        Self { words, shape: [rows.len(), self.shape[1]], ..*self }
    }
}

/// Whether an implementation computes with packed weights.
pub(crate) fn takes_packed(path: Path, PackedLayout { format, order }: PackedLayout) -> bool {
    match path {
        Path::Reference => true,
        Path::Native => order == Order::Sixteens,
        Path::Wgsl | Path::Cube => order == Order::Rows && packed_lines::pick(format).is_some(),
    }
}

impl Numbers {
    /// A packed weight `[rows, columns]` of numbers from -2 to 2, for vectors of the type of the inputs.
    ///
    /// # Panics
    /// If a row is no whole number of blocks.
    pub fn packed_matrix(
        &mut self,
        shape: [usize; 2],
        layout: PackedLayout,
        arithmetic: Arithmetic,
    ) -> PackedMatrix {
        self.packed_matrix_times(1.0, shape, layout, arithmetic)
    }

    /// [`packed_matrix`](Self::packed_matrix) of numbers that are multiplied by `factor`.
    ///
    /// # Panics
    /// If a row is no whole number of blocks.
    pub fn packed_matrix_times(
        &mut self,
        factor: f32,
        shape: [usize; 2],
        layout: PackedLayout,
        arithmetic: Arithmetic,
    ) -> PackedMatrix {
        let numbers: Vec<f32> = (0..shape[0] * shape[1]).map(|_| self.next() * factor).collect();
        let of_words = layout.words(shape).expect("rows are whole blocks");
        let mut bytes = vec![0; layout.format.bytes_of(numbers.len()).expect("rows are whole blocks")];
        let mut words = vec![0i32; of_words.iter().product()];
        let packed = layout.format.pack(&numbers, &mut bytes).and_then(|()| {
            layout.format.arrange(layout.order, shape[1], &bytes, bytemuck::cast_slice_mut(&mut words))
        });
        packed.expect("bytes and words are those of the numbers");
        let words = Tensor::from_data(TensorData::new(words, of_words), (self.device(), DType::I32));
        PackedMatrix::new(words, layout, shape, Use { dtype: self.dtype(), arithmetic })
    }
}
