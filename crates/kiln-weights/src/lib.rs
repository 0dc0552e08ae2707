//! Number formats of packed weights, and GGUF files.
//!
//! **Invariant:** this crate uses no tensors, and depends on no other crate of Kiln.
#![forbid(unsafe_code)]

mod error;
mod format;
mod formats;
pub mod gguf;

pub use error::Error;
pub use format::Format;
