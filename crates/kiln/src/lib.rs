//! Kiln runs language models on the GPU you own: CUDA, WebGPU through wgpu (Vulkan, Metal, DX12), or the CPU.
//!
//! ```no_run
//! use kiln::{GenerationConfig, LoadOptions, Model, Plan};
//!
//! let model = Model::load("path/to/a/hugging-face-folder".as_ref(), LoadOptions::new("auto".parse()?)?)?;
//! let mut cache = model.cache(&Plan::dynamic())?;
//! let prompt = model.encode("The Constitution")?;
//! let wanted = GenerationConfig::new().max_new_tokens(40);
//! for piece in model.generate_text(&mut cache, prompt, &wanted, Default::default())? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), kiln::Error>(())
//! ```
//!
//! A model is only weights: what a sequence leaves behind is in its [`ModelCache`], so one model serves many of them.
#![forbid(unsafe_code)]

mod chat;
mod folder;
mod model;
mod out_of_memory;
pub mod probe;
mod saved;
mod sequence;
mod text;

pub use kiln_cache::{
    CacheSettings, CacheSpec, Compat, Flush, KvFactory, KvStrategy, Offload, Plan, QuantizedSettings, Rotate,
    STRATEGIES, SinkSettings, StaticSettings, offload, quantizers, samples as cache_samples,
};
pub use kiln_core::{
    Error, Result,
    batch::Batch,
    budget::Budget,
    error::plain,
    files,
    model::{CausalModel, Logits, TokenId, WeightBytes},
    model_cache::ModelCache,
    read_back,
    unsafe_ops::silence_wayland,
};
pub use kiln_generate::{
    ChatTemplate, ChatTemplates, Conversation, Generation, GenerationConfig, Message, OomPolicy,
    Options as GenerationOptions, RenderOptions, Settings, Stats, Step, StopStrings, TextStream, Tokenizer,
    UNTIL_IT_ENDS, chat_template::Data, prefill, processors,
};
pub use kiln_kernels::device;
pub use kiln_models::{self as models, ConfigFile, RandomLlama, Rope, Ropes, Sizes};

pub use chat::{Answer, Chat};
pub use folder::{Ask, CacheSize, Inspection, Longest, cache_text};
pub use model::{DtypeChoice, LoadOptions, Model, Progress};
pub use out_of_memory::{OnOutOfMemory, usable};
pub use saved::SavedCache;
pub use sequence::{Continuation, Reuse, Sequence};
pub use text::{GeneratedText, RunOptions, StopReason};

/// Which implementation of a kernel runs.
pub mod kernels {
    pub use kiln_kernels::{
        Activation, Attention, AttentionPacked, AttentionShape, Choice, Draws, Gated, KERNELS, Kernel,
        KernelInfo, Kernels, KvAppend, KvPack, KvUnpack, Linear, Matrix, NormOrder, Path, Ran, RmsNorm,
        Rotary, Sample, Sampling, cases,
    };
}

/// What a block remembers: for those who write a strategy or a loop of their own.
pub mod memory {
    pub use kiln_cache::memory::{KvPolicy, Memory, Policy, Progress, TensorTree};
    pub use kiln_core::{
        device_error::Refusals,
        layer::{
            CacheLayer, CrossLayer, Footprint, Kv, KvLayer, KvSpan, LayerState, Limits, Moved, Positions,
            RowPosition, SsmState, StateLayer, StepShape, Usage,
        },
        model_cache::{CacheState, LayerCache, Pass, RowPart},
        need::{AttentionNeed, LayerNeed, RecurrentNeed, RotaryNeed},
        packed::{Along, PackedBuffer, PackedKv, Packing},
        slot::{AnySlot, Dirty, Slot},
        view::{DenseKv, KvView, PackedView},
    };
}
