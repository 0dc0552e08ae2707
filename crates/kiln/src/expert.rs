//! The building blocks of Kiln, for custom loops, cache strategies, servers and tools.
//!
//! ```
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
//! use kiln::{
//!     Model,
//!     expert::{Batch, Logits, read_back},
//! };
//!
//! let model = Model::load(folder)?;
//! let mut cache = model.cache(model.plan())?;
//! let batch = Batch::from_rows(&[model.encode("The Constitution")?], model.device())?;
//! let logits = model.causal().forward(&batch, Logits::Last, &mut cache)?;
//! let likeliest = read_back::read(logits.argmax(2))?.iter::<u32>().next();
//! assert!(likeliest.is_some());
//! # Ok::<(), kiln::Error>(())
//! ```

/// Audio files as samples, and Whisper's features of them.
pub use kiln_audio as audio;
pub use kiln_cache::{
    CacheSettings, CacheSpec, Compat, Flush, KvFactory, KvStrategy, Rotate, STRATEGIES, SinkSettings,
    StaticSettings, offload_all, quantizers, samples as cache_samples,
};
pub use kiln_core::{
    batch::Batch,
    budget::Budget,
    error::plain,
    files,
    model::{CausalModel, ExpertTraffic, FeatureShape, Logits, WeightBytes},
    model_cache::ModelCache,
    read_back, source,
    stages::Stages,
    tensor_file::TensorFile,
    unsafe_ops::exit_at_once,
};
pub use kiln_generate::{
    AllowedTokens, AssistedSettings, BeamSettings, CacheHandle, ChatTemplates, ContrastiveSettings,
    DolaLayers, DraftModel, EarlyStopping, ForceWord, Generation, OomPolicy, Options as GenerationOptions,
    PrefixScope, Processors, PromptLookup, RenderOptions, Schedule, Settings, StopStrings, StoppedText,
    StoppingCriterion, StoredPrefix, TextStream, Tokenizer, TokenizerConfig, UNTIL_IT_ENDS,
    chat_template::Data, prefill, processors, watermark,
};
pub use kiln_models::{self as models, ConfigFile, ExpertSizes, Rope, Ropes, Sizes, checkpoint::Quantized};

pub use crate::{
    folder::{Ask, CacheSize, Inspection, Longest, cache_text, generation_config_of, tokenizer_of},
    model::name_of,
    out_of_memory::usable,
    saved::SavedCache,
    self_test::{Agreement, ModelVerdict, SelfTest, interrupted, keep_verdicts, kept_verdicts},
};

/// The choice of an implementation for each kernel, and records of which one ran.
pub mod kernels {
    #[doc(no_inline)]
    pub use kiln_kernels::*;
}

/// The memory of a block, for custom strategies and loops.
///
/// A strategy consists of settings only ([`Policy`](memory::Policy), [`KvPolicy`](memory::KvPolicy)).
/// [`Memory`](memory::Memory) owns the tensors, and implements saving, offloading and copying.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{
///     Model, Result,
///     burn::tensor::Tensor,
///     expert::memory::{Kv, KvPolicy, KvView, LayerCache, Memory, Policy, Positions, Progress, Slot},
/// };
///
/// /// Keeps all keys and values, `[batch, heads, tokens, width]`, in tensors that grow with each token.
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
///     layer.keys = Some(Box::new(Memory::new(Concatenate, model.device())));
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
            Positions, Reorders, Rings, RowPosition, StateLayer, StepShape, Usage,
        },
        model_cache::{
            BlockKeys, BlockMemory, CacheState, LayerCache, Pass, RowPart, SharedPart, SharedRows,
        },
        need::{
            AttentionNeed, LayerNeed, RecurrentNeed, RingEntries, RingNeed, RotaryNeed, RotaryPairs, Stream,
        },
        packed::{Along, PackedBuffer, PackedKv, Packing},
        slot::{AnySlot, Dirty, Slot},
        view::{DenseKv, KvView, PackedView},
    };
}

/// Measurement of the loss of packed caches and weights on a model.
pub mod probe {
    pub use crate::probe::*;
}
