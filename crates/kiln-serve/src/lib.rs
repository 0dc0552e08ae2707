//! The APIs of OpenAI, Anthropic and ollama, for models whose requests share passes.
//!
//! [`Service`] answers requests; the engine of each model runs on a thread of its own ([`kiln::Engine`]). A
//! request gives the tokens that it gives alone, whatever else runs. `Server` takes requests over HTTP. In a
//! browser, pages pass them to a [`Service`] themselves.
//!
//! **Invariants:** only this crate listens on the network, and it opens no connection. No field of a request
//! is read past in silence (`fields.rs`). No text of a request is logged.
#![forbid(unsafe_code)]

mod api;
mod error;
pub mod fields;
mod guard;
#[cfg(not(target_family = "wasm"))]
mod listen;
mod metrics;
mod models;
mod service;
mod tasks;
mod worker;

use std::time::Duration;

use kiln::{ChatTemplate, Plan, Pooling};

pub use axum::{
    body::{Body, BodyDataStream},
    http,
};

#[cfg(not(target_family = "wasm"))]
pub use crate::listen::Server;
pub use crate::{models::ServedModel, service::Service};

/// Options of a [`Service`].
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The most choices that are computed at once, of each model. With more than
    /// [`exact_rows`](kiln::Model::exact_rows), bits of a request may depend on others. Default: as many as
    /// that, up to 64 on a GPU and 16 on the CPU.
    pub rows: Option<usize>,
    /// The most choices that wait; others are refused with status 429.
    pub queue: usize,
    /// Keys of which a request needs one; empty: none is needed.
    pub keys: Vec<String>,
    /// Origins of web pages that may ask, such as `https://chat.example`. Those of this machine always may.
    pub origins: Vec<String>,
    /// The kind of cache of each request. Default: the one that the folder asks for.
    pub plan: Option<Plan>,
    /// Other kinds of caches that a request may ask for.
    pub plans: Vec<Plan>,
    /// Number of tokens of a prompt in a pass, between the passes of answers. Default: 128 on the CPU, 256 on
    /// a GPU.
    pub prefill_chunk: Option<usize>,
    /// The most bytes of host memory for caches of the beginnings of prompts; 0: none are kept.
    pub prefix_bytes: usize,
    /// Whether the beginning of a prompt may be an earlier answer, too. Bits may then change, and responses
    /// say so.
    pub reuse_answers: bool,
    /// The most tokens that are drafted by prompt lookup for a pass, while a single answer is computed and
    /// where that changes no token; `None`: none are.
    pub lookup_drafts: Option<usize>,
    /// The chat template. Default: the model's, else ChatML.
    pub template: Option<ChatTemplate>,
    /// How embeddings are made of the vectors of tokens. Default: as the model's folder says.
    pub pooling: Option<Pooling>,
    /// The most models that are loaded at once. Another one takes the place of the one that was asked for
    /// longest ago.
    pub most_loaded: usize,
    /// Time after which a model that nobody asks for is unloaded; `None`: never.
    pub idle: Option<Duration>,
    /// Time that answers have to end after the server was told to.
    pub drain: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            rows: None,
            queue: 256,
            keys: Vec::new(),
            origins: Vec::new(),
            plan: None,
            plans: Vec::new(),
            prefill_chunk: None,
            prefix_bytes: 1 << 30,
            reuse_answers: false,
            lookup_drafts: None,
            template: None,
            pooling: None,
            most_loaded: usize::MAX,
            idle: None,
            drain: Duration::from_secs(30),
        }
    }
}
