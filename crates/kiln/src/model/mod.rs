//! A model on a device, with the settings from its folder.

mod arithmetic;
mod experts;
mod generating;
mod layers;
mod loading;
mod memory;

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
    files::FolderSource,
    model::{CausalModel, ExpertTraffic, TokenId},
    model_cache::ModelCache,
    stages::Stages,
};
use kiln_generate::{ChatTemplates, Engine, Generating, GenerationConfig, TextStream, TokenTable, Tokenizer};
use kiln_kernels::{Arithmetic, Kernels, Placement, device::Opened};
use kiln_models::{Sizes, TensorNames, checkpoint::Adapter};
use sha2::{Digest, Sha256};

pub use arithmetic::ArithmeticChoice;
pub use layers::Layers;
pub(crate) use loading::check_quant;
pub use loading::{DtypeChoice, LoadProgress, ModelBuilder, name_of};
pub use memory::Estimate;

use crate::{
    embedding::{EmbeddingConfig, EmbeddingInput, EmbeddingRequest},
    request::{Prompt, Request},
    speech::SpeechConfig,
};

/// A model on a device, with its tokenizer and the generation settings from its folder.
///
/// A clone is another handle to the same weights and costs nothing. Threads may share a model, and generate
/// with it concurrently.
#[derive(Clone)]
pub struct Model {
    loaded: Arc<Loaded>,
}

/// The parts of a [`Model`]. A clone shares the weights.
#[derive(Clone)]
struct Loaded {
    causal: Arc<dyn CausalModel>,
    name: String,
    sizes: Sizes,
    /// The device of each stage, and the claim to the memory of its weights.
    stages: Stages<(Opened, Arc<Claim>)>,
    /// Claims to the memory of adapters.
    adapters: Vec<Arc<Claim>>,
    tensor_names: TensorNames,
    placement: Placement,
    /// The device of experts, if it is another one.
    experts_on: Option<Opened>,
    dtype: DType,
    /// The arithmetic of each stage.
    arithmetic: Stages<Arithmetic>,
    tokenizer: Option<Arc<Tokenizer>>,
    /// The tokenizer's table for grammars, after the first grammar was used.
    token_table: Arc<Mutex<Option<Arc<TokenTable>>>>,
    generation: GenerationConfig,
    /// The folder's settings for transcription; `None` for a text model, and for random weights.
    speech: Option<SpeechConfig>,
    /// The folder's settings for embeddings, or why they cannot be used.
    embedding: Result<EmbeddingConfig>,
    chat_templates: ChatTemplates,
    /// The caches that the folder asks for.
    plan: Plan,
    /// Fingerprint of the weights; `None` for random weights.
    fingerprint: Option<String>,
    parameters: u64,
    load_time: Duration,
    /// Whether steps may be captured and replayed.
    captures: bool,
    /// Whether the user was warned about settings of the folder that are not applied.
    told: Arc<AtomicBool>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("name", &self.loaded.name)
            .field("sizes", &self.loaded.sizes)
            .finish_non_exhaustive()
    }
}

impl Loaded {
    /// Changes the weights by an adapter. `merges`: dense weights are replaced, one matrix after the other.
    fn adapt(&mut self, mut adapter: Adapter, merges: bool) -> Result<()> {
        // The matrices of modules that are stacked are, too, with zeros: at most four modules are.
        let bytes = adapter.parameters().saturating_mul(4 * self.dtype.size() as u64);
        let (_, claim) = self.stages.first();
        let mut claim = claim.budget().claim("the adapter", bytes)?;
        let before = self.causal.weight_bytes().held;
        match Arc::get_mut(&mut self.causal) {
            Some(causal) if merges => causal.adapt(&mut adapter, true)?,
            _ => {
                let mut causal = self.causal.another()?;
                causal.adapt(&mut adapter, merges)?;
                self.causal = causal.into();
            }
        }
        adapter.finish()?;
        claim.resize(self.causal.weight_bytes().held.saturating_sub(before) as u64)?;
        self.parameters += adapter.parameters();
        self.adapters.push(Arc::new(claim));
        if let Some(fingerprint) = &mut self.fingerprint {
            let both = format!("{fingerprint}{}", adapter.fingerprint());
            *fingerprint = Sha256::digest(both).iter().map(|byte| format!("{byte:02x}")).collect();
        }
        Ok(())
    }
}

impl Model {
    /// Loads a Hugging Face folder onto the best device: a discrete GPU if there is one, else an integrated
    /// one, else the CPU. For other choices, see [`builder`](Self::builder).
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
    /// The errors of [`ModelBuilder::load`].
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        Self::builder(folder).load()
    }

    /// Loads a model from memory onto the best device: the files of a Hugging Face folder by their names, or
    /// a GGUF file or all its parts. [`ModelBuilder::from_bytes`] has other choices.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// # let fetch = |name: &str| std::fs::read(std::path::Path::new(folder).join(name));
    /// use kiln::Model;
    ///
    /// let names = ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"];
    /// let mut files = Vec::new();
    /// for name in names {
    ///     files.push((name, fetch(name)?));
    /// }
    /// let model = Model::from_bytes(files)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`ModelBuilder::load`].
    pub fn from_bytes<N: Into<String>, B: AsRef<[u8]> + Send + Sync + 'static>(
        files: impl IntoIterator<Item = (N, B)>,
    ) -> Result<Self> {
        ModelBuilder::from_bytes(files).load()
    }

    /// Creates a builder that loads a Hugging Face folder, with options for device, number type, memory and
    /// progress.
    pub fn builder<'a>(folder: impl AsRef<Path>) -> ModelBuilder<'a> {
        ModelBuilder::folder(folder.as_ref())
    }

    /// Creates a request to continue `prompt`: text, tokens of one row, or tokens of several rows.
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

    /// Returns the model with a LoRA adapter, a folder as peft saves it. Both models share their weights, so
    /// several adapters of one model take little memory, and each request is made with the model that it
    /// needs. The changes of the adapter are multiplied by `scale`, 1 for the adapter as it was trained.
    ///
    /// ```no_run
    /// let model = kiln::Model::load("path/to/model")?;
    /// let formal = model.with_adapter("path/to/formal", 1.0)?;
    /// println!("{} / {}", model.generate("Hi,").text()?, formal.generate("Hi,").text()?);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] for a file that is missing or damaged, an adapter of another model, and kinds of
    /// adapters that are not computed; [`Error::OutOfMemory`].
    pub fn with_adapter(&self, folder: impl AsRef<Path>, scale: f32) -> Result<Self> {
        let source = FolderSource::new(folder.as_ref());
        let mut loaded = (*self.loaded).clone();
        let adapter = Adapter::read(&source, &loaded.tensor_names, scale)?;
        loaded.adapt(adapter, false)?;
        Ok(Self { loaded: Arc::new(loaded) })
    }

    /// Creates a request for the embeddings of texts, or of lists of tokens: a vector for each. Pooling,
    /// normalization and prompts are those of the folder (`modules.json` of sentence-transformers).
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, Pooling};
    ///
    /// let model = Model::load(folder)?;
    /// // The demo model was not made for embeddings, so its folder names no pooling.
    /// let request = model.embed(["ROMEO:", "JULIET:"]).pooling(Pooling::Mean).normalize(true);
    /// let vectors = request.vectors()?;
    /// assert_eq!((vectors.len(), vectors[0].len()), (2, model.sizes().hidden));
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn embed<I: Into<EmbeddingInput>>(
        &self,
        inputs: impl IntoIterator<Item = I>,
    ) -> EmbeddingRequest<'static> {
        EmbeddingRequest::new(self.clone(), inputs.into_iter().map(Into::into).collect())
    }

    /// Creates an engine for many requests at once, which share passes: up to `rows` rows in each (continuous
    /// batching). Each request gives the tokens that it gives alone, if `rows` is at most
    /// [`exact_rows`](Self::exact_rows), which is at least [`EXACT_ROWS`].
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
    ///             Event::Output(request, piece) => println!("{request:?}: {}", piece.text),
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

    /// The most rows of an [`engine`](Self::engine) whose requests give the tokens that they give alone: 127
    /// or any number on the CPU, 64 where tensor cores of CUDA multiply all weights of a model that has no
    /// experts, and otherwise [`EXACT_ROWS`](crate::EXACT_ROWS).
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// let model = kiln::Model::load(folder)?;
    /// assert!(model.exact_rows() >= kiln::EXACT_ROWS);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn exact_rows(&self) -> usize {
        self.causal().exact_rows()
    }

    /// The forward pass of the model, for custom loops.
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

    /// Creates an empty cache for one sequence, or for one batch of sequences. Its memory counts against the
    /// model's [`budget`](Self::budget).
    ///
    /// # Errors
    /// [`Error::Setting`] for a plan that does not suit the model.
    pub fn cache(&self, plan: &Plan) -> Result<ModelCache> {
        plan.build(&self.loaded.causal.needs(), self.placement())?.within(&self.budgets())
    }

    /// The plan that the folder asks for (`use_cache`, `cache_implementation`), else `dynamic`.
    pub fn plan(&self) -> &Plan {
        &self.loaded.plan
    }

    /// The name of the model's folder or GGUF file; `memory` for a folder in memory, `random` for random
    /// weights.
    pub fn name(&self) -> &str {
        &self.loaded.name
    }

    /// Blocks, heads, widths, vocabulary and positions of the model.
    pub fn sizes(&self) -> &Sizes {
        &self.loaded.sizes
    }

    /// The device of tokens and of the first block as a Burn type, for tensors in custom loops.
    /// [`opened`](Self::opened) returns its properties.
    pub fn device(&self) -> &Device {
        &self.opened().device
    }

    /// The device of the first block and its properties.
    pub fn opened(&self) -> &Opened {
        let (device, _) = self.loaded.stages.first();
        device
    }

    /// The number type of weights, activations and caches.
    pub fn dtype(&self) -> DType {
        self.loaded.dtype
    }

    /// The arithmetic of products with packed weights on the device of each stage
    /// ([`ModelBuilder::arithmetic`]).
    pub fn arithmetic(&self) -> &Stages<Arithmetic> {
        &self.loaded.arithmetic
    }

    /// The kernels of the device that computes the logits, with a record of those that ran.
    pub fn kernels(&self) -> &Kernels {
        self.loaded.placement.last()
    }

    /// The device of each stage, and its properties.
    pub fn stages(&self) -> Stages<Opened> {
        self.loaded.stages.map(|(device, _)| device.clone())
    }

    /// The device that computes experts, if it is not that of their block ([`ModelBuilder::experts_on`]).
    pub fn experts_device(&self) -> Option<&Opened> {
        self.loaded.experts_on.as_ref()
    }

    /// The names of the devices of all stages and of experts, such as `cuda:0,cpu`.
    pub fn device_names(&self) -> String {
        let devices = self.loaded.stages.iter().map(|(device, _)| device).chain(self.experts_device());
        devices.map(|device| device.info.name.to_string()).collect::<Vec<_>>().join(",")
    }

    /// The kernels of each stage: which blocks are on which device.
    pub fn placement(&self) -> &Placement {
        &self.loaded.placement
    }

    /// The memory budget of the first block's device for weights, caches and activations.
    pub fn budget(&self) -> &Budget {
        let (_, claim) = self.loaded.stages.first();
        claim.budget()
    }

    /// The memory budget of each stage. Stages on one device share a budget.
    pub fn budgets(&self) -> Stages<Budget> {
        self.loaded.stages.map(|(_, claim)| claim.budget().clone())
    }

    /// Number of elements in all weights.
    pub fn parameters(&self) -> u64 {
        self.loaded.parameters
    }

    /// Bytes of all weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().held as u64
    }

    /// Bytes of the weights in host memory; see [`ModelBuilder::offload_experts`] and
    /// [`ModelBuilder::experts_on`].
    pub fn host_weight_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().in_host_memory as u64
    }

    /// Copies of experts from host memory so far; `None` if experts are computed where they are.
    pub fn expert_traffic(&self) -> Option<ExpertTraffic> {
        self.loaded.causal.expert_traffic()
    }

    /// Bytes of the weights that a step multiplies by: all but the embedding, unless it is also the head.
    pub fn multiplied_bytes(&self) -> u64 {
        self.loaded.causal.weight_bytes().multiplied as u64
    }

    /// The duration of loading.
    pub fn load_time(&self) -> Duration {
        self.loaded.load_time
    }

    /// The folder's `generation_config.json`: defaults for the settings of a request.
    pub fn generation_config(&self) -> &GenerationConfig {
        &self.loaded.generation
    }

    /// The folder's settings for embeddings.
    ///
    /// # Errors
    /// [`Error::Setting`] if the folder asks for something that is not supported.
    pub fn embedding_config(&self) -> Result<&EmbeddingConfig> {
        self.loaded.embedding.as_ref().map_err(|error| Error::Setting {
            name: "model",
            why: format!("has settings for embeddings that cannot be used: {error}"),
        })
    }

    pub(crate) fn speech(&self) -> Option<&SpeechConfig> {
        self.loaded.speech.as_ref()
    }

    /// The Jinja templates that render a conversation as a prompt, if the folder has any.
    pub fn chat_templates(&self) -> &ChatTemplates {
        &self.loaded.chat_templates
    }

    /// A fingerprint that identifies the weights. Saved caches contain it.
    ///
    /// # Errors
    /// [`Error::Setting`] for weights that were not loaded from a folder.
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

    /// Tokenizes `text`, with the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the folder has no tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, true)
    }

    /// Tokenizes `text` as a continuation of another text, without special tokens.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the folder has no tokenizer.
    pub fn encode_more(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer()?.encode(text, false)
    }

    /// Rejects a text that has more tokens than the model has positions, before it is tokenized: the tokens
    /// of a long text take a hundred times its memory.
    ///
    /// # Errors
    /// [`Error::TooLong`] for a text that is too long for `cache`, however few tokens it has.
    pub fn check_length(&self, text: &str, cache: &ModelCache) -> Result<()> {
        let (fewest, positions) = (self.tokenizer()?.fewest_tokens(text.len()), self.loaded.sizes.positions);
        if cache.is_endless() || fewest <= positions {
            return Ok(());
        }
        let why = format!(
            "at least {fewest} tokens and the model {positions} positions; shorten it, or use a sink cache"
        );
        Err(Error::TooLong { why })
    }

    /// Decodes `tokens`, without special tokens.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the folder has no tokenizer, or the tokenizer cannot decode.
    pub fn decode(&self, tokens: &[TokenId]) -> Result<String> {
        self.tokenizer()?.decode(tokens, true)
    }

    /// The bytes of a token in the middle of a text, which need not be whole characters, or the name of a
    /// special token; `None` if there is no such token, or it has no bytes of its own.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the folder has no tokenizer.
    pub fn token_bytes(&self, token: TokenId) -> Result<Option<Vec<u8>>> {
        Ok(self.tokenizer()?.token_bytes(token))
    }

    /// The special token of this name, such as `<|im_end|>`, which no text contains.
    pub fn special_token(&self, name: &str) -> Option<TokenId> {
        self.tokenizer().ok()?.special_token(name)
    }

    /// Creates a stream that decodes tokens piece by piece, for custom loops.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the folder has no tokenizer.
    pub fn text_stream(&self) -> Result<TextStream> {
        Ok(TextStream::new(self.tokenizer()?.clone()))
    }
}
