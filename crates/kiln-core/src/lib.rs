//! Vocabulary of the runtime: the memory of a block, the interface of a model, and errors.
//!
//! **Invariant:** this crate names no cache strategy, no model and no GPU kernel.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]

pub mod batch;
pub mod budget;
pub mod device_state;
pub mod error;
pub mod files;
pub mod gapless;
pub mod host_data;
pub mod layer;
pub mod model;
pub mod model_cache;
pub mod need;
pub mod packed;
pub mod read_back;
mod setters;
pub mod slot;
pub mod source;
pub mod stages;
pub mod tensor_file;
pub mod unsafe_ops;
pub mod view;

pub use error::{Error, Result};
