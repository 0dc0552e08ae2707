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
//! - [`Model::load`] loads a model, and [`Model::builder`] has the choices: device, type of numbers, memory.
//! - [`Model::generate`] makes a [`Request`]: settings, then [`text`](Request::text), [`stream`](Request::stream) or
//!   [`steps`](Request::steps).
//! - A [`Sequence`] keeps what was computed for the next request, and a [`Chat`] for the next turn. A [`Plan`] says how it is
//!   kept.
//! - [`Model::causal`] is the forward pass, for loops of your own.
//!
//! A model is only weights: what a sequence leaves behind is in its [`ModelCache`], so one model serves many of them.
#![forbid(unsafe_code)]

/// Tensors are those of Burn.
pub use burn;
/// Audio files as samples, and Whisper's features of them.
pub use kiln_audio::{self as audio, AudioReader};
/// Models from the Hugging Face hub, and the cache that they are kept in.
#[cfg(feature = "hub")]
pub use kiln_hub as hub;

mod chat;
mod folder;
mod model;
mod out_of_memory;
pub mod probe;
mod quantize;
mod request;
mod saved;
mod self_test;
mod sequence;
mod speech;
mod text;

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
pub use kiln_cache::{
    CacheSettings, CacheSpec, Compat, Flush, KvFactory, KvStrategy, Offload, QuantizedSettings, Rotate,
    STRATEGIES, SinkSettings, StaticSettings, offload, quantizers, samples as cache_samples,
};
pub use kiln_core::{
    Error, Result,
    batch::Batch,
    budget::Budget,
    error::plain,
    files,
    model::{CausalModel, ExpertTraffic, FeatureShape, Logits, TokenId, WeightBytes},
    model_cache::ModelCache,
    read_back,
    unsafe_ops::silence_wayland,
};
pub use kiln_generate::{
    AllowedTokens, AssistedSettings, BeamSettings, CacheHandle, ChatTemplate, ChatTemplates, Completion,
    ContrastiveSettings, Conversation, DolaLayers, DraftModel, EarlyStopping, ForceWord, Generation,
    GenerationConfig, Grammar, Message, OomPolicy, Options as GenerationOptions, Processor, Processors,
    PromptLookup, RenderOptions, RowState, Schedule, Settings, Stats, Step, StopReason, StopStrings,
    StoppedText, StoppingCriterion, TextStream, Tokenizer, TokenizerConfig, UNTIL_IT_ENDS,
    chat_template::Data, prefill, processors, watermark,
};
pub use kiln_kernels::device;
pub use kiln_models::{
    self as models, ConfigFile, ExpertSizes, Mixture, RandomJamba, RandomLlama, RandomMamba, RandomMixtral,
    RandomModel, Rope, Ropes, Sizes,
};

pub use chat::Chat;
pub use folder::{Ask, CacheSize, Inspection, Longest, cache_text, generation_config_of, tokenizer_of};
pub use kiln_models::checkpoint::Quantized;
pub use model::{DtypeChoice, Model, ModelBuilder, Progress};
pub use out_of_memory::{OnOutOfMemory, usable};
pub use quantize::quantize;
pub use request::{Prompt, Request};
pub use saved::SavedCache;
pub use self_test::{Agreement, ModelVerdict, SelfTest, interrupted};
pub use sequence::{Reuse, Sequence, Steps};
pub use speech::{Audio, Segment, Task, Transcriber, Transcript, Transcripts, Word};
pub use text::GeneratedText;

/// Which implementation of each kernel runs, and which one ran.
pub mod kernels {
    #[doc(no_inline)]
    pub use kiln_kernels::*;
}

/// What a block remembers: for those who write a strategy or a loop of their own.
///
/// A strategy is settings alone ([`Policy`](memory::Policy), [`KvPolicy`](memory::KvPolicy)). [`Memory`](memory::Memory) keeps
/// its tensors, and does the saving, offloading and copying.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{
///     Model, Result,
///     burn::tensor::Tensor,
///     memory::{Kv, KvPolicy, KvView, LayerCache, Memory, Policy, Positions, Progress, Slot},
/// };
///
/// /// Keeps all keys and values, `[batch, kv_heads, tokens, head_dim]`, in tensors that grow with each token.
/// #[derive(Clone, Debug)]
/// struct Concatenate;
///
/// impl Policy for Concatenate {
///     const NAME: &'static str = "concatenate";
///     type Counts = ();
///     type Tensors = Slot<Kv>;
///
///     fn rewind(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, len: usize) -> Result<()> {
///         if let Some((keys, values)) = kv.take()? {
///             kv.set((keys.narrow(2, 0, len), values.narrow(2, 0, len)));
///         }
///         Ok(())
///     }
///
///     fn validate(&self, _: &Progress<()>, _: &Slot<Kv>) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// impl KvPolicy for Concatenate {
///     fn append(&self, _: &mut Progress<()>, kv: &mut Slot<Kv>, new: Kv, _: &Positions) -> Result<KvView> {
///         let (keys, values) = match kv.take()? {
///             Some((keys, values)) => (Tensor::cat(vec![keys, new.0], 2), Tensor::cat(vec![values, new.1], 2)),
///             None => new,
///         };
///         kv.set((keys.clone(), values.clone()));
///         Ok(KvView::from_zero(keys, values))
///     }
///
///     fn gather(&self, _: &Progress<()>, kv: &Slot<Kv>) -> Result<Option<Kv>> {
///         Ok(kv.get()?.cloned())
///     }
/// }
///
/// let model = Model::load(folder)?;
/// let mut cache = model.cache(model.plan())?;
/// for (_, layer) in cache.layers_mut() {
///     *layer = LayerCache::Attention(Box::new(Memory::new(Concatenate, model.device())));
/// }
/// let request = || model.generate("The Constitution").max_new_tokens(9).temperature(0.0);
/// assert_eq!(request().cache(&mut cache).text()?, request().text()?);
/// # Ok::<(), kiln::Error>(())
/// ```
pub mod memory {
    pub use kiln_cache::memory::{KvPolicy, Memory, Policy, Progress, TensorTree};
    pub use kiln_core::{
        device_state::{DeviceState, Refusals},
        layer::{
            CacheLayer, CrossLayer, Footprint, Kv, KvLayer, KvSpan, LayerState, Limits, Moved, Parents,
            Positions, Reorders, RowPosition, StateLayer, StateRings, StepShape, Usage,
        },
        model_cache::{CacheState, LayerCache, Pass, RowPart},
        need::{AttentionNeed, LayerNeed, RecurrentNeed, RotaryNeed},
        packed::{Along, PackedBuffer, PackedKv, Packing},
        slot::{AnySlot, Dirty, Slot},
        view::{DenseKv, KvView, PackedView},
    };
}
