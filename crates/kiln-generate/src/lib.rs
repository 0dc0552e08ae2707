//! Generation: from a prompt to tokens to text.
//!
//! **Invariant:** this crate names no model and no cache strategy; it only knows [`CausalModel`] and
//! [`ModelCache`].
//!
//! # The loop
//! - A [`Generation`] shares a model, borrows or owns a cache ([`CacheHandle`]), and yields steps. Its core
//!   is async; iterators block on it.
//! - A generation has `Rows` (the tokens so far), a `Runner` (feeds the model), and a `Search` (chooses the
//!   next tokens). A search makes a step with the runner; the loop then appends the tokens to the rows.
//! - The device chooses a token and feeds it to the next step without waiting. The host reads tokens one step
//!   later. When a sequence ends, the one token that was computed too many is rolled back, so the cache holds
//!   all tokens but the last, as in transformers.
//! - Steps of one token read the token from a buffer on the device (`DecodeLoop`). While the buffers of the
//!   cache stay the same, the fourth step is recorded, and the steps after it replay the recording. A buffer
//!   that grew is recorded again.
//! - Tokens that the cache does not hold are computed again, so that the strategy `none` needs no other code.
//!
//! # Choosing tokens
//! - A `Chooser` chooses on the device: a `DeviceSampler` for each row, or `DeviceBeams` for all rows of a
//!   prompt. `DeviceBeams` also reorders the rows of the cache; the host repeats the choice from the
//!   candidates that it reads, and keeps the finished ones.
//! - The kernel `sample` applies the processors in the order of transformers, and samples with a table of
//!   random words (ChaCha; the row is the stream). If this kernel cannot run, or the caller wants to see
//!   scores, the host uses the same formulas and the same words.
//! - A processor is created from its setting, and states whether the kernel `sample` can do its work
//!   ([`Processor::on_device`]). If one cannot, the host processes the scores of each step.
//! - Every search gives the next token of each row, and the row that it continues (`generation/search.rs`).
//!   `EachRow` chooses for each row alone, `Beams` for all rows of a prompt. `Contrastive` feeds several
//!   candidates of each row before it chooses one. `Assisted` verifies drafts by the choice of `EachRow`. A
//!   prompt is computed once, and then becomes as many rows as it has beams or sequences to return.
//! - Drafted tokens (`generation/assisted/`) are verified in one pass, by the choice that the model makes
//!   under the same mask and processors. Tokens that a grammar forces are such a draft.
//! - [`Masks`] compute the tokens that a grammar allows on a separate thread. Only `grammar` uses the crate
//!   llguidance.
//!
//! [`CausalModel`]: kiln_core::model::CausalModel
//! [`ModelCache`]: kiln_core::model_cache::ModelCache
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests write files of their own"))]
#![forbid(unsafe_code)]

pub mod chat_template;
pub mod config;
pub mod generation;
pub mod grammar;
pub mod processors;
pub mod sampler;
pub mod text;
pub mod tokenizer;
pub mod watermark;

mod answer;
mod cache_handle;
mod chooser;
mod completion;
mod contained;
mod device_beams;
mod device_sampler;
mod engine;
mod feeder;
mod logprobs;
mod oom_policy;
mod settings;
mod stats;
mod stopping;

pub use answer::{AnswerFormat, AnswerParser, AnswerPart, ReasoningBudget, ToolCall};
pub use cache_handle::CacheHandle;
pub use chat_template::{ChatTemplate, ChatTemplates, Conversation, Message, RenderOptions};
pub use completion::Completion;
pub use config::{GenerationConfig, UNTIL_IT_ENDS};
pub use engine::{EXACT_ROWS, Engine, Event, Generating, PrefixScope, RequestId, Share, StoredPrefix};
pub use feeder::prefill;
pub use generation::{
    AssistedSettings, BeamSettings, ContrastiveSettings, DolaLayers, DraftModel, EarlyStopping, ForceWord,
    Generation, Options, PromptLookup, Schedule, Step,
};
pub use grammar::{Grammar, Mask, Masks, Matcher, TokenTable};
pub use logprobs::Logprobs;
pub use oom_policy::OomPolicy;
pub use processors::{AllowedTokens, Processor, Processors, RowState};
pub use sampler::Sampler;
pub use settings::Settings;
pub use stats::Stats;
pub use stopping::{StopReason, StoppingCriterion};
pub use text::{StopStrings, StoppedText, TextStream};
pub use tokenizer::{Tokenizer, TokenizerConfig};
