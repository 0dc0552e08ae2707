//! Loading of tensors from a checkpoint to a device.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData, kind::Basic, s};
use half::{bf16, f16};
use kiln_core::{Error, Result, device_state::DeviceState};
use kiln_kernels::{Arithmetic, Kernels, Matrix, MatrixStack, PackedLayout, PackedMatrix, Use};
use kiln_weights::{
    Format,
    gguf::names::Undo,
    streams::{Order, SIXTEEN},
};
use rayon::prelude::*;

use super::{
    Checkpoint, Found,
    convert::{Failed, Number, Stored, decode},
    piece::{Piece, failed, of_piece, packed_row},
    quantized::{Group, Unpacking},
};
use crate::{HostMatrix, Part, Weights};

/// Number of bytes that may be in flight to a GPU before the loader waits for it. Bytes in flight take host
/// memory twice: the converted weights, and the driver's staging buffer. Therefore larger tensors also travel
/// in blocks of rows.
const IN_FLIGHT: usize = 4 << 20;

/// Number of file bytes that are arranged into words at a time.
const ARRANGED: usize = 1 << 18;

/// Loads the tensors of a checkpoint one by one, and records which of them were requested.
///
/// Host memory: on the CPU only the weights themselves, otherwise a few times `IN_FLIGHT`.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    dtype: DType,
    largest_binding: usize,
    /// Whether tensors are copied to memory that the device owns.
    copied: bool,
    resident_experts: Option<usize>,
    /// Settings for matrices that stay packed as they are stored.
    packed: Option<Packed>,
    on_progress: &'a mut dyn FnMut(u64),
    used: BTreeSet<String>,
    /// The quantized matrix that was read last; its next rows need the same tensors.
    unpacking: Option<Unpacking>,
    in_flight: usize,
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

/// The contents of a loaded tensor.
#[derive(Clone, Copy)]
enum Held {
    /// Numbers of this type.
    As(DType),
    /// Words of a packed matrix.
    In(PackedLayout),
}

impl Held {
    fn dtype(self) -> DType {
        match self {
            Self::As(dtype) => dtype,
            Self::In(_) => DType::I32,
        }
    }
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
        let used = BTreeSet::new();
        Self {
            checkpoint,
            device,
            dtype,
            largest_binding,
            copied,
            resident_experts: None,
            packed: None,
            on_progress,
            used,
            unpacking: None,
            in_flight: 0,
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
    /// [`Error::File`] naming the tensors left over: the config describes another model than the weights.
    pub fn finish(self) -> Result<u64> {
        self.checkpoint.check_used(&self.used)?;
        Ok(self.parameters)
    }

    fn find(&mut self, name: &str, shape: &[usize]) -> Result<Found<'a>> {
        let found = self.checkpoint.find(name, shape)?;
        self.used.insert(found.name.clone());
        Ok(found)
    }

    /// Locates rows `range` of the concatenation of all `parts` in the files. Each row has the shape `row`.
    fn pieces<'p>(&mut self, parts: &'p [Part], row: &[usize], range: &Range<usize>) -> Result<Vec<Piece<'p>>>
    where
        'a: 'p,
    {
        let mut pieces = Vec::new();
        let mut start = 0;
        for part in parts {
            let Found { entry, start: bytes, row: row_bytes, undo, .. } =
                self.find(&part.name, &[&[part.rows], row].concat())?;
            let mine = |at: usize| at.saturating_sub(start).min(part.rows);
            let (first, end) = (mine(range.start), mine(range.end));
            start += part.rows;
            if first < end {
                pieces.push(Piece {
                    name: &part.name,
                    entry,
                    rows: end - first,
                    first,
                    of: part.rows,
                    columns: row.iter().product(),
                    start: bytes,
                    row: row_bytes,
                    undo,
                });
            }
        }
        Ok(pieces)
    }

    /// Loads rows `range` of the concatenation of all `parts`. Each row has the shape `row`.
    fn dense<const D: usize>(
        &mut self,
        parts: &[Part],
        row: &[usize],
        range: Range<usize>,
    ) -> Result<Tensor<D>> {
        let pieces = self.pieces(parts, row, &range)?;
        let mut shape = [range.len(); D];
        shape[1..].copy_from_slice(row);
        self.parameters += pieces.iter().map(Piece::elements).sum::<u64>();
        self.upload(&pieces, shape, Held::As(self.dtype))
    }

    /// Loads `pieces` as one tensor, which travels in slices of its first dimension.
    fn upload<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        held: Held,
    ) -> Result<Tensor<D, K>> {
        let dtype = held.dtype();
        let row = shape[1..].iter().product::<usize>() * dtype.size();
        let rows = if self.copied { (IN_FLIGHT / row.max(1)).max(1) } else { shape[0] };
        if rows >= shape[0] {
            return self.send(pieces, shape, held);
        }
        let device = self.device;
        let mut whole = device
            .memory_persistent_allocations(shape, |shape| Tensor::<D, K>::empty(shape, (device, dtype)));
        let mut start = 0;
        for piece in pieces {
            for first in (0..piece.rows).step_by(rows) {
                let mut part_shape = shape;
                part_shape[0] = rows.min(piece.rows - first);
                let end = start + part_shape[0];
                let block = Piece { rows: part_shape[0], first: piece.first + first, ..*piece };
                let part = self.send(&[block], part_shape, held)?;
                // In place, because the tensor has no other owner.
                whole = whole.slice_assign(s![start..end], part);
                self.wait()?;
                start = end;
            }
        }
        Ok(whole)
    }

    /// Converts `pieces` and starts their transfer to the device.
    fn send<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        held: Held,
    ) -> Result<Tensor<D, K>> {
        let (device, dtype) = (self.device, held.dtype());
        let data = self.read(pieces, shape, held)?;
        let tensor = device.memory_persistent_allocations(data, |data: TensorData| {
            Tensor::<D, K>::from_data(data, (device, dtype))
        });
        self.in_flight += shape.iter().product::<usize>() * dtype.size();
        if self.in_flight >= IN_FLIGHT {
            self.wait()?;
        }
        Ok(tensor)
    }

    /// Reads and converts `pieces`.
    fn read<const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        held: Held,
    ) -> Result<TensorData> {
        let data = match held {
            Held::In(layout) => self.words(pieces, layout, shape)?,
            Held::As(DType::F16) => self.convert::<f16, D>(pieces, shape)?,
            Held::As(DType::BF16) => self.convert::<bf16, D>(pieces, shape)?,
            Held::As(_) => self.convert::<f32, D>(pieces, shape)?,
        };
        (self.on_progress)(pieces.iter().map(|piece| (piece.rows * piece.row) as u64).sum());
        Ok(data)
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

    /// Loads rows `range` of the concatenation of all `parts`, packed in `layout` or else dense.
    fn matrix_in(
        &mut self,
        layout: Option<PackedLayout>,
        parts: &[Part],
        width: usize,
        range: Range<usize>,
    ) -> Result<Matrix> {
        let shape = [range.len(), width];
        let Some(Words { layout, shape: of_words, use_as }) = self.packed_words(layout, shape) else {
            return self.dense_matrix(parts, width, range).map(Matrix::Dense);
        };
        let pieces = self.pieces(parts, &[width], &range)?;
        let words: Tensor<2, Int> = self.upload(&pieces, of_words, Held::In(layout))?;
        self.parameters += (shape[0] * shape[1]) as u64;
        Ok(Matrix::Packed(PackedMatrix::new(words, layout, shape, use_as)))
    }

    /// Returns the concatenated rows of `pieces` as words of a packed matrix. Rows are arranged in chunks, so
    /// that no second copy is made.
    fn words<const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        layout: PackedLayout,
        shape: [usize; D],
    ) -> Result<TensorData> {
        let mut words = bytemuck::zeroed_vec::<i32>(shape.iter().product());
        let columns = pieces.first().map_or(0, |piece| piece.columns);
        let row = layout.format.bytes_of(columns).unwrap_or(0).max(1);
        let quantized = pieces.iter().map(|piece| self.prepared(piece)).collect::<Result<Vec<_>>>()?;
        // The piece and the row number of each row.
        let rows: Vec<(usize, usize)> =
            pieces.iter().enumerate().flat_map(|(i, piece)| piece.rows().map(move |row| (i, row))).collect();
        let checkpoint = self.checkpoint;
        let together = if layout.order == Order::Sixteens { SIXTEEN } else { 1 };
        let at_once = (ARRANGED / (row * together)).max(1) * together;
        let words_at_once = at_once / together * shape[1..].iter().product::<usize>();
        let parts = rows.par_chunks(at_once).zip(words.par_chunks_mut(words_at_once.max(1)));
        parts.try_for_each(|(rows, words)| {
            let mut bytes = vec![0; rows.len() * row];
            let mut rest = &mut bytes[..];
            for run in rows.chunk_by(|(one, _), (other, _)| one == other) {
                let (own, behind) = std::mem::take(&mut rest).split_at_mut(run.len() * row);
                let &[(i, first), ..] = run else { continue };
                let piece = &pieces[i];
                match &quantized[i] {
                    Some(matrix) => matrix
                        .pack(first..first + run.len(), own)
                        .map_err(|why| failed(checkpoint, piece, why))?,
                    None => {
                        for ((_, row), bytes) in run.iter().zip(own.chunks_exact_mut(row)) {
                            packed_row(checkpoint, piece, piece.row_start(*row), layout.format, bytes)?;
                        }
                    }
                }
                rest = behind;
            }
            let arranged =
                layout.format.arrange(layout.order, columns, &bytes, bytemuck::cast_slice_mut(words));
            arranged.map_err(|e| match rows.first() {
                Some((i, _)) => of_piece(checkpoint, &pieces[*i], e.to_string()),
                None => Error::File { path: checkpoint.folder.clone(), why: e.to_string() },
            })
        })?;
        self.unpacking = quantized.into_iter().flatten().last();
        Ok(TensorData::new(words, shape))
    }

    /// Returns the quantized matrix that contains a piece, with the codes of its rows read; `None` for other
    /// pieces.
    fn prepared(&mut self, piece: &Piece<'_>) -> Result<Option<Unpacking>> {
        let Stored::Quantized(group) = &piece.entry.stored else { return Ok(None) };
        let checkpoint = self.checkpoint;
        let prepared = self.begin(piece, group).and_then(|mut matrix| {
            matrix.prepare(piece.rows(), &|at, bytes| {
                checkpoint.read(piece.entry, piece.start + at as u64, bytes)
            })?;
            Ok(matrix)
        });
        prepared.map(Some).map_err(|why| failed(checkpoint, piece, why))
    }

    /// Returns the quantized matrix that contains a piece, reusing the last one if it is the same.
    fn begin(&mut self, piece: &Piece<'_>, group: &Group) -> Result<Unpacking, Failed> {
        match self.unpacking.take().filter(|unpacking| unpacking.is_of(piece.name)) {
            Some(unpacking) => Ok(unpacking),
            None => Unpacking::begin(self.checkpoint, piece.name, piece.entry, group),
        }
    }

    /// Converts `pieces` to one sequence of numbers. No second copy of any piece is made.
    fn convert<T: Number, const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
    ) -> Result<TensorData> {
        let mut numbers = bytemuck::zeroed_vec::<T>(shape.iter().product());
        let mut rest = &mut numbers[..];
        for piece in pieces {
            let (converted, behind) = rest.split_at_mut(piece.rows * piece.columns);
            self.decode(piece, converted).map_err(|why| failed(self.checkpoint, piece, why))?;
            rest = behind;
        }
        Ok(TensorData::new(numbers, shape))
    }

    /// Converts the numbers of one piece.
    fn decode<T: Number>(&mut self, piece: &Piece<'_>, mut numbers: &mut [T]) -> Result<(), Failed> {
        if let Stored::Quantized(group) = &piece.entry.stored {
            return self.unpack(piece, group, numbers);
        }
        for (start, rows) in piece.runs() {
            let (converted, behind) = numbers.split_at_mut(rows * piece.columns);
            let mut at = start;
            let mut source = |bytes: &mut [u8]| {
                self.checkpoint.read(piece.entry, at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            };
            decode::<T>(&mut source, &piece.entry.stored, piece.undo, converted)?;
            numbers = behind;
        }
        Ok(())
    }

    /// Unpacks the numbers of a piece of a quantized matrix.
    fn unpack<T: Number>(
        &mut self,
        piece: &Piece<'_>,
        group: &Group,
        numbers: &mut [T],
    ) -> Result<(), Failed> {
        let unpacking = self.begin(piece, group)?;
        let checkpoint = self.checkpoint;
        let read = |at, bytes: &mut [u8]| checkpoint.read(piece.entry, piece.start + at as u64, bytes);
        self.unpacking.insert(unpacking).rows(piece.first, &read, numbers)
    }

    fn wait(&mut self) -> Result<()> {
        self.in_flight = 0;
        DeviceState::of(self.device).sync()
    }
}

impl Weights for Loader<'_> {
    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        self.dense(parts, &[], 0..parts.iter().map(|part| part.rows).sum())
    }

    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        let pieces = self.pieces(parts, &[width], &range)?;
        let layout = self.packed_layout(&pieces, width, PackedLayout::for_matrix);
        self.matrix_in(layout, parts, width, range)
    }

    fn stack(&mut self, parts: &[Part], shape: [usize; 3]) -> Result<MatrixStack> {
        let [.., width] = shape;
        let pieces = self.pieces(parts, &[width], &(0..parts.iter().map(|part| part.rows).sum()))?;
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
        MatrixStack::read(shape, most, |range| self.matrix_in(layout, parts, width, range))
    }

    fn runs(&self, parts: &[Part], width: usize) -> Result<Vec<Range<usize>>> {
        let mut runs: Vec<(Range<usize>, Option<Format>)> = Vec::new();
        let mut start = 0;
        for part in parts {
            let rows = start..start + part.rows;
            start = rows.end;
            let entry = self.checkpoint.find(&part.name, &[part.rows, width])?.entry;
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
        self.dense(parts, &[width], range)
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<HostMatrix> {
        let pieces = self.pieces(parts, &[width], &range)?;
        let shape = [range.len(), width];
        self.parameters += shape.iter().product::<usize>() as u64;
        match self.packed_words(self.packed_layout(&pieces, width, PackedLayout::for_matrix), shape) {
            Some(Words { layout, shape: of_words, use_as }) => {
                let words = self.read(&pieces, of_words, Held::In(layout))?;
                Ok(HostMatrix::packed(words, layout, shape, use_as))
            }
            None => self.read(&pieces, shape, Held::As(self.dtype)).map(HostMatrix::dense),
        }
    }

    fn resident_experts(&self) -> Option<usize> {
        self.resident_experts
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let Found { entry, start, row, undo, .. } = self.find(name, shape)?;
        let columns = shape.iter().skip(1).product();
        let rows = shape.first().copied().unwrap_or(1);
        let piece = Piece { name, entry, rows, first: 0, of: rows, columns, start, row, undo };
        self.parameters += piece.elements();
        self.upload(&[piece], [rows * columns], Held::As(DType::F32))
    }

    fn largest_binding(&self) -> usize {
        self.largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}
