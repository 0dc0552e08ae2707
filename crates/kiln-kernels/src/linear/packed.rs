//! Packed weights in their memory layout.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order, SIXTEEN},
};

use crate::{linear::packed_lines, runtime::choice::Implementation, testing::numbers::Numbers};

/// A weight `[rows, columns]` in 32-bit words, whose codes are multiplied directly.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    /// The words of one row per row, or of sixteen rows in [`Order::Sixteens`]
    pub(crate) words: Tensor<2, Int>,
    pub(crate) layout: PackedLayout,
    /// Rows and columns
    pub(crate) shape: [usize; 2],
    pub(crate) use_as: Use,
}

/// The format and the order of the words in a [`PackedMatrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedLayout {
    pub format: Format,
    pub order: Order,
}

/// How a [`PackedMatrix`] is used in products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The type of the vectors that are multiplied with the weight, and of the results
    pub dtype: DType,
    pub arithmetic: Arithmetic,
}

impl PackedLayout {
    /// Number of rows whose words are interleaved.
    pub fn together(self) -> usize {
        if self.order == Order::Sixteens { SIXTEEN } else { 1 }
    }

    /// The shape of the words of a matrix `[rows, columns]`; `None` unless a row is a whole number of blocks
    /// and of words.
    pub fn words(self, [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        let together = self.together();
        // GPU lanes read four numbers at a time.
        let fits = self.order == Order::Sixteens || columns.is_multiple_of(4);
        let words = self.format.words(self.order, together, columns).filter(|_| fits)?;
        Some([rows.div_ceil(together), words])
    }

    /// Whether matrices with `rows` rows can be stacked, which requires that none begins within a group of
    /// sixteen rows.
    pub fn is_for_stacks(self, rows: usize) -> bool {
        rows.is_multiple_of(self.together())
    }
}

impl PackedMatrix {
    /// Creates a matrix `[rows, columns]` from `words`, int32 on the device, of which only the bits count.
    /// Their shape is given by [`PackedLayout::words`].
    ///
    /// # Panics
    /// If `words` has another shape.
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

    /// Returns some of the rows. In [`Order::Sixteens`], the range must begin at a multiple of 16.
    pub(crate) fn narrow(&self, rows: Range<usize>) -> Self {
        let together = self.layout.together();
        let words = self.words.clone().narrow(0, rows.start / together, rows.len().div_ceil(together));
        Self { words, shape: [rows.len(), self.shape[1]], ..*self }
    }
}

/// Whether an implementation computes with packed weights.
pub(crate) fn takes_packed(path: Implementation, PackedLayout { format, order }: PackedLayout) -> bool {
    match path {
        Implementation::Reference => true,
        Implementation::Native => order == Order::Sixteens,
        Implementation::Wgsl | Implementation::Cube => {
            order == Order::Rows && packed_lines::pick(format).is_some()
        }
    }
}

impl Numbers {
    /// Generates a packed weight `[rows, columns]` with numbers from -2 to 2, for vectors of the type of the
    /// inputs.
    ///
    /// # Panics
    /// If a row is not a whole number of blocks.
    pub fn packed_matrix(
        &mut self,
        shape: [usize; 2],
        layout: PackedLayout,
        arithmetic: Arithmetic,
    ) -> PackedMatrix {
        self.packed_matrix_times(1.0, shape, layout, arithmetic)
    }

    /// Like [`packed_matrix`](Self::packed_matrix), with numbers multiplied by `factor`.
    ///
    /// # Panics
    /// If a row is not a whole number of blocks.
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
