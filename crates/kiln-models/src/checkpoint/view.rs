//! Views: tensors whose elements are in another order in the file, or only some of those of a stored tensor.

use std::sync::{Mutex, PoisonError};

use kiln_core::{Error, Result};

use super::{Checkpoint, Entry, convert::Stored};

/// The place of each element in the file's data, counted from the first element of the view. The order of the
/// elements is that of the [`Entry`]; neither its shape nor its type says more than usual.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    /// Size in elements, and stride in bytes, of each dimension; the last one varies fastest.
    dims: Vec<(usize, u64)>,
    /// Size of an element in bytes.
    element: u64,
}

/// Runs of at least this many bytes are read one by one. For shorter ones, all that lies between them is read
/// and kept.
const RUN: u64 = 256;

/// Bytes of a file that were read last, for views whose elements lie far apart.
#[derive(Debug, Default)]
pub(super) struct LastRead(Mutex<Option<Span>>);

#[derive(Debug)]
struct Span {
    file: usize,
    start: u64,
    bytes: Vec<u8>,
}

impl Entry {
    /// Creates a view of this tensor with elements of another shape. `first` is the index of its first
    /// element in the tensor; `dims` are sizes and strides in elements, the last of which varies fastest.
    ///
    /// Returns `None` if an element would be outside of the tensor, or if elements are not whole bytes.
    pub(super) fn view(&self, shape: Vec<usize>, first: u64, dims: &[(usize, u64)]) -> Option<Self> {
        let element = self.stored.bytes_of(1).or(match self.stored {
            Stored::Plain(safetensors::Dtype::U8) => Some(1),
            _ => None,
        })? as u64;
        let size = |dims: &[(usize, u64)]| {
            dims.iter().try_fold(1u64, |size, (count, _)| size.checked_mul(*count as u64))
        };
        let last = dims.iter().try_fold(first, |last, (count, stride)| {
            last.checked_add((*count as u64).checked_sub(1)?.checked_mul(*stride)?)
        })?;
        if last >= self.elements() || self.view.is_some() {
            return None;
        }
        let dims: Vec<_> = dims.iter().map(|(count, stride)| (*count, stride * element)).collect();
        let start = self.range.start + first * element;
        let range = start..start + size(&dims)?.checked_mul(element)?;
        Some(Self { shape, range, view: Some(View { dims, element }), ..self.clone() })
    }

    /// Creates a view of a matrix `[rows, columns]` with rows and columns exchanged.
    pub(super) fn transposed(&self) -> Option<Self> {
        let &[rows, columns] = &self.shape[..] else { return None };
        self.view(vec![columns, rows], 0, &[(columns, 1), (rows, columns as u64)])
    }
}

impl View {
    /// The dimensions that are not in one run, and the length of a run in bytes.
    fn runs(&self) -> (&[(usize, u64)], u64) {
        let (mut outer, mut run) = (&self.dims[..], self.element);
        while let Some(((count, stride), rest)) = outer.split_last()
            && *stride == run
        {
            run *= *count as u64;
            outer = rest;
        }
        (outer, run)
    }

    /// Whether runs are so short that what lies between them is read with them.
    pub(super) fn is_scattered(&self) -> bool {
        let (outer, run) = self.runs();
        run < RUN && !outer.is_empty()
    }

    /// Place of the run with this number.
    fn place(outer: &[(usize, u64)], mut number: u64) -> u64 {
        outer.iter().rev().fold(0, |place, (count, stride)| {
            let index = number % *count as u64;
            number /= *count as u64;
            place + index * stride
        })
    }

    /// Size of the part of the file from the first to the last element.
    fn extent(&self) -> u64 {
        self.dims.iter().map(|(count, stride)| (*count as u64 - 1) * stride).sum::<u64>() + self.element
    }
}

impl Checkpoint {
    /// Reads the bytes of a view from `offset` on, counted from its first element in its own order.
    pub(super) fn read_view(
        &self,
        entry: &Entry,
        view: &View,
        mut offset: u64,
        mut bytes: &mut [u8],
    ) -> Result<()> {
        let (outer, run) = view.runs();
        // Other views are read at the same time.
        let mut locked =
            view.is_scattered().then(|| self.last_read.0.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(span) = &mut locked
            && !span.as_ref().is_some_and(|span| span.has(entry, view))
        {
            let size = usize::try_from(view.extent()).map_err(|_| self.too_large(entry))?;
            let mut all = vec![0; size];
            self.read_file(entry, entry.range.start, &mut all)?;
            **span = Some(Span { file: entry.file, start: entry.range.start, bytes: all });
        }
        let span = locked.as_deref().and_then(Option::as_ref);
        while !bytes.is_empty() {
            let (number, within) = (offset / run, offset % run);
            let len = ((run - within) as usize).min(bytes.len());
            let (now, later) = bytes.split_at_mut(len);
            let start = entry.range.start + View::place(outer, number) + within;
            match span {
                Some(span) => {
                    let at = (start - span.start) as usize;
                    let found = span.bytes.get(at..at + len).ok_or_else(|| Error::File {
                        path: self.path(entry),
                        why: "holds a tensor that was read in part".to_owned(),
                    })?;
                    now.copy_from_slice(found);
                }
                None => self.read_file(entry, start, now)?,
            }
            offset += len as u64;
            bytes = later;
        }
        Ok(())
    }
}

impl Span {
    fn has(&self, entry: &Entry, view: &View) -> bool {
        let first = entry.range.start;
        self.file == entry.file
            && self.start <= first
            && first + view.extent() <= self.start + self.bytes.len() as u64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use std::{collections::BTreeMap, sync::Arc};

    use kiln_core::source::MemorySource;
    use safetensors::{Dtype, tensor::TensorView};
    use serde_json::json;

    use super::*;

    /// A folder with one tensor of ascending float32 numbers.
    fn folder(shape: &[usize]) -> Checkpoint {
        let numbers: Vec<u8> =
            (0..shape.iter().product::<usize>()).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let view = TensorView::new(Dtype::F32, shape.to_vec(), &numbers).unwrap();
        let weights = safetensors::serialize([("x", view)], None).unwrap();
        let config = json!({ "model_type": "none" }).to_string().into_bytes();
        let files =
            BTreeMap::from([("config.json".to_owned(), config), ("model.safetensors".to_owned(), weights)]);
        Checkpoint::from_source(Arc::new(MemorySource::new(files))).unwrap()
    }

    fn numbers(checkpoint: &Checkpoint, entry: &Entry, range: std::ops::Range<usize>) -> Vec<f32> {
        let mut bytes = vec![0; 4 * range.len()];
        checkpoint.read(entry, entry.range.start + 4 * range.start as u64, &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    #[test]
    fn a_view_reads_elements_in_its_own_order() {
        // Short runs, whose surroundings are read, and long ones.
        for columns in [6, 200] {
            let checkpoint = folder(&[4, 3, columns]);
            let x = &checkpoint.tensors["x"];
            let (row, head) = (columns as u64, 3 * columns as u64);
            let middle = x.view(vec![4, columns], row, &[(4, head), (columns, 1)]).unwrap();
            let want: Vec<f32> =
                (0..4).flat_map(|i| (0..columns).map(move |j| ((3 * i + 1) * columns + j) as f32)).collect();
            assert_eq!(numbers(&checkpoint, &middle, 0..want.len()), want);
            assert_eq!(numbers(&checkpoint, &middle, 5..columns + 3), want[5..columns + 3]);
            let alternate = x.view(vec![columns / 2], 1, &[(columns / 2, 2)]).unwrap();
            assert_eq!(numbers(&checkpoint, &alternate, 0..3), [1.0, 3.0, 5.0]);
        }
        let checkpoint = folder(&[3, 5]);
        let transposed = checkpoint.tensors["x"].transposed().unwrap();
        assert_eq!(transposed.shape, [5, 3]);
        assert_eq!(numbers(&checkpoint, &transposed, 0..6), [0.0, 5.0, 10.0, 1.0, 6.0, 11.0]);
        assert_eq!(numbers(&checkpoint, &transposed, 14..15), [14.0]);
    }

    #[test]
    fn views_beyond_a_tensor_are_none() {
        let checkpoint = folder(&[3, 5]);
        let x = &checkpoint.tensors["x"];
        assert_eq!(x.view(vec![3], 1, &[(3, 7)]), None);
        assert_eq!(x.view(vec![1], 15, &[(1, 1)]), None);
        assert_eq!(x.view(vec![0], 0, &[(0, 1)]), None);
        assert_eq!(x.view(vec![2], 0, &[(2, u64::MAX)]), None);
        assert!(x.view(vec![3], 0, &[(3, 7)]).is_some());
        assert_eq!(x.transposed().unwrap().transposed(), None, "a view of a view");
    }
}
