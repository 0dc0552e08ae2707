//! Decoding: what the bytes of a tensor become, in host memory.

use burn::tensor::{DType, TensorData};
use half::{bf16, f16};
use kiln_core::{Error, Result};
use kiln_kernels::PackedLayout;
use kiln_weights::{
    Format,
    gguf::names::Undo,
    streams::{Order, SIXTEEN},
};
use rayon::prelude::*;

use super::{
    Checkpoint,
    convert::{BLOCK, Failed, Number, Stored, pack},
    locate::Piece,
    quantized::{Group, Unpacking},
    view::View,
};

/// Number of file bytes that are arranged into words at a time.
const ARRANGED: usize = 1 << 18;

/// The form of a decoded tensor.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// Numbers of this type.
    Numbers(DType),
    /// Words of a packed matrix.
    Words(PackedLayout),
}

impl Form {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::Numbers(dtype) => dtype,
            Self::Words(_) => DType::I32,
        }
    }
}

/// Reads and decodes pieces of tensors.
pub(super) struct Decoder<'a> {
    checkpoint: &'a Checkpoint,
    /// The quantized matrix that was read last; its next rows need the same tensors.
    unpacking: Option<Unpacking>,
    on_progress: &'a mut dyn FnMut(u64),
}

impl<'a> Decoder<'a> {
    /// `on_progress` receives the number of file bytes read, after each read.
    pub(super) fn new(checkpoint: &'a Checkpoint, on_progress: &'a mut dyn FnMut(u64)) -> Self {
        Self { checkpoint, unpacking: None, on_progress }
    }

    /// Reads the concatenation of `pieces`, which becomes a tensor of this shape.
    pub(super) fn decode<const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
        form: Form,
    ) -> Result<TensorData> {
        let data = match form {
            Form::Words(layout) => self.packed(pieces, layout, shape)?,
            Form::Numbers(DType::F16) => self.numbers::<f16, D>(pieces, shape)?,
            Form::Numbers(DType::BF16) => self.numbers::<bf16, D>(pieces, shape)?,
            Form::Numbers(_) => self.numbers::<f32, D>(pieces, shape)?,
        };
        (self.on_progress)(pieces.iter().map(|piece| piece.rows as u64 * piece.row as u64).sum());
        Ok(data)
    }

    /// Returns the concatenated rows of `pieces` as words of a packed matrix. Rows are arranged in chunks, so
    /// that no second copy is made.
    fn packed<const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        layout: PackedLayout,
        shape: [usize; D],
    ) -> Result<TensorData> {
        let mut words = bytemuck::zeroed_vec::<i32>(shape.iter().product());
        let columns = pieces.first().map_or(0, |piece| piece.columns);
        let row = layout.format.bytes_of(columns).unwrap_or(0).max(1);
        let quantized = pieces.iter().map(|piece| self.codes_of(piece)).collect::<Result<Vec<_>>>()?;
        // The piece and the row number of each row.
        let rows: Vec<(usize, usize)> =
            pieces.iter().enumerate().flat_map(|(i, piece)| piece.rows().map(move |row| (i, row))).collect();
        let checkpoint = self.checkpoint;
        let together = if layout.order == Order::Sixteens { SIXTEEN } else { 1 };
        let at_once = (ARRANGED / (row * together)).max(1) * together;
        let words_at_once = at_once / together * shape[1..].iter().product::<usize>();
        let pack = |(rows, words): (&[(usize, usize)], &mut [i32])| {
            let mut bytes = vec![0; rows.len() * row];
            let mut rest = &mut bytes[..];
            for run in rows.chunk_by(|(one, _), (other, _)| one == other) {
                let (own, later) = std::mem::take(&mut rest).split_at_mut(run.len() * row);
                let &[(i, first), ..] = run else { continue };
                let piece = &pieces[i];
                match &quantized[i] {
                    Some(matrix) => matrix
                        .pack(first..first + run.len(), layout.format, own)
                        .map_err(|why| failed(checkpoint, piece, why))?,
                    None => {
                        let (part, mut own) = (Piece { first, rows: run.len(), ..*piece }, own);
                        for (start, rows) in part.runs() {
                            let (bytes, later) = own.split_at_mut(rows * row);
                            pack_rows(checkpoint, piece, start, layout.format, bytes)?;
                            own = later;
                        }
                    }
                }
                rest = later;
            }
            let arranged =
                layout.format.arrange(layout.order, columns, &bytes, bytemuck::cast_slice_mut(words));
            arranged.map_err(|e| match rows.first() {
                Some((i, _)) => of_piece(checkpoint, &pieces[*i], e.to_string()),
                None => Error::File { path: checkpoint.folder.clone(), why: e.to_string() },
            })
        };
        let words_at_once = words_at_once.max(1);
        // What lies between the elements of a scattered view is read with them, and kept for the next rows.
        // Threads would read different places by turns.
        if pieces.iter().any(|piece| piece.entry.view.as_ref().is_some_and(View::is_scattered)) {
            rows.chunks(at_once).zip(words.chunks_mut(words_at_once)).try_for_each(pack)?;
        } else {
            rows.par_chunks(at_once).zip(words.par_chunks_mut(words_at_once)).try_for_each(pack)?;
        }
        self.unpacking = quantized.into_iter().flatten().last();
        Ok(TensorData::new(words, shape))
    }

    /// Decodes `pieces` to one sequence of numbers. No second copy of any piece is made.
    fn numbers<T: Number, const D: usize>(
        &mut self,
        pieces: &[Piece<'_>],
        shape: [usize; D],
    ) -> Result<TensorData> {
        let mut numbers = bytemuck::zeroed_vec::<T>(shape.iter().product());
        let mut rest = &mut numbers[..];
        for piece in pieces {
            let (decoded, later) = rest.split_at_mut(piece.rows * piece.columns);
            self.numbers_of(piece, decoded).map_err(|why| failed(self.checkpoint, piece, why))?;
            rest = later;
        }
        Ok(TensorData::new(numbers, shape))
    }

    /// Decodes the numbers of one piece.
    fn numbers_of<T: Number>(&mut self, piece: &Piece<'_>, mut numbers: &mut [T]) -> Result<(), Failed> {
        if let Stored::Quantized(group) = &piece.entry.stored {
            return self.unpacked(piece, group, numbers);
        }
        for (start, rows) in piece.runs() {
            let (decoded, later) = numbers.split_at_mut(rows * piece.columns);
            let mut at = start;
            let mut read = |bytes: &mut [u8]| {
                self.checkpoint.read(piece.entry, at, bytes)?;
                at += bytes.len() as u64;
                Ok(())
            };
            decode_rows::<T>(&mut read, &piece.entry.stored, piece.undo, decoded)?;
            numbers = later;
        }
        Ok(())
    }

    /// Unpacks the numbers of a piece of a quantized matrix.
    fn unpacked<T: Number>(
        &mut self,
        piece: &Piece<'_>,
        group: &Group,
        numbers: &mut [T],
    ) -> Result<(), Failed> {
        let unpacking = self.quantized_matrix(piece, group)?;
        let checkpoint = self.checkpoint;
        let read = |at, bytes: &mut [u8]| checkpoint.read(piece.entry, piece.start + at as u64, bytes);
        self.unpacking.insert(unpacking).rows(piece.first, &read, numbers)
    }

    /// Returns the quantized matrix that contains a piece, with the codes of its rows read; `None` for other
    /// pieces.
    fn codes_of(&mut self, piece: &Piece<'_>) -> Result<Option<Unpacking>> {
        let Stored::Quantized(group) = &piece.entry.stored else { return Ok(None) };
        let checkpoint = self.checkpoint;
        let prepared = self.quantized_matrix(piece, group).and_then(|mut matrix| {
            matrix.prepare(piece.rows(), &|at, bytes| {
                checkpoint.read(piece.entry, piece.start + at as u64, bytes)
            })?;
            Ok(matrix)
        });
        prepared.map(Some).map_err(|why| failed(checkpoint, piece, why))
    }

    /// Returns the quantized matrix that contains a piece, reusing the last one if it is the same.
    fn quantized_matrix(&mut self, piece: &Piece<'_>, group: &Group) -> Result<Unpacking, Failed> {
        match self.unpacking.take().filter(|unpacking| unpacking.is_of(piece.name)) {
            Some(unpacking) => Ok(unpacking),
            None => Unpacking::begin(self.checkpoint, piece.name, piece.entry, group),
        }
    }
}

/// Fills a buffer with the next bytes of a file.
type ReadNext<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<(), Error>;

/// Decodes little-endian numbers, which are whole rows, until `numbers` is full, and undoes the changes that
/// the conversion to GGUF made to each.
fn decode_rows<T: Number>(
    read: ReadNext<'_>,
    from: &Stored,
    undo: Undo,
    numbers: &mut [T],
) -> Result<(), Failed> {
    let is_changed = !undo.keeps_numbers();
    if *from == Stored::Plain(T::DTYPE) && !is_changed {
        return Ok(read(bytemuck::cast_slice_mut(numbers))?);
    }
    let mut wide = vec![0.0; BLOCK.min(numbers.len())];
    let mut bytes = Vec::new();
    for out in numbers.chunks_mut(BLOCK) {
        let wide = &mut wide[..out.len()];
        widen(read, from, &mut bytes, wide)?;
        if is_changed {
            wide.iter_mut().for_each(|number| *number = undo.number(*number));
        }
        T::round(wide, out)?;
    }
    Ok(())
}

/// Decodes numbers to float32. `bytes` is a scratch buffer.
fn widen(read: ReadNext<'_>, from: &Stored, bytes: &mut Vec<u8>, wide: &mut [f32]) -> Result<(), Failed> {
    if !from.is_read() {
        return Err(Failed::Convert(from.unread()));
    }
    let len = from.bytes_of(wide.len());
    let len = len.ok_or_else(|| Failed::Convert(format!("is cut within a block of {from}")))?;
    bytes.resize(len, 0);
    read(bytes)?;
    from.unpack(bytes, wide).map_err(Failed::Convert)
}

/// An error about the tensor of a piece.
fn of_piece(checkpoint: &Checkpoint, piece: &Piece<'_>, why: String) -> Error {
    Error::File { path: checkpoint.path(piece.entry), why: format!("`{}` {why}", piece.name) }
}

/// Converts a failure to read rows of a piece into an error.
fn failed(checkpoint: &Checkpoint, piece: &Piece<'_>, failed: Failed) -> Error {
    match failed {
        Failed::Read(error) => error,
        Failed::Convert(why) => of_piece(checkpoint, piece, why),
    }
}

/// Packs the rows of a piece that begin at offset `start` in `format`: copied as they are stored, or packed
/// now.
fn pack_rows(
    checkpoint: &Checkpoint,
    piece: &Piece<'_>,
    start: u64,
    format: Format,
    to: &mut [u8],
) -> Result<()> {
    let (stored, undo) = (&piece.entry.stored, piece.undo);
    if stored.format() == Some(format) && undo.keeps_numbers() {
        return checkpoint.read(piece.entry, start, to);
    }
    let wrong = |why: String| of_piece(checkpoint, piece, why);
    let rows = format.bytes_of(piece.columns).map_or(0, |row| to.len() / row.max(1));
    let (mut bytes, mut numbers) = (vec![0; rows * piece.row], vec![0.0; rows * piece.columns]);
    checkpoint.read(piece.entry, start, &mut bytes)?;
    stored.unpack(&bytes, &mut numbers).map_err(wrong)?;
    numbers.iter_mut().for_each(|number| *number = undo.number(*number));
    pack(format, &numbers, to).map_err(|why| failed(checkpoint, piece, why))
}
