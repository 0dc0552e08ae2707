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
//! A browser fetches and stores files itself. There, only the choice of files is compiled: [`choose`] and
//! [`shards`].
//!
//! **Invariant:** nothing is written outside the cache, and no memory is allocated for a size that a response
//! claims.
#![allow(clippy::disallowed_methods, reason = "the cache of the hub has its own layout and locks")]
#![cfg_attr(target_family = "wasm", allow(dead_code, reason = "a browser fetches and stores files itself"))]
#![forbid(unsafe_code)]

#[cfg(not(target_family = "wasm"))]
mod cache;
mod choice;
#[cfg(not(target_family = "wasm"))]
mod client;
#[cfg(not(target_family = "wasm"))]
mod download;
mod error;
#[cfg(not(target_family = "wasm"))]
mod fetch;
#[cfg(not(target_family = "wasm"))]
mod hub;
mod names;
mod spec;
#[cfg(not(target_family = "wasm"))]
mod stored;

pub use choice::{Choice, TEXTS, choose, shards};
pub use error::{Error, Result};
#[cfg(not(target_family = "wasm"))]
pub use fetch::DownloadProgress;
#[cfg(not(target_family = "wasm"))]
pub use hub::Hub;
pub use spec::{Part, Spec};
#[cfg(not(target_family = "wasm"))]
pub use stored::{Removal, StoredModel};
