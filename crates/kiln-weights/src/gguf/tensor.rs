//! The tensor table of a GGUF file: names, shapes, formats and locations.

use std::ops::Range;

use crate::Format;

/// Maximum number of dimensions of a tensor (`GGML_MAX_DIMS`).
pub(super) const DIMENSIONS: usize = 4;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    pub name: String,
    /// Sizes with rows before columns, as in PyTorch. GGUF files store them in reverse.
    pub shape: Vec<usize>,
    pub format: Format,
    /// Byte range of the tensor, from the beginning of the file. Its length matches the shape and the format.
    pub range: Range<u64>,
}

/// Returns the size of a tensor of `shape` in bytes.
///
/// # Errors
/// An error in the shape, as a sentence without its subject.
pub(super) fn bytes_of(shape: &[usize], format: Format) -> Result<u64, String> {
    if shape.len() > DIMENSIONS {
        return Err(format!("has {} dimensions; at most {DIMENSIONS} are possible", shape.len()));
    }
    if shape.contains(&0) {
        return Err(format!("has the shape {shape:?}, which is empty"));
    }
    let columns = shape.last().copied().unwrap_or(1);
    if !columns.is_multiple_of(format.block()) {
        return Err(format!("has {columns} columns; {format} needs a multiple of {}", format.block()));
    }
    let numbers = shape.iter().try_fold(1_usize, |numbers, &size| numbers.checked_mul(size));
    let bytes = numbers.and_then(|numbers| format.bytes_of(numbers));
    // Offsets in files are signed.
    let bytes = bytes.and_then(|bytes| i64::try_from(bytes).ok()?.try_into().ok());
    bytes.ok_or_else(|| format!("has the shape {shape:?}, which is too large"))
}

/// Returns the smallest multiple of `alignment`, a power of two, that is at least `at`.
pub(super) fn aligned(at: u64, alignment: u64) -> Option<u64> {
    at.checked_next_multiple_of(alignment)
}
