//! Errors in files of weights, and in numbers to pack. Each message is one sentence.

use crate::{Format, Mixture};

/// A file of weights that cannot be read or written, or numbers that cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system could not read or write.
    #[error("the weights cannot be read or written: {0}")]
    Io(#[from] std::io::Error),

    /// The file has another format, or uses an unsupported feature.
    #[error("the file cannot be read as GGUF: {0}")]
    Unsupported(String),

    /// The file contradicts itself or ends too early.
    #[error("the GGUF file is damaged: {0}; get it again")]
    Damaged(String),

    /// A metadata entry is missing, has the wrong type, or has an impossible value.
    #[error("GGUF metadata `{key}` {why}")]
    Metadata { key: String, why: String },

    /// The data to be written cannot be part of a GGUF file.
    #[error("the GGUF file cannot be written: {0}")]
    Unwritable(String),

    /// GGUF has no keys for the model, or a file of the folder is not understood.
    #[error("the model cannot become a GGUF file: {0}")]
    Unconvertible(String),

    /// No number format has this name.
    #[error("unknown number format `{name}`; known: {}", Format::ALL.map(Format::name).join(", "))]
    UnknownFormat { name: String },

    /// No mixture of formats has this name.
    #[error("unknown mixture of formats `{name}`; known: {}", Mixture::ALL.map(Mixture::name).join(", "))]
    UnknownMixture { name: String },

    /// The number of bytes does not match the number of numbers.
    #[error(
        "{bytes} bytes do not hold {numbers} numbers in {format}; each {} numbers have {} bytes",
        .format.block(), .format.block_bytes()
    )]
    Length { format: Format, bytes: usize, numbers: usize },

    /// Parts of a quantized matrix contradict each other.
    #[error("its {part} {why}; get the folder again")]
    Quantized { part: &'static str, why: String },

    /// A number is not finite, or is larger than the scales of the format allow. `at` is its index.
    #[error(
        "number {at} is {value:e} and cannot be packed as {format}, which takes numbers from -{largest} to \
         {largest}; check the weights, or keep them in f32"
    )]
    Unpackable { format: Format, at: usize, value: f32, largest: f32 },
}
