//! A model on a device, with what its folder says about using it.

use std::{
    fmt,
    path::Path,
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device};
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    batch::Batch,
    budget::{Budget, Claim},
    faults::{self, Refusals},
    layer::Feed,
    model::{CausalModel, TokenId},
    model_cache::ModelCache,
};
use kiln_generate::{ChatTemplates, Generation, GenerationConfig, Options, Rescue, Settings, TextStream};
use kiln_kernels::{
    Choice, Kernels,
    device::{self, DeviceClass, DeviceName, Opened},
};
use kiln_models::{
    Configured, RandomLlama, RandomWeights, Sizes,
    checkpoint::{Checkpoint, Loader},
    configure,
};
use tokenizers::Tokenizer;

use crate::{
    OnOutOfMemory,
    chat::chat_templates,
    folder::{SMALLEST_CHUNK, generation_config, own_plan, tokenizer},
    out_of_memory::{self, OffloadLayers, QuantizeLayers, usable},
    sequence::{Continuation, Reuse, Sequence},
    text::{GeneratedText, RunOptions},
};

/// The type that weights, activations and caches are held in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DtypeChoice {
    /// float16 on a GPU that computes it, where the model's activations stay within it; else float32
    #[default]
    Auto,
    F32,
    F16,
    Bf16,
}

impl FromStr for DtypeChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "f32" | "float32" => Self::F32,
            "f16" | "float16" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            _ => {
                let known = ["auto", "f32", "f16", "bf16"].map(str::to_owned).into();
                return Err(Error::Unknown { what: "dtype", name: text.to_owned(), known });
            }
        })
    }
}

impl fmt::Display for DtypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// How far loading has come, in bytes of the weights' files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub read: u64,
    pub total: u64,
}

/// Where and how a model is loaded.
pub struct LoadOptions<'a> {
    pub device: Opened,
    pub dtype: DtypeChoice,
    pub kernels: Choice,
    /// Bytes of the largest tensor that is given to a kernel; the device's own limit if smaller.
    pub largest_binding: Option<usize>,
    pub on_progress: Option<&'a mut dyn FnMut(Progress)>,
    /// The caches that will be asked for: one that the model cannot have is refused before its weights are read.
    pub plan: Option<Plan>,
    /// Bytes of the device that weights, caches and activations may take together; `None`: 90 % of its memory, where it
    /// is known.
    pub memory: Option<u64>,
    /// Tokens that a sequence will have at least: where there is no memory for them, that is said before the weights are
    /// read.
    pub tokens: usize,
}

impl fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadOptions")
            .field("device", &self.device)
            .field("dtype", &self.dtype)
            .field("kernels", &self.kernels)
            .finish_non_exhaustive()
    }
}

impl LoadOptions<'_> {
    /// The defaults on device `name`, which is opened.
    pub fn new(name: DeviceName) -> Result<Self> {
        Ok(Self::on(device::open(name)?))
    }

    /// The defaults on `device`.
    pub fn on(device: Opened) -> Self {
        let (dtype, kernels) = (DtypeChoice::Auto, Choice::Auto);
        Self {
            device,
            dtype,
            kernels,
            largest_binding: None,
            on_progress: None,
            plan: None,
            memory: None,
            tokens: 0,
        }
    }

    /// float32 on `device`: what comparisons with transformers are made in.
    pub fn float32(device: Opened) -> Self {
        Self { dtype: DtypeChoice::F32, ..Self::on(device) }
    }

    fn dtype(&self, configured: &dyn Configured) -> Result<DType> {
        let dtype = match self.dtype {
            DtypeChoice::Auto if !configured.fits_float16() => DType::F32,
            DtypeChoice::Auto => self.device.natural_dtype(),
            DtypeChoice::F32 => DType::F32,
            DtypeChoice::F16 => DType::F16,
            DtypeChoice::Bf16 => DType::BF16,
        };
        if !self.device.device.supports_dtype(dtype) {
            let why = format!("{} does not compute {}; use f32", self.device.info.name, dtype.name());
            return Err(Error::Setting { name: "--dtype", why });
        }
        Ok(dtype)
    }

    fn budget(&self) -> Budget {
        let info = &self.device.info;
        let budget = Budget::new(self.memory.or_else(|| usable(info)));
        budget.set_largest_buffer(u64::try_from(info.largest_binding).ok());
        if info.class == DeviceClass::Cpu { budget.of_this_process() } else { budget }
    }

    fn largest_binding(&self) -> usize {
        let device = self.device.info.largest_binding;
        self.largest_binding.map_or(device, |asked| asked.min(device))
    }
}

/// A model on a device, its tokenizer, and what its folder says about generation.
pub struct Model {
    causal: Box<dyn CausalModel>,
    name: String,
    sizes: Sizes,
    device: Opened,
    dtype: DType,
    kernels: Kernels,
    tokenizer: Option<Tokenizer>,
    generation: GenerationConfig,
    chat_templates: ChatTemplates,
    /// Of the weights; `None` where they were made up.
    fingerprint: Option<String>,
    parameters: u64,
    /// To the memory of the weights.
    claim: Claim,
    load_time: Duration,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("name", &self.name).field("sizes", &self.sizes).finish_non_exhaustive()
    }
}

impl Model {
    /// Loads a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error::File`] for what is missing, damaged or contradicts itself; [`Error::Unknown`] for an architecture that
    /// is not known; [`Error::Setting`] for what the device cannot do.
    pub fn load(folder: &Path, mut options: LoadOptions<'_>) -> Result<Self> {
        let started = Instant::now();
        let kernels = Kernels::new(options.kernels, &options.device.device)?;
        let checkpoint = Checkpoint::open(folder)?;
        let configured = configure(&checkpoint.config)?;
        let dtype = options.dtype(&*configured)?;
        // Small files first, so that what is wrong with them is said before the long work.
        let generation = generation_config(folder, &checkpoint)?;
        let tokenizer = tokenizer(folder)?;
        let own_plan = own_plan(&generation)?;
        let (plan, needs) = (options.plan.as_ref().unwrap_or(&own_plan), configured.needs());
        plan.check(&needs)?;
        let chat_templates = chat_templates(folder)?;

        let elements: u64 = checkpoint.by_dtype().values().map(|(elements, _)| elements).sum();
        let budget = options.budget();
        let claim = budget.claim("weights", elements * dtype.size() as u64)?;
        if options.tokens > 0 {
            let least = plan.bytes_offloaded(&needs, options.tokens, dtype.size());
            budget.claim("a cache of as many tokens, even with its layers in host memory,", least as u64)?;
        }
        let refusals = Refusals::until_now();
        let total = checkpoint.bytes();
        let mut read = 0;
        let mut watcher = options.on_progress.take();
        let mut on_progress = |bytes: u64| {
            read += bytes;
            if let Some(watcher) = &mut watcher {
                watcher(Progress { read, total });
            }
        };
        let largest_binding = options.largest_binding();
        let copied = options.device.is_asynchronous();
        let mut loader = Loader::new(
            &checkpoint,
            &options.device.device,
            dtype,
            largest_binding,
            copied,
            &mut on_progress,
        );
        let causal = configured.load(&mut loader, &kernels)?;
        let parameters = loader.finish()?;
        wait_for_weights(&options.device.device, refusals)?;
        tracing::debug!(target: "kiln::memory", usage = ?options.device.device.memory_pool_usage(), "loaded");
        Ok(Self {
            causal,
            name: folder
                .file_name()
                .map_or_else(|| folder.display().to_string(), |n| n.display().to_string()),
            sizes: configured.sizes(),
            device: options.device,
            dtype,
            kernels,
            tokenizer,
            generation,
            chat_templates,
            fingerprint: Some(checkpoint.fingerprint()),
            parameters,
            claim,
            load_time: started.elapsed(),
        })
    }

    /// A Llama of random weights, made up on the device.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn random(sizes: &RandomLlama, options: LoadOptions<'_>) -> Result<Self> {
        let started = Instant::now();
        let kernels = Kernels::new(options.kernels, &options.device.device)?;
        let configured = configure(&sizes.config())?;
        let dtype = options.dtype(&*configured)?;
        let mut weights = RandomWeights {
            device: options.device.device.clone(),
            dtype,
            largest_binding: options.largest_binding(),
            claim: options.budget().claim("weights", 0)?,
        };
        let refusals = Refusals::until_now();
        let causal = configured.load(&mut weights, &kernels)?;
        wait_for_weights(&options.device.device, refusals)?;
        Ok(Self {
            causal,
            name: "random".to_owned(),
            sizes: configured.sizes(),
            device: options.device,
            dtype,
            kernels,
            tokenizer: None,
            generation: GenerationConfig::default(),
            chat_templates: ChatTemplates::default(),
            fingerprint: None,
            parameters: weights.claim.bytes() / dtype.size() as u64,
            claim: weights.claim,
            load_time: started.elapsed(),
        })
    }

    /// The weights, for a loop of one's own.
    pub fn causal(&self) -> &dyn CausalModel {
        &*self.causal
    }

    /// An empty cache for one sequence, or one batch of them.
    pub fn cache(&self, plan: &Plan) -> Result<ModelCache> {
        plan.build(&self.causal.needs(), &self.kernels)?.within(self.budget())
    }

    /// The caches that its folder asks for (`use_cache`, `cache_implementation`), else `dynamic`.
    pub fn plan(&self) -> Result<Plan> {
        own_plan(&self.generation)
    }

    /// The name of its folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    pub fn device(&self) -> &Device {
        &self.device.device
    }

    /// The device and what is known of it.
    pub fn opened(&self) -> &Opened {
        &self.device
    }

    /// What weights and caches are held in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Which kernels ran so far.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The memory that its weights and caches are counted in.
    pub fn budget(&self) -> &Budget {
        self.claim.budget()
    }

    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.parameters * self.dtype.size() as u64
    }

    /// Bytes of the weights that a step multiplies by: all but the embedding, unless it is the head too.
    pub fn multiplied_bytes(&self) -> u64 {
        let embedding = (self.sizes.vocab * self.sizes.hidden) as u64;
        let only_looked_up = if self.sizes.tied { 0 } else { embedding };
        (self.parameters - only_looked_up.min(self.parameters)) * self.dtype.size() as u64
    }

    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// What the folder's `generation_config.json` says.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The Jinja templates that turn a conversation into a prompt, as far as the folder has any.
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.chat_templates
    }

    /// A name for its weights, that no other weights have.
    ///
    /// # Errors
    /// [`Error::Setting`] for weights that came from no folder.
    pub fn fingerprint(&self) -> Result<&str> {
        self.fingerprint.as_deref().ok_or_else(|| Error::Setting {
            name: "--model",
            why: "is made up, so a cache saved with it could never be used again; load a folder".to_owned(),
        })
    }

    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| Error::Prompt {
            why: format!("{} has no tokenizer.json, so it takes token ids and no text", self.name),
        })
    }

    /// The tokens of `text`, with the special tokens that the tokenizer adds.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        self.encoded(text, true)
    }

    /// The tokens of `text` alone, as it stands in the middle of another.
    pub fn encode_more(&self, text: &str) -> Result<Vec<TokenId>> {
        self.encoded(text, false)
    }

    fn encoded(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>> {
        let encoding = self
            .tokenizer()?
            .encode(text, add_special_tokens)
            .map_err(|e| Error::Prompt { why: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `tokens`, special tokens left out.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        self.tokenizer()?.decode(tokens, true).map_err(|e| Error::Prompt { why: e.to_string() })
    }

    /// Turns tokens into text piece by piece.
    pub fn text_stream(&self) -> Result<TextStream<'_>> {
        Ok(TextStream::new(self.tokenizer()?))
    }

    /// Generates from one prompt, or from several of any lengths, token by token.
    ///
    /// `wanted` overrides what the folder says, field by field. Where `cache` holds something already, the prompts are what
    /// follows it.
    ///
    /// # Errors
    /// An empty prompt, ids outside the vocabulary, a prompt longer than the model's positions, impossible settings.
    pub fn generate<'a>(
        &'a self,
        cache: &'a mut ModelCache,
        prompts: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Generation<'a>> {
        if cache.seq_len() > 0 && prompts.len() > 1 {
            // The cache does not know how its rows were padded.
            let why =
                "several rows cannot be continued here; use a Sequence, which knows how they were padded";
            return Err(Error::Prompt { why: why.to_owned() });
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let options = self.options(wanted, options, cache, prompts.len(), longest + cache.seq_len())?;
        let batch = Batch::left_padded(&prompts, self.padding(&options.settings), self.device())?;
        Generation::new(self.causal(), cache, batch, prompts, options)
    }

    /// Generates from all tokens of one row, or of several; `sequence` is fed those that it does not hold yet.
    ///
    /// Where it holds others, it forgets them first ([`Sequence::rewind_to`]).
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate).
    pub fn continue_from<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        rows: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Continuation<'a>> {
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let options = self.options(wanted, options, sequence.cache(), rows.len(), longest)?;
        let reuse = sequence.rewind(&rows)?;
        let batch = sequence.rest(&rows, self.padding(&options.settings), self)?;
        let (cache, held) = sequence.split();
        Ok(Continuation::new(Generation::new(self.causal(), cache, batch, rows, options)?, Some(held), reuse))
    }

    /// [`continue_from`](Self::continue_from), where nothing that is held may be forgotten.
    ///
    /// # Errors
    /// [`Error::NotAContinuation`] where `rows` do not begin with what is held, or do not go on.
    pub fn continue_exactly<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        rows: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Continuation<'a>> {
        sequence.check_continued_by(&rows)?;
        self.continue_from(sequence, rows, wanted, options)
    }

    /// How to generate, once the cache holds `tokens` tokens of `rows` rows.
    fn options(
        &self,
        wanted: &GenerationConfig,
        options: RunOptions,
        cache: &ModelCache,
        rows: usize,
        tokens: usize,
    ) -> Result<Options> {
        let mut settings = wanted.clone().merged_over(&self.generation).resolve()?;
        settings.max_new_tokens = settings.new_tokens(tokens)?;
        let prefill_chunk = options.prefill_chunk.unwrap_or_else(|| self.largest_chunk(rows));
        // The last token is not fed; without a limit nobody knows how many will be.
        let reaches = tokens.saturating_add(settings.max_new_tokens.unwrap_or(1).saturating_sub(1));
        let (element, fewest) = (self.dtype.size(), prefill_chunk.min(SMALLEST_CHUNK));
        let feed = Feed { rows, tokens: 0, element, last: settings.max_new_tokens.is_some() };
        out_of_memory::check_buffers(cache, reaches, &feed, options.on_oom)?;
        out_of_memory::check(cache, reaches, &feed, self.causal.working_bytes(rows, fewest), options.on_oom)?;
        if let Some(room) = self.room(cache, tokens)? {
            match settings.max_new_tokens {
                None => settings.max_new_tokens = Some(room),
                Some(asked) if asked > room => {
                    tracing::warn!(asked, room, "generating beyond the positions the model was made for");
                }
                Some(_) => {}
            }
        }
        let rescue: Option<Arc<dyn Rescue>> = match options.on_oom {
            OnOutOfMemory::Fail => None,
            OnOutOfMemory::Offload => Some(Arc::new(OffloadLayers::new(self.device()))),
            OnOutOfMemory::Quantize => {
                Some(Arc::new(QuantizeLayers::new(self.causal.needs(), &self.kernels, self.device())))
            }
        };
        Ok(Options {
            rescue,
            settings,
            prefill_chunk: Some(prefill_chunk),
            lookahead: self.device.is_asynchronous(),
            keep_logits: options.keep_logits,
            keep_scores: options.keep_scores,
            kernels: Some(self.kernels.clone()),
            compile: self.device.is_asynchronous() && options.compile.unwrap_or(true),
        })
    }

    /// Padding is hidden, so any id of the vocabulary does.
    fn padding(&self, settings: &Settings) -> TokenId {
        settings.pad_token_id.filter(|&id| (id as usize) < self.sizes.vocab).unwrap_or(0)
    }

    /// Tokens that may follow `held` tokens in `cache`; `None`: any number, positions stay below a bound.
    pub(crate) fn room(&self, cache: &ModelCache, held: usize) -> Result<Option<usize>> {
        if cache.is_endless() {
            return Ok(None);
        }
        let positions = self.sizes.positions;
        if held >= positions {
            return Err(Error::Prompt {
                why: format!(
                    "the prompt has {held} tokens and the model {positions} positions; shorten it by at least {}, or \
                     use a sink cache",
                    held + 1 - positions
                ),
            });
        }
        // The last token is not fed.
        let capacity = cache.capacity().map_or(usize::MAX, |capacity| capacity + 1);
        match capacity.checked_sub(held) {
            None | Some(0) => Err(Error::Full { capacity: capacity - 1, needed: held }),
            Some(left) => Ok(Some(left.min(positions - held))),
        }
    }

    /// Prompt tokens of `rows` rows that a forward pass takes within 32 MiB of activations, so that a long prompt needs
    /// hardly more memory than its keys and values.
    pub fn largest_chunk(&self, rows: usize) -> usize {
        const ACTIVATIONS: usize = 32 << 20;

        let a_token = self.sizes.token_bytes(self.dtype.size());
        let bytes = rows.max(1).saturating_mul(a_token).max(1);
        (ACTIVATIONS / bytes).clamp(16, 2048)
    }

    /// Generates text from one prompt, piece by piece; stop strings end it.
    pub fn generate_text<'a>(
        &'a self,
        cache: &'a mut ModelCache,
        prompt: Vec<TokenId>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<GeneratedText<'a>> {
        let stream = TextStream::after(self.tokenizer()?, &prompt)?;
        let generation = self.generate(cache, vec![prompt], wanted, options)?;
        let fed = generation.stats().prompt_tokens;
        GeneratedText::new(Continuation::new(generation, None, Reuse { fed, ..Reuse::default() }), stream)
    }

    /// The text of [`continue_from`](Self::continue_from) for one row, piece by piece; stop strings end it.
    pub fn continue_text<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        ids: Vec<TokenId>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<GeneratedText<'a>> {
        let stream = TextStream::after(self.tokenizer()?, &ids)?;
        GeneratedText::new(self.continue_from(sequence, vec![ids], wanted, options)?, stream)
    }
}

/// Waits until weights are on the device.
///
/// # Errors
/// What the device says; [`Error::OutOfMemory`] where it had no room for them.
fn wait_for_weights(device: &Device, before: Refusals) -> Result<()> {
    faults::sync(device)?;
    before.none_since().map_err(|_| Error::refused("the weights"))
}
