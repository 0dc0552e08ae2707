//! A complete GGUF file: its metadata, and the locations of its tensors.

use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};

use super::reader::Reader;
use super::tensor::aligned;
use super::{Metadata, TensorInfo, alignment, damaged, shown};
use crate::Error;

/// The header of a GGUF file. Tensor data is not read.
///
/// **Invariant:** the ranges of all tensors are within the file, and do not overlap.
#[derive(Clone, Debug)]
pub struct Gguf {
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Index of each name in `tensors`.
    places: HashMap<String, usize>,
}

impl Gguf {
    /// Reads and fully checks the header of a file of `len` bytes: versions 2 and 3, little-endian.
    ///
    /// A tensor with an unsupported type is an error here, not only on use. Such a model cannot run, and its
    /// user should know before gigabytes of it are loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Damaged`], [`Error::Metadata`] for an impossible alignment, and
    /// [`Error::Io`].
    pub fn read(reader: &mut (impl Read + Seek), len: u64) -> Result<Self, Error> {
        reader.seek(SeekFrom::Start(0))?;
        let mut reader = Reader::new(reader, len);
        let (tensors, entries) = reader.counts()?;
        let metadata = reader.metadata(entries)?;
        let mut tensors = reader.tensors(tensors)?;
        let alignment = alignment(&metadata)?;
        place(&mut tensors, reader.position(), alignment, len)?;
        let names = tensors.iter().enumerate();
        let places = names.map(|(place, tensor)| (tensor.name.clone(), place)).collect();
        Ok(Self { metadata, tensors, places })
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the order of the table.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.places.get(name)?)
    }
}

/// Converts ranges relative to the first byte of data to ranges in a file of `len` bytes with a header of
/// `header` bytes, and checks them.
fn place(tensors: &mut [TensorInfo], header: u64, alignment: u64, len: u64) -> Result<(), Error> {
    let data = aligned(header, alignment).ok_or_else(|| damaged("its header is too long".to_owned()))?;
    for TensorInfo { name, range, .. } in tensors.iter_mut() {
        if !range.start.is_multiple_of(alignment) {
            let (name, at) = (shown(name), range.start);
            return Err(damaged(format!(
                "tensor {name} begins at byte {at} of the data, which is no multiple of the alignment {alignment}"
            )));
        }
        let moved = range.start.checked_add(data).zip(range.end.checked_add(data));
        match moved {
            Some((start, end)) if end <= len => *range = start..end,
            _ => {
                let name = shown(name);
                return Err(damaged(format!("it ends, after {len} bytes, before tensor {name} does")));
            }
        }
    }
    let mut in_order: Vec<&TensorInfo> = tensors.iter().collect();
    in_order.sort_by_key(|tensor| tensor.range.start);
    match in_order.array_windows().find(|[first, second]| first.range.end > second.range.start) {
        None => Ok(()),
        Some([first, second]) => {
            Err(damaged(format!("tensors {} and {} overlap", shown(&first.name), shown(&second.name))))
        }
    }
}
