//! GGUF files: metadata and packed tensors in one file, as llama.cpp reads them.
//!
//! Source: `docs/gguf.md` and `src/gguf.cpp` of ggml.

mod metadata;

pub use metadata::{Array, Metadata, Value};
