//! What can be wrong with a file of weights, or with numbers to pack. One sentence each.

use crate::{Format, Mixture};

/// A file of weights that cannot be read or written, or numbers that cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system could not read or write.
    #[error("the weights cannot be read or written: {0}")]
    Io(#[from] std::io::Error),

    /// The file is of another kind, or uses what is not supported.
    #[error("the file cannot be read as GGUF: {0}")]
    Unsupported(String),

    /// The file contradicts itself or ends too early.
    #[error("the GGUF file is damaged: {0}; get it again")]
    Damaged(String),

    /// A metadata entry that is missing, of another type than is needed, or impossible.
    #[error("GGUF metadata `{key}` {why}")]
    Metadata { key: String, why: String },

    /// What is to be written cannot be part of a GGUF file.
    #[error("the GGUF file cannot be written: {0}")]
    Unwritable(String),

    /// A model that GGUF has no keys for, or files of a folder that are not understood.
    #[error("the model cannot become a GGUF file: {0}")]
    Unconvertible(String),

    /// No number format has this name.
    #[error("unknown number format `{name}`; known: {}", Format::ALL.map(Format::name).join(", "))]
    UnknownFormat { name: String },

    /// No mixture of formats has this name.
    #[error("unknown mixture of formats `{name}`; known: {}", Mixture::ALL.map(Mixture::name).join(", "))]
    UnknownMixture { name: String },

    /// Bytes and numbers that do not belong together.
    #[error(
        "{bytes} bytes do not hold {numbers} numbers in {format}; each {} numbers have {} bytes",
        .format.block(), .format.block_bytes()
    )]
    Length { format: Format, bytes: usize, numbers: usize },

    /// Parts of a quantized matrix that contradict each other.
    #[error("its {part} {why}; get the folder again")]
    Quantized { part: &'static str, why: String },

    /// A number that is not finite, or larger than the scales of the format can be. `at` is its index.
    #[error(
        "number {at} is {value:e} and cannot be packed as {format}, which takes numbers from -{largest} to \
         {largest}; check the weights, or keep them in f32"
    )]
    Unpackable { format: Format, at: usize, value: f32, largest: f32 },
}
