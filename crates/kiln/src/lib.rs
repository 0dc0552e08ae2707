//! Kiln runs language models on the GPU you own: CUDA, WebGPU through wgpu (Vulkan, Metal, DX12), or the CPU.
//!
//! ```
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
//! let model = kiln::Model::load(folder)?; // a model folder from Hugging Face
//! for piece in model.generate("The Constitution").max_new_tokens(40).stream()? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), kiln::Error>(())
//! ```
//!
//! - [`Model::load`] loads a model, and [`Model::builder`] has options: device, number type, memory.
//! - [`Model::generate`] makes a [`Request`]: settings, then [`text`](Request::text),
//!   [`stream`](Request::stream) or [`steps`](Request::steps).
//! - [`Model::engine`] runs many requests at once, and they share passes.
//! - [`Model::embed`] turns texts into vectors.
//! - A [`Sequence`] keeps its cache for the next request, and a [`Chat`] for the next turn. A [`Plan`]
//!   selects the kind of cache.
//! - [`Model::causal`] is the forward pass, for custom loops. The parts that they need are in [`expert`].
//!
//! A model consists of weights only: the state of a sequence is in its [`ModelCache`](expert::ModelCache), so
//! one model can serve many sequences.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

/// Burn, whose tensors are part of the API.
pub use burn;
/// Models from the Hugging Face hub, and the local cache of downloads.
#[cfg(feature = "hub")]
pub use kiln_hub as hub;

pub mod expert;

mod chat;
mod embedding;
mod folder;
mod model;
mod out_of_memory;
mod probe;
mod quantize;
mod request;
mod saved;
mod self_test;
mod sequence;
mod speech;
mod text;

pub use kiln_audio::AudioReader;
/// # Example
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Model, Offload, Plan, QuantizedSettings};
///
/// let model = Model::load(folder)?;
/// // The last 64 tokens and the first four; packed in 4 bits; everything, but in host memory.
/// for plan in [
///     Plan::sink(64, 4)?,
///     Plan::quantized(QuantizedSettings::default())?,
///     Plan::dynamic().offloaded(Offload::All),
/// ] {
///     let text = model.generate("The Constitution").max_new_tokens(9).plan(plan.clone()).text()?;
///     println!("{}: {text}", plan.label(&model.causal().needs()));
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
pub use kiln_cache::Plan;
pub use kiln_cache::{Offload, QuantizedSettings};
pub use kiln_core::{Error, Result, model::TokenId};
pub use kiln_generate::{
    AnswerFormat, AnswerParser, AnswerPart, ChatTemplate, Completion, Conversation, EXACT_ROWS, Engine,
    Event, Generating, GenerationConfig, Grammar, Logprobs, Message, Processor, ReasoningBudget, RequestId,
    RowState, Share, Stats, Step, StopReason, ToolCall,
};
pub use kiln_kernels::device;
pub use kiln_models::Mixture;

pub use chat::Chat;
pub use embedding::{EmbeddingConfig, EmbeddingInput, EmbeddingRequest, Embeddings, Pooling};
pub use model::{ArithmeticChoice, DtypeChoice, Estimate, Layers, LoadProgress, Model, ModelBuilder};
pub use out_of_memory::OnOutOfMemory;
pub use quantize::quantize;
pub use request::{Prompt, Request};
pub use sequence::{Reuse, Sequence, Steps};
pub use speech::{
    Audio, Segment, SubtitleFormat, Subtitles, Task, Transcriber, Transcript, Transcripts, Word,
};
pub use text::{GeneratedText, GeneratedToken, Piece};
