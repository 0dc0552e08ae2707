//! Number formats of packed weights, GGUF files, and matrices from PyTorch's quantizers.
//!
//! ```
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/weights/formats.gguf");
//! use kiln_weights::gguf::Gguf;
//!
//! let bytes = std::fs::read(path)?;
//! let gguf = Gguf::read(&mut std::io::Cursor::new(&bytes), bytes.len() as u64)?;
//! let tensor = gguf.tensor("q4_k.packed").ok_or("no such tensor")?;
//! let packed = &bytes[tensor.range.start as usize..tensor.range.end as usize];
//! let mut numbers = vec![0.0; tensor.shape.iter().product()];
//! tensor.format.unpack(packed, &mut numbers)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **Invariant:** this crate uses no tensors, and depends on no other crate of Kiln.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

mod error;
mod format;
mod formats;
pub mod gguf;
mod mixture;
pub mod quantized;
pub mod streams;

pub use error::Error;
pub use format::Format;
pub use mixture::{Mixture, Outline};
