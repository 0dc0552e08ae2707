//! From a checkpoint's bytes to tensors on a device.

use std::{collections::BTreeSet, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData, kind::Basic, s};
use half::{bf16, f16};
use kiln_core::{Error, Result, device_state::DeviceState};
use kiln_kernels::{Matrix, PackedFormat, PackedMatrix};
use kiln_weights::gguf::names::Undo;
use safetensors::Dtype;

use super::{
    Checkpoint, Entry, Found,
    convert::{Failed, Number, Stored, decode},
    quantized::{Group, Unpacking},
};
use crate::{Part, Weights};

/// Bytes that may be on their way to a GPU before the loader waits for it. What is under way is host memory, twice:
/// the converted weights, and the driver's staging buffer. So larger tensors travel in blocks of rows, too.
const IN_FLIGHT: usize = 4 << 20;

/// Loads the tensors of a checkpoint one by one, and remembers which it was asked for.
///
/// Host memory: on the CPU none but the weights themselves, else a few times `IN_FLIGHT`.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    dtype: DType,
    largest_binding: usize,
    /// Whether tensors are copied to memory of the device's own
    copied: bool,
    resident_experts: Option<usize>,
    /// Whether matrices that are stored in bfloat16 stay so.
    keeps_bf16: bool,
    on_progress: &'a mut dyn FnMut(u64),
    used: BTreeSet<String>,
    /// The quantized matrix that was read last: its next rows need the same tensors.
    unpacking: Option<Unpacking>,
    in_flight: usize,
    parameters: u64,
}

/// Some rows of a tensor in a file.
#[derive(Clone, Copy)]
struct Piece<'a> {
    name: &'a str,
    entry: &'a Entry,
    rows: usize,
    /// The number of the first row.
    first: usize,
    /// Rows of the whole tensor.
    of: usize,
    /// Numbers of a row.
    columns: usize,
    /// Where the tensor begins, from the beginning of the file's data.
    start: usize,
    /// Bytes of a row in the file.
    row: usize,
    /// What the conversion of the file did to it.
    undo: Undo,
}

impl Piece<'_> {
    fn elements(&self) -> u64 {
        (self.rows * self.columns) as u64
    }

    /// Rows that follow each other in the file: where each run begins, and its bytes.
    fn runs(&self) -> impl Iterator<Item = (usize, usize)> {
        let each = if matches!(self.undo, Undo::Permuted { .. }) { 1 } else { self.rows.max(1) };
        let rows = (self.first..self.first + self.rows).step_by(each);
        rows.map(move |row| (self.start + self.undo.row(row, self.of) * self.row, each * self.row))
    }
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("folder", &self.checkpoint.folder).field("dtype", &self.dtype).finish()
    }
}

impl<'a> Loader<'a> {
    /// `copied`: whether tensors are copied to memory of the device's own. `on_progress` is told the bytes of the file
    /// that were read, each time some were.
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
            keeps_bf16: false,
            on_progress,
            used,
            unpacking: None,
            in_flight: 0,
            parameters: 0,
        }
    }

    /// Has the weights of experts be in host memory, but for so many of each block.
    pub fn keep_experts(&mut self, resident: Option<usize>) {
        self.resident_experts = resident;
    }

    /// Has matrices that are stored in bfloat16 stay so, as [`Matrix::Packed`].
    pub fn keep_bf16(&mut self, keeps: bool) {
        self.keeps_bf16 = keeps;
    }

    /// Says whether every tensor of the checkpoint found its place; returns how many elements were loaded.
    ///
    /// # Errors
    /// [`Error::File`] naming those left over: the config then describes another model than the weights.
    pub fn finish(self) -> Result<u64> {
        let left: Vec<_> = (self.checkpoint.tensors.keys())
            .filter(|name| !self.used.contains(*name) && !self.checkpoint.is_spare(name))
            .collect();
        let Some(first) = left.first() else { return Ok(self.parameters) };
        let why = format!(
            "the weights hold {} tensors that {} has no place for, such as `{first}`; they belong to another config",
            left.len(),
            self.checkpoint.config_name()
        );
        Err(Error::File { path: self.checkpoint.path_of("config.json"), why })
    }

    fn find(&mut self, name: &str, shape: &[usize]) -> Result<Found<'a>> {
        let found = self.checkpoint.find(name, shape)?;
        self.used.insert(found.name.clone());
        Ok(found)
    }

    /// Rows `range` of the tensor of all `parts`, whose rows have the shape `row`, in the files.
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

    /// Rows `range` of the tensor of all `parts`, whose rows have the shape `row`.
    fn stack<const D: usize>(
        &mut self,
        parts: &[Part],
        row: &[usize],
        range: Range<usize>,
    ) -> Result<Tensor<D>> {
        let pieces = self.pieces(parts, row, &range)?;
        let mut shape = [range.len(); D];
        shape[1..].copy_from_slice(row);
        self.upload(&pieces, shape, self.dtype)
    }

    /// `pieces` as a tensor of `dtype`, which is cut along its first dimension to travel. Of int32, it has the bytes of the file.
    fn upload<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        dtype: DType,
    ) -> Result<Tensor<D, K>> {
        let row = shape[1..].iter().product::<usize>() * dtype.size();
        let rows = if self.copied { (IN_FLIGHT / row.max(1)).max(1) } else { shape[0] };
        self.parameters += pieces.iter().map(Piece::elements).sum::<u64>();
        if rows >= shape[0] {
            return self.send(pieces, shape, dtype);
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
                let part = self.send(&[block], part_shape, dtype)?;
                // In place: nobody else holds the tensor.
                whole = whole.slice_assign(s![start..end], part);
                self.wait()?;
                start = end;
            }
        }
        Ok(whole)
    }

    /// Converts `pieces` and starts them on their way.
    fn send<const D: usize, K: Basic + 'static>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        dtype: DType,
    ) -> Result<Tensor<D, K>> {
        let device = self.device;
        let data = self.read(pieces, shape, dtype)?;
        let tensor = device.memory_persistent_allocations(data, |data: TensorData| {
            Tensor::<D, K>::from_data(data, (device, dtype))
        });
        self.in_flight += shape.iter().product::<usize>() * dtype.size();
        if self.in_flight >= IN_FLIGHT {
            self.wait()?;
        }
        Ok(tensor)
    }

    /// Reads `pieces`, and converts them to a type of floats.
    fn read<const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        dtype: DType,
    ) -> Result<TensorData> {
        let data = match dtype {
            DType::I32 => self.words(pieces, shape)?,
            DType::F16 => self.convert::<f16, D>(pieces, shape)?,
            DType::BF16 => self.convert::<bf16, D>(pieces, shape)?,
            _ => self.convert::<f32, D>(pieces, shape)?,
        };
        (self.on_progress)(pieces.iter().map(|piece| (piece.rows * piece.row) as u64).sum());
        Ok(data)
    }

    /// The bytes of `pieces`, one behind the other, as words.
    fn words<const D: usize>(&self, pieces: &[Piece<'_>], shape: [usize; D]) -> Result<TensorData> {
        let mut words = bytemuck::zeroed_vec::<i32>(shape.iter().product());
        let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for piece in pieces {
            for (start, len) in piece.runs() {
                let (bytes, behind) = rest.split_at_mut(len);
                self.checkpoint.read(piece.entry, start, bytes)?;
                rest = behind;
            }
        }
        Ok(TensorData::new(words, shape))
    }

    /// The numbers of `pieces`, one behind the other; no second copy of any is made.
    fn convert<T: Number, const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
    ) -> Result<TensorData> {
        let mut numbers = bytemuck::zeroed_vec::<T>(shape.iter().product());
        let mut rest = &mut numbers[..];
        for piece in pieces {
            let (converted, behind) = rest.split_at_mut(piece.rows * piece.columns);
            self.decode(piece, converted).map_err(|failed| match failed {
                Failed::Read(error) => error,
                Failed::Convert(why) => {
                    let path = self.checkpoint.path(piece.entry);
                    Error::File { path, why: format!("`{}` {why}", piece.name) }
                }
            })?;
            rest = behind;
        }
        Ok(TensorData::new(numbers, shape))
    }

    /// The numbers of a piece.
    fn decode<T: Number>(&mut self, piece: &Piece<'_>, mut numbers: &mut [T]) -> Result<(), Failed> {
        if let Stored::Quantized(group) = &piece.entry.stored {
            return self.unpack(piece, group, numbers);
        }
        for (start, bytes) in piece.runs() {
            let rows = bytes.checked_div(piece.row).unwrap_or(0);
            let (converted, behind) = numbers.split_at_mut(rows * piece.columns);
            let mut at = start;
            let mut source = |bytes: &mut [u8]| {
                self.checkpoint.read(piece.entry, at, bytes)?;
                at += bytes.len();
                Ok(())
            };
            decode::<T>(&mut source, &piece.entry.stored, piece.undo, converted)?;
            numbers = behind;
        }
        Ok(())
    }

    /// The numbers of a piece of a quantized matrix.
    fn unpack<T: Number>(
        &mut self,
        piece: &Piece<'_>,
        group: &Group,
        numbers: &mut [T],
    ) -> Result<(), Failed> {
        let &Piece { name, entry, first, .. } = piece;
        let unpacking = match self.unpacking.take().filter(|unpacking| unpacking.is_of(name)) {
            Some(unpacking) => unpacking,
            None => Unpacking::begin(self.checkpoint, name, entry, group)?,
        };
        let read = |start, bytes: &mut [u8]| self.checkpoint.read(entry, entry.range.start + start, bytes);
        self.unpacking.insert(unpacking).rows(first, read, numbers)
    }

    fn wait(&mut self) -> Result<()> {
        self.in_flight = 0;
        DeviceState::of(self.device).sync()
    }
}

impl Weights for Loader<'_> {
    fn vector(&mut self, parts: &[Part]) -> Result<Tensor<1>> {
        self.stack(parts, &[], 0..parts.iter().map(|part| part.rows).sum())
    }

    fn matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Matrix> {
        let format = PackedFormat::Bf16;
        if let Some(words) = format.words(width).filter(|_| self.keeps_bf16) {
            let pieces = self.pieces(parts, &[width], &range)?;
            if pieces.iter().all(|piece| piece.entry.stored == Stored::Plain(Dtype::BF16)) {
                let words: Tensor<2, Int> = self.upload(&pieces, [range.len(), words], DType::I32)?;
                return Ok(Matrix::Packed(PackedMatrix::new(words, format)));
            }
        }
        self.dense_matrix(parts, width, range).map(Matrix::Dense)
    }

    fn dense_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<Tensor<2>> {
        self.stack(parts, &[width], range)
    }

    fn host_matrix(&mut self, parts: &[Part], width: usize, range: Range<usize>) -> Result<TensorData> {
        let pieces = self.pieces(parts, &[width], &range)?;
        let shape = [range.len(), width];
        self.parameters += shape.iter().product::<usize>() as u64;
        self.read(&pieces, shape, self.dtype)
    }

    fn resident_experts(&self) -> Option<usize> {
        self.resident_experts
    }

    fn float32(&mut self, name: &str, shape: &[usize]) -> Result<Tensor<1>> {
        let Found { entry, start, row, undo, .. } = self.find(name, shape)?;
        let columns = shape.iter().skip(1).product();
        let rows = shape.first().copied().unwrap_or(1);
        let piece = Piece { name, entry, rows, first: 0, of: rows, columns, start, row, undo };
        self.upload(&[piece], [rows * columns], DType::F32)
    }

    fn largest_binding(&self) -> usize {
        self.largest_binding
    }

    fn element_bytes(&self) -> usize {
        self.dtype.size()
    }
}
