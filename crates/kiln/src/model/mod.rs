//! A model on a device, with what its folder says about using it.

mod generating;
mod loading;

use std::{
    fmt,
    path::Path,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use burn::tensor::{DType, Device};
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    budget::{Budget, Claim},
    device_error::{self, Refusals},
    model::{CausalModel, TokenId},
    model_cache::ModelCache,
};
use kiln_generate::{ChatTemplates, GenerationConfig, TextStream, Tokenizer};
use kiln_kernels::{Kernels, device::Opened};
use kiln_models::{
    RandomLlama, RandomWeights, Sizes,
    checkpoint::{Checkpoint, Loader},
    configure,
};

pub use loading::{DtypeChoice, LoadOptions, Progress};

use crate::{
    chat::chat_templates,
    folder::{SMALLEST_CHUNK, generation_config, own_plan, tokenizer},
    out_of_memory::claim_weights,
};

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
    /// The caches that the folder asks for.
    plan: Plan,
    /// Of the weights; `None` where they were made up.
    fingerprint: Option<String>,
    parameters: u64,
    /// To the memory of the weights.
    claim: Claim,
    load_time: Duration,
    /// Whether a warning named the settings of the folder that are not applied.
    told: AtomicBool,
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
        let half = if options.computes_float16(&*configured) { DType::F16.size() } else { dtype.size() };
        let claim = claim_weights(
            &budget,
            elements * dtype.size() as u64,
            plan.build(&needs, &kernels)?,
            options.tokens,
            configured.sizes().working_bytes(1, SMALLEST_CHUNK, dtype.size()),
            [dtype.size(), half],
        )?;
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
            plan: own_plan,
            fingerprint: Some(checkpoint.fingerprint()?),
            parameters,
            claim,
            load_time: started.elapsed(),
            told: AtomicBool::new(false),
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
        // All of them first: made one by one, those that fit would take minutes until one does not.
        drop(
            options
                .budget()
                .claim("the model's weights", sizes.parameters().saturating_mul(dtype.size() as u64))?,
        );
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
            plan: Plan::named("dynamic")?,
            fingerprint: None,
            parameters: weights.claim.bytes() / dtype.size() as u64,
            claim: weights.claim,
            load_time: started.elapsed(),
            told: AtomicBool::new(false),
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
        Ok(self.plan.clone())
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
        self.causal.weight_bytes().held as u64
    }

    /// Bytes of the weights that a step multiplies by: all but the embedding, unless it is the head too.
    pub fn multiplied_bytes(&self) -> u64 {
        self.causal.weight_bytes().multiplied as u64
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
            name: "model",
            why: "is made up, so a cache saved with it could never be used again; load a folder".to_owned(),
        })
    }

    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(|| Error::Prompt {
            why: format!(
                "{} has no tokenizer.json, which text needs; add the file to the model folder",
                self.name
            ),
        })
    }

    /// The tokens of `text`, with the special tokens that the tokenizer adds.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, true)
    }

    /// The tokens of `text` alone, as it stands in the middle of another.
    pub fn encode_more(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, false)
    }

    /// Refuses a text that has more tokens than the model has positions, before they are made: tokens of a long text take a
    /// hundred times its memory.
    ///
    /// # Errors
    /// [`Error::Prompt`] for a text that is too long for `cache`, however few tokens it has.
    pub fn check_length(&self, text: &str, cache: &ModelCache) -> Result<()> {
        let (fewest, positions) = (self.tokenizer()?.fewest_tokens(text.len()), self.sizes.positions);
        if cache.is_endless() || fewest <= positions {
            return Ok(());
        }
        let why = format!(
            "the prompt has at least {fewest} tokens and the model {positions} positions; shorten it, or use a sink cache"
        );
        Err(Error::Prompt { why })
    }

    /// The text of `tokens`, special tokens left out.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        self.tokenizer()?.decode(tokens, true)
    }

    /// Turns tokens into text piece by piece.
    pub fn text_stream(&self) -> Result<TextStream<'_>> {
        Ok(TextStream::new(self.tokenizer()?))
    }
}

/// Waits until weights are on the device.
///
/// # Errors
/// What the device says; [`Error::OutOfMemory`] where it had no room for them.
fn wait_for_weights(device: &Device, before: Refusals) -> Result<()> {
    device_error::sync(device)?;
    before.none_since().map_err(|_| Error::refused("the weights"))
}
