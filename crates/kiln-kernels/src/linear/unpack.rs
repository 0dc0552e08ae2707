//! Unpacks rows of a packed weight, for token embeddings and for the reference products.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

use crate::{
    linear::{
        packed::{PackedLayout, PackedMatrix, takes_packed},
        packed_lines,
    },
    runtime::{
        choice::Implementation,
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::{Case, SUBNORMAL_SCALES},
        checked::Checked,
        cut::Extent,
    },
};

/// Rows of a packed weight: `[n, columns]`, in the type in which it is used.
#[derive(Clone, Debug)]
pub struct Unpack {
    pub matrix: PackedMatrix,
    /// `[n]`, indices of rows; `None` for all rows, in order
    pub ids: Option<Tensor<1, Int>>,
}

impl Unpack {
    /// Unpacks all rows.
    pub(crate) fn all(matrix: PackedMatrix) -> Self {
        Self { matrix, ids: None }
    }

    fn rows(&self) -> usize {
        self.ids.as_ref().map_or(self.matrix.rows(), |ids| ids.dims()[0])
    }

    /// Unpacks the rows from words in host memory.
    fn of_words(&self, words: &[i32]) -> Tensor<2> {
        let PackedMatrix { layout, shape: [_, columns], use_as, .. } = &self.matrix;
        let rows: Vec<usize> = match &self.ids {
            Some(ids) => ids.clone().into_data().iter::<i64>().map(|id| id as usize).collect(),
            None => (0..self.matrix.rows()).collect(),
        };
        let count = rows.len();
        let words = bytemuck::cast_slice(words);
        let numbers = layout.format.numbers_of_rows(layout.order, *columns, words, rows);
        let numbers =
            numbers.expect("ids are those of rows, and words were checked when the matrix was made");
        let data = TensorData::new(numbers, [count, *columns]);
        Tensor::from_data(data, (&self.matrix.words.device(), use_as.dtype))
    }
}

impl Kernel for Unpack {
    const NAME: &'static str = "unpack";
    type Output = Tensor<2>;

    fn checked(self) -> Self {
        self
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.rows(), self.matrix.columns()]
    }

    /// Unpacks like [`kiln_weights::Format::unpack`].
    ///
    /// # Panics
    /// If an id is not the index of a row.
    fn reference(self) -> Tensor<2> {
        let words = self.matrix.words.clone().into_data();
        self.of_words(words.as_slice().expect("words are int32"))
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<2>, Self> {
        let words = crate::runtime::native::primitive(self.matrix.words.clone()).to_contiguous();
        match words.as_slice::<i32>() {
            Some(words) => Ok(self.of_words(words)),
            None => Err(self),
        }
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<2>, Self> {
        use burn::backend::Cube;

        use crate::{
            runtime::launch::{LANES, Launch, empty, in_order},
            shaders::unpack::Info,
        };

        let Self { matrix, ids } = &self;
        let (rows, columns, dtype) = (self.rows(), matrix.columns(), matrix.use_as.dtype);
        let Some(format) = packed_lines::pick(matrix.format()) else { return Err(self) };
        if rows * columns == 0 || matrix.layout.order != Order::Rows {
            return Err(self);
        }
        let words = matrix.words.clone();
        let words = in_order(match ids {
            Some(ids) => words.select(0, ids.clone()),
            None => words,
        });
        let y = empty(&words, [rows, columns], dtype);
        let row = matrix.words.dims()[1];
        let launch =
            Launch::new(&SHADER, dtype, &y.client).with(&[format]).unpacking_on(&matrix.words.device());
        let info = Info { rows: rows as u32, input: columns as u32, words: row as u32 };
        launch.run((rows.div_ceil(4) * columns.div_ceil(32) * 2).div_ceil(LANES), [&y, &words], info);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<2>, Self> {
        let is_read = takes_packed(Implementation::Cube, self.matrix.layout);
        if is_read && self.rows() * self.matrix.columns() > 0 { Ok(cube::launch(self)) } else { Err(self) }
    }
}

impl Checked for Unpack {
    fn extent(&self) -> [usize; 2] {
        [self.rows(), 1]
    }

    fn part(self, [rows, _]: Extent) -> Self {
        let ids = self
            .ids
            .unwrap_or_else(|| Tensor::arange(0..self.matrix.rows() as i64, &self.matrix.words.device()));
        Self { ids: Some(ids.narrow(0, rows.start, rows.len())), ..self }
    }

    fn part_of(whole: Tensor<2>, [rows, _]: Extent) -> Tensor<2> {
        whole.narrow(0, rows.start, rows.len())
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        let mut cases = Vec::new();
        for format in Format::ALL {
            for order in [Order::Rows, Order::Sixteens] {
                let layout = PackedLayout { format, order };
                let block = format.block().max(32);
                // Rows of floats may end within a run of 32 numbers.
                let part = (format == Format::Bf16).then_some((44, 5));
                let shapes = [(block, 1), (3 * block, 40)].into_iter().chain(part);
                let shapes = shapes.map(|shape| (shape, 1.0)).chain([((block, 9), SUBNORMAL_SCALES)]);
                for ((columns, rows), factor) in shapes {
                    let shape = [rows, columns];
                    let case = Case::new((format.name(), order, shape, factor), move |numbers| {
                        let matrix = numbers.packed_matrix_times(factor, shape, layout, Arithmetic::Floats);
                        let ids: Vec<i64> = (0..rows as i64).map(|i| i * 7 % rows as i64).collect();
                        let ids =
                            Tensor::from_data(TensorData::new(ids, [rows]), (numbers.device(), DType::I64));
                        Self { matrix, ids: (rows > 1).then_some(ids) }
                    });
                    // Every device gives the same numbers, to the bit.
                    let lacks = move |path, _| path != Implementation::Native && !takes_packed(path, layout);
                    cases.push(case.of_format(format, Arithmetic::Floats).without(lacks));
                }
            }
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "unpack",
    bindings: &[writes("y"), reads("w")],
    text: concat!(
        include_str!("../../../../shaders/unpack.wgsl"),
        include_str!("../../../../shaders/weights_packed.wgsl"),
        include_str!("../../../../shaders/halves.wgsl")
    ),
    options: &[packed_lines::FORMATS],
};

#[cfg(feature = "cube")]
mod cube {
    use burn::{
        backend::{Cube, cubecl::dtype_to_storage_type},
        tensor::Tensor as BurnTensor,
    };
    use cubecl::prelude::*;

    use super::Unpack;
    use crate::{
        linear::{
            fours::Four,
            packed_reader::{ONE, Reading, TABLE, halves_of, read_four, read_group, read_words, write_table},
        },
        runtime::launch::{LANES, address_type, count, empty, in_rows},
    };

    /// A lane unpacks half a run.
    #[cube(launch, address_type = "dynamic")]
    fn unpack<E: Float, N: Size>(
        w: &Tensor<u32>,
        y: &mut Tensor<Vector<E, N>>,
        rows: usize,
        input: usize,
        halves: usize,
        #[comptime] reading: Reading,
        #[define(E)] _elem: ElemType,
    ) {
        let mut table = Shared::<[f32]>::new_slice(TABLE);
        write_table(&mut table, reading);
        if ABSOLUTE_POS < rows * halves {
            let (row, half) = (ABSOLUTE_POS / halves, ABSOLUTE_POS % halves);
            let at = row * w.stride(0);
            let words = read_words(w, at, half, input, reading);
            #[unroll]
            for pair in 0..2usize {
                let group = read_group(w, at, half, pair, input, reading);
                let steps = comptime!(reading.steps());
                #[unroll]
                for four in 0..2usize {
                    let read = read_four(&words, &table, pair, four, ONE, reading);
                    // With minimums, products are exact, so it does not matter whether they are rounded
                    // before the sum.
                    let numbers = (read - Four::new(group.zero)) * Four::new(group.scale * steps);
                    let c = half / 2 * 8 + half % 2 * 2 + comptime!(4 * pair + four);
                    if c * 4 < input {
                        y[row * (input / 4) + c] = Vector::cast_from(numbers + Four::new(group.minimum));
                    }
                }
            }
        }
    }

    pub(super) fn launch(inputs: Unpack) -> BurnTensor<2> {
        let (rows, columns) = (inputs.rows(), inputs.matrix.columns());
        let Unpack { matrix, ids } = inputs;
        let format = matrix.format();
        let words = in_rows(match ids {
            Some(ids) => matrix.words.select(0, ids),
            None => matrix.words,
        });
        let y = empty(&words, [rows, columns], matrix.use_as.dtype);
        let (halves, reading) = (halves_of(columns), Reading::new(format, &words, false));
        unpack::launch(
            &y.client,
            count((rows * halves).div_ceil(LANES)),
            CubeDim::new_1d(LANES as u32),
            address_type([&words, &y]),
            4,
            words.clone().into_tensor_arg(),
            y.clone().into_tensor_arg(),
            rows,
            columns,
            halves,
            reading,
            dtype_to_storage_type(y.dtype),
        );
        BurnTensor::from_primitive::<Cube>(y)
    }
}
