//! Generation: from a prompt to tokens to text.
//!
//! **Invariant:** this crate names no model and no cache strategy; it only knows [`CausalModel`] and
//! [`ModelCache`].
//!
//! [`CausalModel`]: kiln_core::model::CausalModel [`ModelCache`]: kiln_core::model_cache::ModelCache
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

mod cache_handle;
mod chooser;
mod completion;
mod contained;
mod decode;
mod device_beams;
mod device_sampler;
mod engine;
mod oom_policy;
mod prefill;
mod settings;
mod stats;
mod stopping;

pub use cache_handle::CacheHandle;
pub use chat_template::{ChatTemplate, ChatTemplates, Conversation, Message, RenderOptions};
pub use completion::Completion;
pub use config::{GenerationConfig, UNTIL_IT_ENDS};
pub use engine::{EXACT_ROWS, Engine, Event, Generating, RequestId};
pub use generation::{
    AssistedSettings, BeamSettings, ContrastiveSettings, DolaLayers, DraftModel, EarlyStopping, ForceWord,
    Generation, Options, PromptLookup, Schedule, Step,
};
pub use grammar::{Grammar, Mask, Masks, Matcher, TokenTable};
pub use oom_policy::OomPolicy;
pub use prefill::prefill;
pub use processors::{AllowedTokens, Processor, Processors, RowState};
pub use sampler::Sampler;
pub use settings::Settings;
pub use stats::Stats;
pub use stopping::{StopReason, StoppingCriterion};
pub use text::{StopStrings, StoppedText, TextStream};
pub use tokenizer::{Tokenizer, TokenizerConfig};
