//! A model on a device, with what its folder says about using it.

mod generating;
mod loading;

use std::{
    fmt,
    path::Path,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use burn::tensor::{DType, Device};
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    budget::{Budget, Claim},
    model::{CausalModel, ExpertTraffic, TokenId},
    model_cache::ModelCache,
};
use kiln_generate::{ChatTemplates, Engine, Generating, GenerationConfig, TextStream, TokenTable, Tokenizer};
use kiln_kernels::{Kernels, device::Opened};
use kiln_models::Sizes;

pub(crate) use loading::check_quant;
pub use loading::{DtypeChoice, ModelBuilder, Progress};

use crate::{
    request::{Prompt, Request},
    speech::SpeechConfig,
};

/// A model on a device, its tokenizer, and what its folder says about generation.
///
/// A clone is another handle to the same weights and costs nothing. Threads may share a model, and generate
/// with it at once.
#[derive(Clone)]
pub struct Model {
    loaded: Arc<Loaded>,
}

/// The parts of a [`Model`].
struct Loaded {
    causal: Arc<dyn CausalModel>,
    name: String,
    sizes: Sizes,
    device: Opened,
    dtype: DType,
    kernels: Kernels,
    tokenizer: Option<Arc<Tokenizer>>,
    /// What grammars know of the tokenizer, once one was used.
    token_table: Mutex<Option<Arc<TokenTable>>>,
    generation: GenerationConfig,
    /// What the folder says of transcribing; `None` for a model of text, and for one that was made up.
    speech: Option<SpeechConfig>,
    chat_templates: ChatTemplates,
    /// The caches that the folder asks for.
    plan: Plan,
    /// Of the weights; `None` where they were made up.
    fingerprint: Option<String>,
    parameters: u64,
    /// To the memory of the weights.
    claim: Claim,
    load_time: Duration,
    /// Whether steps may be recorded and replayed.
    captures: bool,
    /// Whether a warning named the settings of the folder that are not applied.
    told: AtomicBool,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("name", &self.loaded.name)
            .field("sizes", &self.loaded.sizes)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Loads a Hugging Face folder onto the best device: a discrete GPU if there is one, else an integrated one, else the
    /// CPU. [`builder`](Self::builder) has other choices.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::Model;
    ///
    /// let model = Model::load(folder)?;
    /// println!("{} on {}", model.name(), model.opened().info.name);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`ModelBuilder::load`].
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        Self::builder(folder).load()
    }

    /// Prepares to load a Hugging Face folder: device, type of numbers, memory, progress.
    pub fn builder<'a>(folder: impl AsRef<Path>) -> ModelBuilder<'a> {
        ModelBuilder::folder(folder.as_ref())
    }

    /// Asks the model to continue `prompt`: text, tokens of one row, or tokens of several rows.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, Plan};
    ///
    /// let model = Model::load(folder)?;
    /// let plan = Plan::sink(64, 4)?;
    /// for piece in model.generate("The Constitution").max_new_tokens(9).plan(plan).stream()? {
    ///     print!("{}", piece?);
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn generate(&self, prompt: impl Into<Prompt>) -> Request<'static> {
        Request::new(self.clone(), prompt.into())
    }

    /// An engine for many requests at once, which share passes: up to `rows` rows in each (continuous batching).
    /// Each request gives the tokens that it gives alone, if `rows` is at most [`EXACT_ROWS`].
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{EXACT_ROWS, Event, Model, expert::read_back::block_on};
    ///
    /// let model = Model::load(folder)?;
    /// let mut engine = model.engine(EXACT_ROWS)?;
    /// for prompt in ["ROMEO:", "The Constitution", "JULIET:"] {
    ///     engine.submit(model.generate(prompt).max_new_tokens(9).stream()?)?;
    /// }
    /// while !engine.is_idle() {
    ///     for event in block_on(engine.step()) {
    ///         match event {
    ///             Event::Output(request, piece) => println!("{request:?}: {piece}"),
    ///             Event::Ended(request, text) => println!("{request:?} ended: {:?}", text.stop_reason()),
    ///             Event::Failed(request, _, error) => println!("{request:?} failed: {error}"),
    ///         }
    ///     }
    /// }
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Setting`] for 0 rows.
    ///
    /// [`EXACT_ROWS`]: crate::EXACT_ROWS
    pub fn engine<T: Generating>(&self, rows: usize) -> Result<Engine<T>> {
        Engine::new(self.causal().clone(), rows)
    }

    /// The weights, for a loop of one's own.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, expert::{Batch, Logits, read_back}};
    ///
    /// let model = Model::load(folder)?;
    /// let mut cache = model.cache(model.plan())?;
    /// let mut tokens = model.encode("The Constitution")?;
    /// let mut batch = Batch::from_rows(&[tokens.clone()], model.device())?;
    /// for _ in 0..9 {
    ///     // Logits are `[rows, 1, vocab]`: those of the last token of each row.
    ///     let logits = model.causal().forward(&batch, Logits::Last, &mut cache)?;
    ///     let likeliest = logits.argmax(2).reshape([1, 1]);
    ///     tokens.extend(read_back::read(likeliest.clone())?.iter::<u32>());
    ///     batch = Batch::new(likeliest);
    /// }
    /// println!("{}", model.decode(&tokens)?);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn causal(&self) -> &Arc<dyn CausalModel> {
        &self.loaded.causal
    }

    /// An empty cache for one sequence, or one batch of them. Its memory is counted in the model's [`budget`](Self::budget).
    ///
    /// # Errors
    /// [`Error::Setting`] for a plan that does not suit the model.
    pub fn cache(&self, plan: &Plan) -> Result<ModelCache> {
        plan.build(&self.loaded.causal.needs(), &self.loaded.kernels)?.within(self.budget())
    }

    /// The plan that the folder asks for (`use_cache`, `cache_implementation`), else `dynamic`.
    pub fn plan(&self) -> &Plan {
        &self.loaded.plan
    }

    /// The name of the model's folder; `random` for random weights.
    pub fn name(&self) -> &str {
        &self.loaded.name
    }

    /// Blocks, heads, widths, vocabulary and positions of the model.
    pub fn sizes(&self) -> &Sizes {
        &self.loaded.sizes
    }

    /// The device as Burn takes it, for tensors in a loop of one's own. [`opened`](Self::opened) says what is known of it.
    pub fn device(&self) -> &Device {
        &self.loaded.device.device
    }

    /// The device and what is known of it.
    pub fn opened(&self) -> &Opened {
        &self.loaded.device
    }

    /// The type that weights, activations and caches are held in.
    pub fn dtype(&self) -> DType {
        self.loaded.dtype
    }

    /// Which kernels ran so far.
    pub fn kernels(&self) -> &Kernels {
        &self.loaded.kernels
    }

    /// The memory of the device that weights, caches and activations are counted in.
    pub fn budget(&self) -> &Budget {
        self.loaded.claim.budget()
    }

    /// Elements of all weights.
    pub fn parameters(&self) -> u64 {
        self.loaded.parameters
    }

    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().held as u64
    }

    /// Bytes of the weights in host memory; see [`ModelBuilder::offload_experts`].
    pub fn host_weight_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().in_host_memory as u64
    }

    /// What experts in host memory have cost so far; `None` where all are on the device.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.loaded.causal.expert_traffic()
    }

    /// Bytes of the weights that a step multiplies by: all but the embedding, unless it is the head too.
    pub fn multiplied_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().multiplied as u64
    }

    /// How long loading took.
    pub fn load_time(&self) -> Duration {
        self.loaded.load_time
    }

    /// The folder's `generation_config.json`: the settings of a request that does not give its own.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.loaded.generation
    }

    pub(crate) fn speech(&self) -> Option<&SpeechConfig> {
        self.loaded.speech.as_ref()
    }

    /// The Jinja templates that turn a conversation into a prompt, as far as the folder has any.
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.loaded.chat_templates
    }

    /// A name for the weights, that no other weights have. Saved caches hold it.
    ///
    /// # Errors
    /// [`Error::Setting`] for weights that came from no folder.
    pub fn fingerprint(&self) -> Result<&str> {
        self.loaded.fingerprint.as_deref().ok_or_else(|| Error::Setting {
            name: "model",
            why: "is made up, so a cache saved with it could never be used again; load a folder".to_owned(),
        })
    }

    pub(crate) fn tokenizer(&self) -> Result<&Arc<Tokenizer>> {
        self.loaded.tokenizer.as_ref().ok_or_else(|| Error::Prompt {
            why: format!(
                "{} has no tokenizer.json, which text needs; add the file to the model folder",
                self.loaded.name
            ),
        })
    }

    /// The tokens of `text`, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// [`Error::Prompt`] where the folder has no tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, true)
    }

    /// The tokens of `text` alone, as it stands in the middle of another.
    ///
    /// # Errors
    /// [`Error::Prompt`] where the folder has no tokenizer.
    pub fn encode_more(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, false)
    }

    /// Refuses a text that has more tokens than the model has positions, before they are made: tokens of a long text take a
    /// hundred times its memory.
    ///
    /// # Errors
    /// [`Error::Prompt`] for a text that is too long for `cache`, however few tokens it has.
    pub fn check_length(&self, text: &str, cache: &ModelCache) -> Result<()> {
        let (fewest, positions) = (self.tokenizer()?.fewest_tokens(text.len()), self.loaded.sizes.positions);
        if cache.is_endless() || fewest <= positions {
            return Ok(());
        }
        let why = format!(
            "the prompt has at least {fewest} tokens and the model {positions} positions; shorten it, or use a sink cache"
        );
        Err(Error::Prompt { why })
    }

    /// The text of `tokens`, special tokens left out.
    ///
    /// # Errors
    /// [`Error::Prompt`] where the folder has no tokenizer, or the tokenizer cannot decode.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        self.tokenizer()?.decode(tokens, true)
    }

    /// Turns tokens into text piece by piece, for loops of one's own.
    ///
    /// # Errors
    /// [`Error::Prompt`] where the folder has no tokenizer.
    pub fn text_stream(&self) -> Result<TextStream> {
        Ok(TextStream::new(self.tokenizer()?.clone()))
    }
}
