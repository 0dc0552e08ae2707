//! What can be wrong with a file of weights, or with a request for its numbers. One sentence each.

/// A file of weights that cannot be read, or numbers that cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system could not read or write.
    #[error("the weights cannot be read or written: {0}")]
    Io(#[from] std::io::Error),

    /// The file is of another kind, or of a version or byte order that is not supported.
    #[error("the file cannot be read as GGUF: {0}")]
    Unsupported(String),

    /// The file contradicts itself or ends too early. No part of it was returned.
    #[error("the GGUF file is damaged: {0}")]
    Damaged(String),

    /// A metadata entry that is missing, of another type than is needed, or impossible.
    #[error("GGUF metadata `{key}` {why}")]
    Metadata { key: String, why: String },
}
