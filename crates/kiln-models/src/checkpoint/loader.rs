//! Loading of tensors from a checkpoint to a device: each is located, decoded and uploaded.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, kind::Basic};
use kiln_core::Result;
use kiln_kernels::{Arithmetic, Kernels, Matrix, MatrixStack, PackedLayout, PackedMatrix, Use};
use kiln_weights::{Format, gguf::names::Undo};

use super::{
    Checkpoint,
    decode::{Decoder, Form},
    locate::{Locator, Piece},
    upload::Uploader,
};
use crate::{HostMatrix, Part, Weights};

/// Loads the tensors of a checkpoint one by one, and records which of them were requested.
///
/// Host memory: on the CPU only the weights themselves, otherwise a few times what is in flight.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    locator: Locator<'a>,
    decoder: Decoder<'a>,
    uploader: Uploader<'a>,
    dtype: DType,
    largest_binding: usize,
    resident_experts: Option<usize>,
    /// Settings for matrices that stay packed as they are stored.
    packed: Option<Packed>,
    parameters: u64,
}

/// Settings for matrices that stay packed as they are stored.
struct Packed {
    kernels: Kernels,
    use_as: Use,
}

/// The layout, shape and use of the words of a packed matrix.
struct Words {
    layout: PackedLayout,
    shape: [usize; 2],
    use_as: Use,
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("folder", &self.checkpoint.folder).field("dtype", &self.dtype).finish()
    }
}

impl<'a> Loader<'a> {
    /// Creates a loader. `copied` is whether tensors are copied to memory that the device owns. `on_progress`
    /// receives the number of file bytes read, after each read.
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &'a Device,
        dtype: DType,
        largest_binding: usize,
        copied: bool,
        on_progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            checkpoint,
            locator: Locator::new(checkpoint),
            decoder: Decoder::new(checkpoint, on_progress),
            uploader: Uploader::new(device, copied),
            dtype,
            largest_binding,
            resident_experts: None,
            packed: None,
            parameters: 0,
        }
    }

    /// Keeps the weights of experts in host memory, except for `resident` experts per block. With `None`, all
    /// stay on the device.
    pub fn keep_experts(&mut self, resident: Option<usize>) {
        self.resident_experts = resident;
    }

    /// Keeps matrices packed as they are stored, as [`Matrix::Packed`], if `kernels` can compute with them.
    pub fn keep_packed(&mut self, kernels: Kernels, arithmetic: Arithmetic) {
        self.packed = Some(Packed { kernels, use_as: Use { dtype: self.dtype, arithmetic } });
    }

    /// Checks that every tensor of the checkpoint was requested, and returns the number of loaded elements.
    ///
    /// # Errors
    /// [`Error::File`](kiln_core::Error::File) naming the tensors left over: the config describes another
    /// model than the weights.
    pub fn finish(self) -> Result<u64> {
        self.locator.finish()?;
        Ok(self.parameters)
    }

    /// Loads `pieces` as one tensor of this shape.
    fn load<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        form: Form,
    ) -> Result<Tensor<D, K>> {
        self.parameters += pieces.iter().map(Piece::elements).sum::<u64>();
        let decoder = &mut self.decoder;
        let mut decode = |pieces: &[Piece<'_>], shape| decoder.decode(pieces, shape, form);
        self.uploader.upload(pieces, shape, form.dtype(), &mut decode)
    }

    /// Loads the matrix that consists of `pieces`, packed in `layout` or else dense.
    fn load_matrix(
        &mut self,
        layout: Option<PackedLayout>,
        pieces: &[Piece<'_>],
        shape: [usize; 2],
    ) -> Result<Matrix> {
        let Some(Words { layout, shape: of_words, use_as }) = self.packed_words(layout, shape) else {
            return self.load(pieces, shape, Form::Numbers(self.dtype)).map(Matrix::Dense);
        };
        let words: Tensor<2, Int> = self.load(pieces, of_words, Form::Words(layout))?;
        Ok(Matrix::Packed(PackedMatrix::new(words, layout, shape, use_as)))
    }

    /// Returns the format of all `pieces`, if they share one and only their row order has to be undone.
    fn shared_format(&self, pieces: &[Piece<'_>]) -> Option<Format> {
        let (first, others) = pieces.split_first()?;
        let format = self.checkpoint.format(first.entry)?;
        let fits = |piece: &Piece<'_>| {
            let in_order = matches!(piece.undo, Undo::Nothing | Undo::Permuted { .. });
            in_order && self.checkpoint.format(piece.entry) == Some(format)
        };
        (fits(first) && others.iter().all(fits)).then_some(format)
    }

    /// Returns the packed layout for the rows of `pieces`, if they stay as they are stored. `layout_of`
    /// returns the layout that the kernels use for a format.
    fn packed_layout(
        &self,
        pieces: &[Piece<'_>],
        width: usize,
        layout_of: impl Fn(&Kernels, Format, DType) -> Option<PackedLayout>,
    ) -> Option<PackedLayout> {
        let Packed { kernels, .. } = self.packed.as_ref()?;
        let layout = layout_of(kernels, self.shared_format(pieces)?, self.dtype)?;
        layout.words([1, width]).map(|_| layout)
    }

    /// Returns the words of a matrix of this shape; `None` if it is not packed.
    fn packed_words(&self, layout: Option<PackedLayout>, shape: [usize; 2]) -> Option<Words> {
        let (layout, Packed { use_as, .. }) = (layout?, self.packed.as_ref()?);
        Some(Words { layout, shape: layout.words(shape)?, use_as: *use_as })
    }
}

impl Weights for Loader<'_> {
    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        let rows = parts.iter().map(|part| part.rows).sum();
        let pieces = self.locator.rows(parts, &[], &(0..rows))?;
        self.load(&pieces, [rows], Form::Numbers(self.dtype))
    }

    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        let layout = self.packed_layout(&pieces, width, PackedLayout::for_matrix);
        self.load_matrix(layout, &pieces, [range.len(), width])
    }

    fn stack(&mut self, parts: &[Part], shape: [usize; 3]) -> Result<MatrixStack> {
        let [.., width] = shape;
        let all = 0..parts.iter().map(|part| part.rows).sum();
        let pieces = self.locator.rows(parts, &[width], &all)?;
        let layout = self.packed_layout(&pieces, width, |kernels, format, dtype| {
            let of_part = |part: &Part| PackedLayout::for_stack(kernels, format, dtype, part.rows);
            parts.iter().map(of_part).reduce(Option::and).flatten()
        });
        let most = match layout.and_then(|layout| Some((layout.together(), layout.words([1, width])?))) {
            Some((together, [_, words])) if self.largest_binding >= 4 * words => {
                self.largest_binding / (4 * words) * together
            }
            _ => self.rows_at_once(parts, width)?,
        };
        MatrixStack::read(shape, most, |range| {
            let pieces = self.locator.rows(parts, &[width], &range)?;
            self.load_matrix(layout, &pieces, [range.len(), width])
        })
    }

    fn runs(&self, parts: &[Part], width: usize) -> Result<Vec<Range<usize>>> {
        let mut runs: Vec<(Range<usize>, Option<Format>)> = Vec::new();
        let mut start = 0;
        for part in parts {
            let rows = start..start + part.rows;
            start = rows.end;
            let entry = self.checkpoint.locate(&part.name, &[part.rows, width])?.entry;
            let format = match &self.packed {
                Some(Packed { kernels, .. }) => (self.checkpoint.format(entry))
                    .filter(|format| PackedLayout::for_matrix(kernels, *format, self.dtype).is_some()),
                None => None,
            };
            match runs.last_mut() {
                Some((run, last)) if *last == format => run.end = rows.end,
                _ => runs.push((rows, format)),
            }
        }
        Ok(runs.into_iter().map(|(rows, _)| rows).collect())
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        self.load(&pieces, [range.len(), width], Form::Numbers(self.dtype))
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        let shape = [range.len(), width];
        self.parameters += shape.iter().product::<usize>() as u64;
        match self.packed_words(self.packed_layout(&pieces, width, PackedLayout::for_matrix), shape) {
            Some(Words { layout, shape: of_words, use_as }) => {
                let words = self.decoder.decode(&pieces, of_words, Form::Words(layout))?;
                Ok(HostMatrix::packed(words, layout, shape, use_as))
            }
            None => {
                let numbers = self.decoder.decode(&pieces, shape, Form::Numbers(self.dtype))?;
                Ok(HostMatrix::dense(numbers))
            }
        }
    }

    fn resident_experts(&self) -> Option<usize> {
        self.resident_experts
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let piece = self.locator.whole(name, shape)?;
        self.load(&[piece], [piece.rows * piece.columns], Form::Numbers(DType::F32))
    }

    fn largest_binding(&self) -> usize {
        self.largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}
