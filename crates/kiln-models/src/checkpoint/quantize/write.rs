//! Writes a model as one GGUF file: plans all tensors, then reads, packs and writes their rows.
//!
//! **Invariant:** memory holds at most the numbers of one piece, however large a tensor is.

use std::{
    collections::BTreeMap,
    num::NonZero,
    ops::{ControlFlow, Range},
    path::Path,
    thread,
};

use kiln_core::{Error, Result, files::NewFile};
use kiln_weights::{
    Format, Mixture,
    gguf::{GgufWriter, Metadata, NewTensor, Value, names::Undo},
};

use super::{
    super::{Checkpoint, Entry},
    outline,
    plan::{Plan, Rows, Source, columns_of, rows_of},
};

/// Numbers per piece: enough for all threads, 8 MiB in float32.
const PIECE: usize = 1 << 21;

/// The largest number that does not become infinite in float16.
const LARGEST_F16: f32 = 65504.0;

/// Summary of a GGUF file that was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quantized {
    /// Number of elements in all tensors.
    pub parameters: u64,
    /// Size of all tensors in bytes.
    pub bytes: u64,
    /// Number of tensors per format name.
    pub tensors: BTreeMap<&'static str, usize>,
}

/// Writes the model in `checkpoint` to the GGUF file `output`, with its tensors packed as `mixture` says.
///
/// `described` is metadata derived from a folder's name and tokenizer; a GGUF file keeps its own.
///
/// `on_read` receives the number of weight bytes read, after each read. If it breaks, no file is left and the
/// result is `None`. An existing file is replaced once the new one is complete.
///
/// # Errors
/// [`Error::Setting`] for a mixture that GGUF files cannot have. [`Error::File`] for a model that GGUF has no
/// names for, numbers that a format cannot hold, and files that cannot be read or written.
pub fn quantize(
    checkpoint: &Checkpoint,
    output: &Path,
    mixture: Mixture,
    described: &Metadata,
    on_read: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<Quantized>> {
    let file_type = mixture.file_type().ok_or_else(|| Error::Setting {
        name: "mixture",
        why: format!(
            "{mixture} cannot be in a GGUF file; choose another, or pack the model when it is loaded"
        ),
    })?;
    let plan = Plan::of(checkpoint)?;
    let outline = outline(checkpoint, &plan)?;
    let mut metadata = plan.metadata;
    if !checkpoint.is_gguf() {
        described.iter().for_each(|(key, value)| _ = metadata.insert(key, value.clone()));
    }
    metadata.insert("general.file_type", Value::U32(file_type));
    // Version of the block layouts (`GGML_QNT_VERSION`).
    metadata.insert("general.quantization_version", Value::U32(2));
    let mut done = Quantized::default();
    let mut tensors = Vec::new();
    for (name, shape, _) in &plan.tensors {
        let format = mixture.format_of(name, shape, &outline);
        let numbers = shape.iter().try_fold(1_usize, |numbers, size| numbers.checked_mul(*size));
        done.parameters += numbers.unwrap_or(0) as u64;
        done.bytes += numbers.and_then(|numbers| format.bytes_of(numbers)).unwrap_or(0) as u64;
        *done.tensors.entry(format.name()).or_default() += 1;
        tensors.push(NewTensor { name: name.clone(), shape: shape.clone(), format });
    }
    let file = NewFile::create(output)?;
    let of_file = |e: kiln_weights::Error| match e {
        kiln_weights::Error::Io(e) => NewFile::failed(output, &e),
        e => Error::File { path: output.to_owned(), why: e.to_string() },
    };
    let mut writer = GgufWriter::new(file, &metadata, &tensors).map_err(of_file)?;
    for (NewTensor { name, format, .. }, (.., source)) in tensors.iter().zip(&plan.tensors) {
        let (parts, undo) = match source {
            Source::Numbers(numbers) => {
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                writer.write(&bytes).map_err(of_file)?;
                continue;
            }
            Source::Stored(parts, undo) => (parts, *undo),
        };
        for Rows { entry, rows } in parts {
            let pieces = Pieces { checkpoint, name, entry, undo, format: *format };
            let mut start = rows.start;
            while start < rows.end {
                let (bytes, read, next) = pieces.pack(start..rows.end)?;
                writer.write(&bytes).map_err(of_file)?;
                start = next;
                if on_read(read).is_break() {
                    return Ok(None);
                }
            }
        }
    }
    writer.finish().map_err(of_file)?.finish()?;
    Ok(Some(done))
}

/// A stored tensor that is packed piece by piece.
pub(super) struct Pieces<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// Name in the new file, for messages.
    pub(super) name: &'a str,
    pub(super) entry: &'a Entry,
    pub(super) undo: Undo,
    pub(super) format: Format,
}

impl Pieces<'_> {
    fn columns(&self) -> usize {
        columns_of(self.entry)
    }

    fn rows(&self) -> usize {
        rows_of(self.entry)
    }

    /// Rows per piece: whole heads, if rows are permuted within them.
    fn step(&self) -> usize {
        let head = match self.undo {
            Undo::Permuted { heads } => self.rows().checked_div(heads).unwrap_or(1).max(1),
            _ => 1,
        };
        (PIECE / self.columns()).max(1).next_multiple_of(head)
    }

    /// Packs the first piece of `rows`. Returns its bytes in the new file, the number of bytes read, and the
    /// start of the next piece.
    pub(super) fn pack(&self, rows: Range<usize>) -> Result<(Vec<u8>, u64, usize)> {
        let start = rows.start;
        let wrong = |why: String| {
            let path = self.checkpoint.path(self.entry);
            Error::File { path, why: format!("`{}` {why}", self.name) }
        };
        let from = &self.entry.stored;
        if !from.is_read() {
            return Err(wrong(from.unread()));
        }
        let columns = self.columns();
        let next = (start + self.step()).min(rows.end);
        let numbers = (next - start) * columns;
        let cut = || wrong(format!("is cut within a block of {from}"));
        // The header was checked: the file has the bytes of all rows.
        let (before, len) = (from.bytes_of(start * columns), from.bytes_of(numbers));
        let (before, len) = before.zip(len).ok_or_else(cut)?;
        let mut bytes = vec![0; len];
        self.checkpoint.read(self.entry, self.entry.range.start + before as u64, &mut bytes)?;
        let is_changed = matches!(self.undo, Undo::PlusOne | Undo::NegativeExp);
        if from.format() == Some(self.format) && !is_changed {
            let row = len / (next - start).max(1);
            return Ok((self.permuted(bytes, row), len as u64, next));
        }
        let mut wide = vec![0.0; numbers];
        from.unpack(&bytes, &mut wide).map_err(wrong)?;
        if is_changed {
            wide.iter_mut().for_each(|number| *number = self.undo.stored(*number));
        }
        let wide = self.permuted(wide, columns);
        let too_large = |number: &&f32| number.is_finite() && number.abs() > LARGEST_F16;
        if self.format == Format::F16
            && let Some(number) = wide.iter().find(too_large)
        {
            return Err(wrong(format!("holds {number:e}, beyond float16; choose bf16 or f32")));
        }
        let size = self
            .format
            .bytes_of(numbers)
            .ok_or_else(|| wrong(format!("has rows that are no blocks of {}", self.format)))?;
        let mut packed = vec![0; size];
        pack(self.format, &wide, &mut packed).map_err(|e| match e {
            // The error's index would be relative to the piece.
            kiln_weights::Error::Unpackable { format, value, largest, .. } => wrong(format!(
                "holds {value:e}, and {format} takes numbers from -{largest} to {largest}; check the weights, or choose f32"
            )),
            e => wrong(e.to_string()),
        })?;
        Ok((packed, len as u64, next))
    }

    /// Moves rows of `row` elements to their places in the new file.
    fn permuted<T: Copy>(&self, rows: Vec<T>, row: usize) -> Vec<T> {
        if !matches!(self.undo, Undo::Permuted { .. }) {
            return rows;
        }
        let mut new = rows.clone();
        // A piece starts with a head, so that places in the piece match places in the tensor.
        for (i, from) in rows.chunks_exact(row.max(1)).enumerate() {
            let start = self.undo.row(i, self.rows()) * row;
            if let Some(place) = new.get_mut(start..start + row) {
                place.copy_from_slice(from);
            }
        }
        new
    }
}

/// Packs whole blocks, on all threads.
fn pack(format: Format, numbers: &[f32], bytes: &mut [u8]) -> Result<(), kiln_weights::Error> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let blocks = (numbers.len() / format.block()).div_ceil(threads).max(1);
    thread::scope(|scope| {
        let parts =
            numbers.chunks(blocks * format.block()).zip(bytes.chunks_mut(blocks * format.block_bytes()));
        let parts: Vec<_> =
            parts.map(|(numbers, bytes)| scope.spawn(move || format.pack(numbers, bytes))).collect();
        parts.into_iter().try_for_each(|part| match part.join() {
            Ok(packed) => packed,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
