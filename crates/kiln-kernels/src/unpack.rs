//! Rows of a packed weight as numbers: embeddings of tokens, and what the reference multiplies.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_weights::{Format, streams::Order};

use crate::{
    Arithmetic, Kernel, PackedLayout, PackedMatrix, Path, cases::Case, invariance::Extent,
    linear::takes_packed, packed_lines, shader::Shader,
};

/// Rows of a packed weight: `[n, columns]`, in the type that it is used as.
#[derive(Clone, Debug)]
pub struct Unpack {
    pub matrix: PackedMatrix,
    /// `[n]`, numbers of rows of the matrix; `None`: all, in order
    pub ids: Option<Tensor<1, Int>>,
}

impl Unpack {
    /// All rows.
    pub(crate) fn all(matrix: PackedMatrix) -> Self {
        Self { matrix, ids: None }
    }

    fn rows(&self) -> usize {
        self.ids.as_ref().map_or(self.matrix.rows(), |ids| ids.dims()[0])
    }

    /// The rows of words in host memory.
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

    /// The numbers are those of [`kiln_weights::Format::unpack`].
    ///
    /// # Panics
    /// If an id is not that of a row.
    fn reference(self) -> Tensor<2> {
        let words = self.matrix.words.clone().into_data();
        self.of_words(words.as_slice().expect("words are int32"))
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<2>, Self> {
        let words = crate::native::primitive(self.matrix.words.clone()).to_contiguous();
        match words.as_slice::<i32>() {
            Some(words) => Ok(self.of_words(words)),
            None => Err(self),
        }
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<2>, Self> {
        use burn::backend::Cube;

        use crate::launch::{LANES, Launch, empty, in_order};

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
        let launch = Launch::new(&SHADER, dtype, &y.client).with(&[format]).writes(&y).reads(words);
        launch.run((rows * columns / 4).div_ceil(LANES), &[rows as u32, columns as u32, row as u32]);
        Ok(Tensor::from_primitive::<Cube>(y))
    }

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
                for (blocks, rows) in [(1, 1), (3, 40)] {
                    let shape = [rows, blocks * format.block().max(32)];
                    let case = Case::new((format.name(), order, shape), move |numbers| {
                        let matrix = numbers.packed_matrix(shape, layout, Arithmetic::Floats);
                        let ids: Vec<i64> = (0..rows as i64).map(|i| i * 7 % rows as i64).collect();
                        let ids =
                            Tensor::from_data(TensorData::new(ids, [rows]), (numbers.device(), DType::I64));
                        Self { matrix, ids: (rows > 1).then_some(ids) }
                    });
                    // Every device gives the numbers, to the bit.
                    let lacks = move |path, _| path != Path::Native && !takes_packed(path, layout);
                    cases.push(case.without(lacks));
                }
            }
        }
        cases
    }
}

const SHADER: Shader = Shader {
    name: "unpack",
    text: concat!(
        include_str!("../../../shaders/unpack.wgsl"),
        include_str!("../../../shaders/weights_packed.wgsl")
    ),
    options: &[packed_lines::FORMATS],
};
