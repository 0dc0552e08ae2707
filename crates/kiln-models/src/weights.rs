//! Sources of a model's weights: a checkpoint, or a generator.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, gapless, host_data};
use kiln_kernels::{
    Arithmetic, Kernels, Linear, Matrix, MatrixStack, PackedLayout, PackedMatrix, Use, product,
};

/// The device that the weights of a stage are loaded to.
#[derive(Clone, Debug)]
pub struct LoadTarget {
    pub kernels: Kernels,
    /// The arithmetic of products with packed weights.
    pub arithmetic: Arithmetic,
    /// Size in bytes of the largest tensor that a kernel can bind.
    pub largest_binding: usize,
    /// Whether tensors are copied to memory that the device owns.
    pub copied: bool,
}

impl LoadTarget {
    pub fn device(&self) -> &Device {
        self.kernels.device()
    }
}

/// The place of the experts of mixtures.
#[derive(Clone, Debug, Default)]
pub enum ExpertPlace {
    /// The device of their block.
    #[default]
    Device,
    /// Host memory, from where experts are copied to the device when tokens go to them. This many of each
    /// block stay on the device.
    HostMemory { resident: usize },
    /// Another device, which computes them, in float32.
    Elsewhere(LoadTarget),
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    /// Number of rows of a matrix, or length of a vector.
    pub rows: usize,
}

impl Part {
    pub fn new(name: impl Into<String>, rows: usize) -> Self {
        Self { name: name.into(), rows }
    }
}

/// A source of weights by their names in the checkpoint. Shapes are those of PyTorch: matrices are
/// `[out, in]`.
///
/// Several parts become one tensor, concatenated along the rows: matrices that multiply the same vector are
/// one matrix here, however the file stores them.
pub trait Weights {
    /// Loads the weights from now on to the device of this block, instead of the device of the first one.
    fn begin_block(&mut self, _block: usize) {}

    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>>;

    /// Returns rows `range` of the concatenation of all `parts`, `[rows of all, width]`.
    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        self.dense_matrix(parts, width, range).map(Matrix::Dense)
    }

    /// Whether there is a tensor of this name.
    fn has(&self, _name: &str) -> bool {
        true
    }

    /// Returns [`matrix`](Self::matrix) with elements of the compute type.
    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>>;

    /// Returns [`matrix`](Self::matrix) in host memory.
    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix>;

    /// Returns all numbers of the tensor `name`, which has this shape, in order. They are float32, whatever
    /// the type of the other weights.
    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>>;

    /// Size in bytes of the largest tensor that a kernel can bind.
    fn largest_binding(&self) -> usize;

    /// Size in bytes of one element on the device.
    fn element_bytes(&self) -> usize;

    fn expert_place(&self) -> ExpertPlace {
        ExpertPlace::Device
    }

    /// Loads the weights from now on to this device, as float32 where they are not packed. `None`: to that of
    /// the block again. Only called for [`ExpertPlace::Elsewhere`].
    fn load_to_other(&mut self, _target: Option<&LoadTarget>) {}

    /// Returns the concatenation of all `parts`, cut into blocks of rows that are each small enough to be
    /// bound.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind a row.
    fn rows(&mut self, parts: &[Part], width: usize) -> Result<Rows> {
        let blocks = self.blocks(parts, width)?.into_iter().map(|block| self.matrix(parts, width, block));
        Ok(Rows { blocks: blocks.collect::<Result<_>>()? })
    }

    /// Returns [`rows`](Self::rows) in host memory.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind a row.
    fn host_rows(&mut self, parts: &[Part], width: usize) -> Result<HostRows> {
        let blocks = self.blocks(parts, width)?.into_iter();
        let read = |block| self.host_matrix(parts, width, block);
        Ok(HostRows { blocks: blocks.map(read).collect::<Result<_>>()? })
    }

    /// Returns matrices of this shape, `[count, rows, width]`: the concatenation of all `parts`, in blocks
    /// that are each small enough to be bound.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind a row.
    fn stack(&mut self, parts: &[Part], shape: [usize; 3]) -> Result<MatrixStack> {
        let most = self.rows_at_once(parts, shape[2])?;
        MatrixStack::read(shape, most, |range| self.dense_matrix(parts, shape[2], range).map(Matrix::Dense))
    }

    /// Divides the rows of all `parts` into blocks that the device can bind.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind a row.
    fn blocks(&self, parts: &[Part], width: usize) -> Result<Vec<Range<usize>>> {
        let most = self.rows_at_once(parts, width)?;
        let mut blocks = Vec::new();
        for run in self.runs(parts, width)? {
            let end = run.end;
            blocks.extend(run.step_by(most).map(|first| first..first.saturating_add(most).min(end)));
        }
        Ok(blocks)
    }

    /// Divides the rows of all `parts` into runs that can be one matrix. Rows packed in different formats are
    /// separate runs.
    ///
    /// # Errors
    /// The errors for a missing tensor.
    fn runs(&self, parts: &[Part], _width: usize) -> Result<Vec<Range<usize>>> {
        let all = 0..parts.iter().map(|part| part.rows).sum();
        Ok([all].into())
    }

    /// Returns how many rows of `parts` the device can bind together.
    ///
    /// # Errors
    /// [`Error::Setting`] if the device cannot bind a single row.
    fn rows_at_once(&self, parts: &[Part], width: usize) -> Result<usize> {
        let (row, most) = ((width * self.element_bytes()).max(1), self.largest_binding());
        if row > most {
            let name = parts.first().map_or("", |part| &part.name);
            let why = format!(
                "a row of `{name}` has {row} bytes and this device binds at most {most}; try the CPU"
            );
            return Err(Error::Setting { name: "device", why });
        }
        Ok(most / row)
    }
}

/// A matrix `[rows, width]` in blocks of rows. Embeddings and heads of real vocabularies exceed the largest
/// buffer that many GPUs can bind (128 MiB is common).
#[derive(Clone, Debug)]
pub struct Rows {
    blocks: Vec<Matrix>,
}

impl From<Tensor<2>> for Rows {
    fn from(numbers: Tensor<2>) -> Self {
        Self { blocks: vec![Matrix::Dense(numbers)] }
    }
}

impl Rows {
    /// The type of the vectors that the matrix is multiplied with.
    pub(crate) fn dtype(&self) -> DType {
        self.blocks.first().map_or(DType::F32, Matrix::dtype)
    }

    /// Device of the first block, which is that of all.
    pub(crate) fn device(&self) -> Option<Device> {
        self.blocks.first().map(Matrix::device)
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.blocks.first().map_or(0, Matrix::columns)
    }

    /// Returns the sum with the product of `b` `[rows, rank]` and `a` `[rank, columns]`, both in float32;
    /// `None` for packed numbers.
    pub(crate) fn plus_product(&self, b: &Tensor<2>, a: &Tensor<2>) -> Option<Self> {
        let mut first = 0;
        let sum = |block: &Matrix| {
            let Matrix::Dense(numbers) = block else { return None };
            let rows = b.clone().narrow(0, first, block.rows());
            first += block.rows();
            let sum = numbers.clone().cast(DType::F32) + product(rows, a.clone());
            Some(Matrix::Dense(sum.cast(numbers.dtype())))
        };
        Some(Self { blocks: self.blocks.iter().map(sum).collect::<Option<_>>()? })
    }

    /// Looks up the rows with the indices `ids` `[batch, tokens]`, as `[batch, tokens, width]`.
    pub(crate) fn select(&self, ids: Tensor<2, Int>, kernels: &Kernels) -> Tensor<3> {
        let [batch, tokens] = ids.dims();
        let ids = ids.reshape([batch * tokens]);
        let width = self.blocks.first().map_or(0, Matrix::columns);
        // Ids were already checked against the vocabulary.
        if let [whole] = &self.blocks[..] {
            return whole.select(ids, kernels).reshape([batch, tokens, width]);
        }
        let mut start = 0;
        let mut found: Option<Tensor<2>> = None;
        for block in &self.blocks {
            let len = block.rows();
            let local = ids.clone() - start as i64;
            let rows = block.select(local.clone().clamp(0, len as i64 - 1), kernels);
            found = Some(match found {
                None => rows,
                Some(before) => {
                    let here = local.greater_equal_elem(0).reshape([batch * tokens, 1]);
                    before.mask_where(here.expand([batch * tokens, width]), rows)
                }
            });
            start += len;
        }
        match found {
            Some(rows) => rows.reshape([batch, tokens, width]),
            None => Tensor::zeros([batch, tokens, 0], &ids.device()),
        }
    }

    /// Multiplies `x` `[batch, tokens, width]` by every row, and adds `bias` `[rows]` and `residual`:
    /// `[batch, tokens, rows]`.
    pub(crate) fn project(
        &self,
        x: Tensor<3>,
        bias: Option<&Tensor<1>>,
        residual: Option<Tensor<3>>,
        kernels: &Kernels,
    ) -> Tensor<3> {
        if let [whole] = &self.blocks[..] {
            return kernels.run(Linear { x, weight: whole.clone(), bias: bias.cloned(), residual });
        }
        let mut start = 0;
        let project = |block: &Matrix| {
            let (first, rows) = (start, block.rows());
            start += rows;
            let bias = bias.map(|bias| bias.clone().narrow(0, first, rows));
            let residual = residual.as_ref().map(|residual| residual.clone().narrow(2, first, rows));
            kernels.run(Linear { x: x.clone(), weight: block.clone(), bias, residual })
        };
        Tensor::cat(self.blocks.iter().map(project).collect(), 2)
    }

    pub(crate) fn matrices(&self) -> &[Matrix] {
        &self.blocks
    }

    /// Returns the matrix, if it was not cut.
    pub(crate) fn whole(&self) -> Option<&Matrix> {
        match &self.blocks[..] {
            [whole] => Some(whole),
            _ => None,
        }
    }

    /// Size on the device in bytes.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(Matrix::bytes).sum()
    }

    /// Number of blocks that the matrix was cut into.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// A matrix in host memory, in the same blocks as its [`Rows`].
#[derive(Clone, Debug)]
pub struct HostRows {
    blocks: Vec<HostMatrix>,
}

impl HostRows {
    /// Copies the matrix to a device.
    pub(crate) fn to_device(&self, device: &Device) -> Rows {
        Rows { blocks: self.blocks.iter().map(|block| block.to_device(device)).collect() }
    }

    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(HostMatrix::bytes).sum()
    }
}

/// A [`Matrix`] in host memory.
#[derive(Clone, Debug)]
pub struct HostMatrix {
    /// Numbers `[rows, width]`, or words.
    data: TensorData,
    /// Layout of the words, shape of their matrix, and its use.
    packed: Option<(PackedLayout, [usize; 2], Use)>,
}

impl HostMatrix {
    /// Creates a matrix from numbers `[rows, width]`.
    pub fn dense(numbers: TensorData) -> Self {
        Self { data: host_data::shareable(numbers), packed: None }
    }

    /// Creates a matrix from int32 `words`, in the form that [`PackedMatrix::new`] takes.
    pub fn packed(words: TensorData, layout: PackedLayout, shape: [usize; 2], use_as: Use) -> Self {
        Self { data: host_data::shareable(words), packed: Some((layout, shape, use_as)) }
    }

    fn to_device(&self, device: &Device) -> Matrix {
        let options = (device, self.data.dtype());
        match self.packed {
            None => Matrix::Dense(gapless::from_data(self.data.clone(), options)),
            Some((layout, shape, use_as)) => {
                let words = gapless::from_data(self.data.clone(), options);
                Matrix::Packed(PackedMatrix::new(words, layout, shape, use_as))
            }
        }
    }

    fn bytes(&self) -> usize {
        self.data.as_bytes().len()
    }
}
