//! Number formats of packed weights, and GGUF files.
//!
//! **Invariant:** this crate uses no tensors, and depends on no other crate of Kiln.
#![forbid(unsafe_code)]

mod error;
pub mod gguf;

pub use error::Error;
