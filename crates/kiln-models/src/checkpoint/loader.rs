//! Loading of tensors from a checkpoint to a device: each is located, decoded and uploaded.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Int, Tensor, kind::Basic};
use kiln_core::{Result, stages::Stages};
use kiln_kernels::{Kernels, Matrix, MatrixStack, PackedLayout, PackedMatrix, Use};
use kiln_weights::Format;

use super::{
    Checkpoint,
    decode::{Decoder, Form},
    locate::{Locator, Piece},
    upload::Uploader,
};
use crate::{ExpertPlace, HostMatrix, LoadTarget, Part, Weights, nn::names::TRANSPOSED};

/// Loads the tensors of a checkpoint one by one, and records which of them were requested.
///
/// Host memory: on the CPU only the weights themselves, otherwise a few times what is in flight; and one
/// tensor of experts or of GPT-2 where these are stored transposed.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    locator: Locator<'a>,
    decoder: Decoder<'a>,
    targets: Stages<LoadTarget>,
    /// The block that is loaded
    block: usize,
    uploader: Uploader,
    /// The device that weights are loaded to instead of that of the block
    other: Option<LoadTarget>,
    dtype: DType,
    expert_place: ExpertPlace,
    /// Names of the tensors that were loaded
    loaded: BTreeSet<String>,
    parameters: u64,
}

/// The layout and shape of the words of a packed matrix.
struct Words {
    layout: PackedLayout,
    shape: [usize; 2],
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("folder", &self.checkpoint.folder).field("dtype", &self.dtype).finish()
    }
}

impl<'a> Loader<'a> {
    /// Creates a loader. Matrices become [`Matrix::Packed`] in the format in which they are stored, or in the
    /// type of the model, `dtype`, if the kernels of their device can compute with it.
    /// `on_progress` receives the number of file bytes read, after each read.
    pub fn new(
        checkpoint: &'a Checkpoint,
        targets: Stages<LoadTarget>,
        dtype: DType,
        on_progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self {
            checkpoint,
            locator: Locator::new(checkpoint),
            decoder: Decoder::new(checkpoint, on_progress),
            uploader: Uploader::new(targets.first()),
            targets,
            block: 0,
            other: None,
            dtype,
            expert_place: ExpertPlace::Device,
            loaded: BTreeSet::new(),
            parameters: 0,
        }
    }

    fn target(&self) -> &LoadTarget {
        self.other.as_ref().unwrap_or_else(|| self.targets.of(self.block))
    }

    fn use_as(&self) -> Use {
        let dtype = if self.other.is_some() { DType::F32 } else { self.dtype };
        Use { dtype, arithmetic: self.target().arithmetic }
    }

    /// Counts the elements of tensors that are loaded for the first time: a head that is also the embedding
    /// is loaded twice if it is on another device. A tensor and its transposed copy count as one.
    fn count(&mut self, pieces: &[Piece<'_>]) {
        for piece in pieces {
            if self.loaded.insert(piece.name.replace(TRANSPOSED, "")) {
                self.parameters += piece.of as u64 * piece.columns as u64;
            }
        }
    }

    /// Loads the experts of mixtures to this place.
    pub fn place_experts(&mut self, place: ExpertPlace) {
        self.expert_place = place;
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
        self.count(pieces);
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
        let Some(Words { layout, shape: of_words }) = packed_words(layout, shape) else {
            return self.load(pieces, shape, self.numbers()).map(Matrix::Dense);
        };
        let words: Tensor<2, Int> = self.load(pieces, of_words, Form::Words(layout))?;
        Ok(Matrix::Packed(PackedMatrix::new(words, layout, shape, self.use_as())))
    }

    /// Returns the format of all `pieces`, if they share one and only their row order has to be undone.
    fn shared_format(&self, pieces: &[Piece<'_>]) -> Option<Format> {
        let (first, others) = pieces.split_first()?;
        let format = self.checkpoint.format(first.entry)?;
        let fits = |piece: &Piece<'_>| {
            let in_order = piece.undo.keeps_numbers();
            in_order && self.checkpoint.format(piece.entry) == Some(format)
        };
        (fits(first) && others.iter().all(fits)).then_some(format)
    }

    /// Returns the packed layout for the rows of `pieces`, if they are packed. `layout_of` returns the layout
    /// that the kernels use for a format.
    fn packed_layout(
        &self,
        pieces: &[Piece<'_>],
        width: usize,
        layout_of: impl Fn(&Kernels, Format, DType) -> Option<PackedLayout>,
    ) -> Option<PackedLayout> {
        let dtype = self.use_as().dtype;
        let layout_of = |format| layout_of(&self.target().kernels, format, dtype);
        let layout = layout_from(self.shared_format(pieces), dtype, layout_of)?;
        layout.words([1, width]).map(|_| layout)
    }

    /// Numbers of the compute type.
    fn numbers(&self) -> Form {
        Form::Numbers(self.use_as().dtype)
    }
}

/// Returns the packed layout for numbers that are stored in `format`: that for the format, or else for
/// numbers of `dtype`, to which they are rounded. `layout_of` returns the layout that kernels use for a
/// format.
pub(super) fn layout_from(
    format: Option<Format>,
    dtype: DType,
    layout_of: impl Fn(Format) -> Option<PackedLayout>,
) -> Option<PackedLayout> {
    format.and_then(&layout_of).or_else(|| layout_of(format_of(dtype)?))
}

/// The format of numbers of a type.
pub(crate) fn format_of(dtype: DType) -> Option<Format> {
    match dtype {
        DType::F32 => Some(Format::F32),
        DType::F16 => Some(Format::F16),
        DType::BF16 => Some(Format::Bf16),
        _ => None,
    }
}

/// Returns the words of a matrix of this shape; `None` if it is not packed.
fn packed_words(layout: Option<PackedLayout>, shape: [usize; 2]) -> Option<Words> {
    let layout = layout?;
    Some(Words { layout, shape: layout.words(shape)? })
}

impl Weights for Loader<'_> {
    fn begin_block(&mut self, block: usize) {
        self.block = block;
        self.uploader.load_to(self.targets.of(block));
    }

    fn has(&self, name: &str) -> bool {
        self.checkpoint.has(name)
    }

    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        let rows = parts.iter().map(|part| part.rows).sum();
        let pieces = self.locator.rows(parts, &[], &(0..rows))?;
        self.load(&pieces, [rows], self.numbers())
    }

    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        let layout = self.packed_layout(&pieces, width, PackedLayout::for_matrix);
        self.load_matrix(layout, &pieces, [range.len(), width])
    }

    fn stack(&mut self, parts: &[Part], shape: [usize; 3]) -> Result<MatrixStack> {
        let [count, rows, width] = shape;
        let all = 0..parts.iter().map(|part| part.rows).sum();
        let pieces = self.locator.rows(parts, &[width], &all)?;
        let layout = self.packed_layout(&pieces, width, |kernels, format, dtype| {
            let of_part = |part: &Part| PackedLayout::for_stack(kernels, format, dtype, part.rows);
            parts.iter().map(of_part).reduce(Option::and).flatten()
        });
        // A part may have the rows of all matrices, so its own number of rows is not enough.
        let layout = layout.filter(|layout| count == 1 || layout.is_for_stacks(rows));
        let most = match layout.and_then(|layout| Some((layout.together(), layout.words([1, width])?))) {
            Some((together, [_, words])) if self.largest_binding() >= 4 * words => {
                self.largest_binding() / (4 * words) * together
            }
            _ => self.rows_at_once(parts, width)?,
        };
        MatrixStack::read(shape, most, |range| {
            let pieces = self.locator.rows(parts, &[width], &range)?;
            self.load_matrix(layout, &pieces, [range.len(), width])
        })
    }

    fn runs(&self, parts: &[Part], width: usize) -> Result<Vec<Range<usize>>> {
        let mut runs: Vec<(Range<usize>, Option<PackedLayout>)> = Vec::new();
        let mut start = 0;
        for part in parts {
            let rows = start..start + part.rows;
            start = rows.end;
            let entry = self.checkpoint.locate(&part.name, &[part.rows, width])?.entry;
            let dtype = self.use_as().dtype;
            let layout_of = |format| PackedLayout::for_matrix(&self.target().kernels, format, dtype);
            let layout = layout_from(self.checkpoint.format(entry), dtype, layout_of);
            match runs.last_mut() {
                Some((run, last)) if *last == layout => run.end = rows.end,
                _ => runs.push((rows, layout)),
            }
        }
        Ok(runs.into_iter().map(|(rows, _)| rows).collect())
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        self.load(&pieces, [range.len(), width], self.numbers())
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        let pieces = self.locator.rows(parts, &[width], &range)?;
        let shape = [range.len(), width];
        self.count(&pieces);
        match packed_words(self.packed_layout(&pieces, width, PackedLayout::for_matrix), shape) {
            Some(Words { layout, shape: of_words }) => {
                let words = self.decoder.decode(&pieces, of_words, Form::Words(layout))?;
                Ok(HostMatrix::packed(words, layout, shape, self.use_as()))
            }
            None => {
                let numbers = self.decoder.decode(&pieces, shape, self.numbers())?;
                Ok(HostMatrix::dense(numbers))
            }
        }
    }

    fn expert_place(&self) -> ExpertPlace {
        self.expert_place.clone()
    }

    fn load_to_other(&mut self, target: Option<&LoadTarget>) {
        self.other = target.cloned();
        let target = self.other.as_ref().unwrap_or_else(|| self.targets.of(self.block));
        self.uploader.load_to(target);
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let piece = self.locator.whole(name, shape)?;
        self.load(&[piece], [piece.rows * piece.columns], Form::Numbers(DType::F32))
    }

    fn largest_binding(&self) -> usize {
        self.target().largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.use_as().dtype.size()
    }
}
