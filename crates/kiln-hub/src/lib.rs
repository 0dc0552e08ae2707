//! Models from the Hugging Face Hub, and the cache that stores them.
//!
//! ```no_run
//! use kiln_hub::{Hub, Spec};
//!
//! let hub = Hub::from_env()?;
//! let spec: Spec = "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M".parse()?;
//! let path = hub.fetch(&spec, |progress| println!("{} of {} bytes", progress.read, progress.total))?;
//! # Ok::<(), kiln_hub::Error>(())
//! ```
//!
//! [`Hub::fetch`] downloads the missing files of a model and returns a model folder or a GGUF file.
//! [`Hub::list`] and [`Hub::removal`] manage the cache. The cache has the layout of `huggingface_hub`, so
//! Transformers and Kiln share one copy of a model.
//!
//! **Invariant:** nothing is written outside the cache, and no memory is allocated for a size that a response
//! claims.
#![allow(clippy::disallowed_methods, reason = "the cache of the hub has its own layout and locks")]
#![forbid(unsafe_code)]

mod cache;
mod choice;
mod client;
mod download;
mod error;
mod fetch;
mod hub;
mod names;
mod spec;
mod stored;

pub use error::{Error, Result};
pub use fetch::DownloadProgress;
pub use hub::Hub;
pub use spec::{Part, Spec};
pub use stored::{Removal, StoredModel};
