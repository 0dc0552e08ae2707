//! Conversion from the bytes of a file to the elements of a tensor.

use burn::tensor::Element;
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use kiln_core::Error;
use kiln_weights::Format;
use safetensors::Dtype;

use super::quantized::Group;

/// Number of elements converted at a time, so that no second copy of a tensor is ever made. It is a multiple
/// of the block size of every format.
pub(super) const BLOCK: usize = 1 << 16;

/// The type of numbers in a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Stored {
    Plain(Dtype),
    /// Several numbers share a word.
    Packed(Format),
    /// The codes of a quantized matrix that consists of several tensors.
    Quantized(Box<Group>),
}

impl Stored {
    pub(super) fn of(format: Format) -> Self {
        match format {
            Format::F32 => Self::Plain(Dtype::F32),
            Format::F16 => Self::Plain(Dtype::F16),
            Format::Bf16 => Self::Plain(Dtype::BF16),
            packed => Self::Packed(packed),
        }
    }

    /// Returns the format of the numbers, if Kiln can read it.
    pub(super) fn format(&self) -> Option<Format> {
        match self {
            Self::Plain(Dtype::F32) => Some(Format::F32),
            Self::Plain(Dtype::F16) => Some(Format::F16),
            Self::Plain(Dtype::BF16) => Some(Format::Bf16),
            Self::Plain(_) | Self::Quantized(_) => None,
            Self::Packed(format) => Some(*format),
        }
    }

    /// Whether the type is readable and its numbers decode one by one, unlike a quantized matrix.
    pub(super) fn is_read(&self) -> bool {
        self.bytes_of(0).is_some()
    }

    /// Returns the size of `numbers` numbers in bytes. `None` for an unreadable type, or if they end within a
    /// block.
    pub(super) fn bytes_of(&self, numbers: usize) -> Option<usize> {
        match self {
            Self::Plain(Dtype::F64) => numbers.checked_mul(size_of::<f64>()),
            stored => stored.format()?.bytes_of(numbers),
        }
    }

    /// Decodes numbers to float32.
    ///
    /// # Errors
    /// A sentence about an unreadable type, or about a number that float32 cannot hold.
    pub(super) fn unpack(&self, bytes: &[u8], wide: &mut [f32]) -> Result<(), String> {
        if let Self::Plain(Dtype::F64) = self {
            for (number, bytes) in wide.iter_mut().zip(bytes.as_chunks().0) {
                let double = f64::from_le_bytes(*bytes);
                *number = double as f32;
                if number.is_infinite() && double.is_finite() {
                    return Err(format!("holds {double:e}, beyond float32; check the weights"));
                }
            }
            return Ok(());
        }
        let format = self.format().ok_or_else(|| self.unread())?;
        format.unpack(bytes, wide).map_err(|e| e.to_string())
    }

    /// Returns the message that this type is not read.
    pub(super) fn unread(&self) -> String {
        format!("is stored as {self}; F64, F32, F16 and BF16 are read")
    }
}

impl std::fmt::Display for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype:?}"),
            Self::Packed(format) => f.write_str(&format.name().to_uppercase()),
            Self::Quantized(group) => group.fmt(f),
        }
    }
}

/// The reason why numbers could not be converted.
pub(super) enum Failed {
    /// The file could not be read.
    Read(Error),
    /// A sentence about an unreadable type, or about a value that the requested type cannot hold.
    Convert(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Read(error)
    }
}

/// An element type of loaded weights.
pub(super) trait Number: Pod + Element {
    /// Name of the type in a safetensors file.
    const DTYPE: Dtype;

    /// Rounds float32 numbers.
    fn round(wide: &[f32], numbers: &mut [Self]) -> Result<(), Failed>;
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn round(wide: &[f32], numbers: &mut [Self]) -> Result<(), Failed> {
        numbers.copy_from_slice(wide);
        Ok(())
    }
}

impl Number for f16 {
    const DTYPE: Dtype = Dtype::F16;

    fn round(wide: &[f32], numbers: &mut [Self]) -> Result<(), Failed> {
        numbers.convert_from_f32_slice(wide);
        match wide.iter().zip(&*numbers).find(|(w, h)| w.is_finite() && !h.is_finite()) {
            Some((value, _)) => Err(beyond_float16(*value)),
            None => Ok(()),
        }
    }
}

impl Number for bf16 {
    const DTYPE: Dtype = Dtype::BF16;

    fn round(wide: &[f32], numbers: &mut [Self]) -> Result<(), Failed> {
        numbers.convert_from_f32_slice(wide);
        Ok(())
    }
}

/// Packs float32 numbers in `format`.
pub(super) fn pack(format: Format, wide: &[f32], bytes: &mut [u8]) -> Result<(), Failed> {
    /// The least number that is rounded to infinity.
    const BEYOND_F16: f32 = 65520.0;

    let is_beyond = |number: &&f32| number.is_finite() && number.abs() >= BEYOND_F16;
    if format == Format::F16
        && let Some(value) = wide.iter().find(is_beyond)
    {
        return Err(beyond_float16(*value));
    }
    format.pack(wide, bytes).map_err(|e| Failed::Convert(e.to_string()))
}

fn beyond_float16(value: f32) -> Failed {
    Failed::Convert(format!("holds {value}, beyond float16; choose another `dtype` or `quant`"))
}
