//! A history packed as a whole, in groups that may span tokens, heads and rows.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{
    Result,
    need::Stream,
    read_back::ReadBack,
    slot::{Outline, Tensors},
};

use crate::quantizers::{Backend, Grouping, Quantized, Recipe, words};

/// Packed keys or values of all tokens except the recent ones.
///
/// Rows cannot be extracted from the packed data: a list of selected rows is kept, and applied when the data
/// are unpacked.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// Words of codes; scales and zero points, both `[groups, 1]`.
    tensors: (Tensor<1, Int>, (Tensor<2>, Tensor<2>)),
    /// Shape before packing: `[batch, heads, tokens, width]`.
    shape: [usize; 4],
    dtype: DType,
    /// Packed row of each current row.
    rows: Vec<usize>,
}

/// How keys or values are packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub(super) backend: &'static dyn Backend,
    pub(super) recipe: Recipe,
    pub(super) grouping: Grouping,
    /// Number of elements per group.
    pub(super) group: usize,
}

impl History {
    pub(super) fn pack(x: Tensor<4>, how: &Packed) -> Self {
        let (shape, dtype) = (x.dims(), x.dtype());
        let groups = how.grouping.split(x.cast(DType::F32), how.group);
        let Quantized { codes, scale, zero } = how.backend.quantize(groups, &how.recipe);
        let words = words::pack(codes, how.recipe.bits);
        // The format has rounded these to the type already, so storing them in it loses nothing.
        let kept = |x: Tensor<2>| x.cast(dtype);
        let tensors = (words, (kept(scale), kept(zero)));
        Self { tensors, shape, dtype, rows: (0..shape[0]).collect() }
    }

    pub(super) fn unpack(&self, how: &Packed) -> Tensor<4> {
        let (words, (scale, zero)) = self.tensors.clone();
        let codes = words::unpack(words, how.recipe.bits, [scale.dims()[0], how.group]);
        let [scale, zero] = [scale, zero].map(|x| x.cast(DType::F32));
        let x = how.backend.dequantize(&Quantized { codes, scale, zero }, &how.recipe);
        let x = how.grouping.join(x, self.shape).cast(self.dtype);
        if self.rows.iter().copied().eq(0..self.shape[0]) { x } else { x.select_rows(&self.rows) }
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether this is a history of such keys or values, packed as in `how`.
    pub(super) fn fits(&self, how: &Packed, stream: Stream) -> bool {
        let Some(numbers) = self.shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len)) else {
            return false;
        };
        let (words, (scale, zero)) = &self.tensors;
        let groups = [numbers / how.group, 1];
        stream.fits(&self.shape)
            && numbers.is_multiple_of(how.group)
            && words.dims() == [words::count(numbers, how.recipe.bits)]
            && (scale.dims(), zero.dims()) == (groups, groups)
            && self.dtype.is_float()
            && zero.dtype() == self.dtype
    }

    /// Number of packed tokens.
    pub(super) fn tokens(&self) -> usize {
        self.shape[2]
    }
}

/// Shape and row list of a history, which are saved as an additional tensor.
struct Outlined {
    shape: [usize; 4],
    rows: Vec<usize>,
}

impl Outlined {
    /// Parses the additional tensor; `None` if it names rows that do not exist.
    fn read(data: &TensorData) -> Option<Self> {
        if data.dtype() != DType::I32 {
            return None;
        }
        let numbers: Vec<usize> = data.iter::<i64>().map(usize::try_from).collect::<Result<_, _>>().ok()?;
        let (shape, rows) = numbers.split_first_chunk::<4>()?;
        let there =
            !rows.is_empty() && rows.iter().all(|&row| row < shape[0]) && shape.iter().all(|&len| len > 0);
        there.then(|| Self { shape: *shape, rows: rows.to_vec() })
    }
}

impl History {
    /// Returns the shape and the row list as a tensor.
    fn numbers(&self) -> TensorData {
        let numbers: Vec<i32> = self.shape.iter().chain(&self.rows).map(|&number| number as i32).collect();
        TensorData::new(numbers, [4 + self.rows.len()])
    }
}

impl Tensors for History {
    /// Groups may span rows; the selected rows are a list.
    const BY_ROWS: bool = false;

    fn outlines(&self) -> Vec<Outline> {
        let numbers = (vec![4 + self.rows.len()], DType::I32);
        [self.tensors.outlines(), vec![numbers]].concat()
    }

    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn tokens(&self) -> usize {
        self.tensors.tokens()
    }

    fn dtype(&self) -> DType {
        self.tensors.dtype()
    }

    fn select_rows(mut self, rows: &[usize]) -> Self {
        self.rows = rows.iter().map(|&row| self.rows[row]).collect();
        self
    }

    fn select_rows_on_device(self, _: &Tensor<1, Int>) -> Option<Self> {
        None
    }

    fn start_reading(&self, tokens: Option<&Range<usize>>, reads: &mut Vec<ReadBack>) {
        self.tensors.start_reading(tokens, reads);
        reads.push(ReadBack::ready(self.numbers()));
    }

    fn from_host(host: &mut dyn Iterator<Item = TensorData>, device: &Device) -> Option<Self> {
        let tensors: (_, (Tensor<2>, _)) = Tensors::from_host(host, device)?;
        let Outlined { shape, rows } = Outlined::read(&host.next()?)?;
        let dtype = tensors.1.0.dtype();
        Some(Self { tensors, shape, dtype, rows })
    }

    fn bytes(&self) -> usize {
        self.tensors.bytes()
    }
}
