//! The contents of a Hugging Face folder, or of a GGUF file, apart from weights.

use std::{collections::BTreeMap, path::Path};

use kiln_cache::{Plan, STRATEGIES};
use kiln_core::{Error, Result, error::plain, need::LayerNeed};
use kiln_generate::{GenerationConfig, Tokenizer, TokenizerConfig};
use kiln_models::{Sizes, checkpoint::Checkpoint, configure};
use serde_json::{Map, Value};

/// Facts about a checkpoint, read from its config and headers.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::expert::{Ask, Inspection};
///
/// let inspection = Inspection::of(folder)?;
/// for cache in inspection.caches(None, &Ask::new(2048).memory(8 << 30)) {
///     println!("{}: {} bytes, {:?}", cache.cache, cache.bytes, cache.longest);
/// }
/// # Ok::<(), kiln::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// `model_type` in `config.json`
    pub model_type: String,
    /// Blocks, heads, widths, vocabulary and positions
    pub sizes: Sizes,
    /// Number of elements in all weights
    pub parameters: u64,
    /// Elements and bytes by the name of the type in which they are stored
    pub by_dtype: BTreeMap<String, (u64, u64)>,
    /// Number of files that hold weights
    pub shards: usize,
    needs: Vec<LayerNeed>,
}

impl Inspection {
    /// Reads `config.json` and the headers of the weights in `folder`, or those of a GGUF file. No weights
    /// are loaded.
    ///
    /// # Errors
    /// [`Error::File`] for a missing or damaged file; [`Error::Unknown`] for an unknown architecture.
    ///
    /// [`Error::File`]: kiln_core::Error::File
    /// [`Error::Unknown`]: kiln_core::Error::Unknown
    pub fn of(folder: impl AsRef<Path>) -> Result<Self> {
        Self::of_checkpoint(&Checkpoint::open(folder.as_ref())?)
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.needs.len()
    }

    pub(crate) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let configured = configure(&checkpoint.config)?;
        let by_dtype = checkpoint.by_dtype();
        Ok(Self {
            model_type: checkpoint.config.model_type()?,
            sizes: configured.sizes(),
            parameters: by_dtype.values().map(|(elements, _)| elements).sum(),
            by_dtype,
            shards: checkpoint.shards(),
            needs: configured.needs(),
        })
    }

    /// Computes the size of `plan`, or of each cache strategy that supports the model; and, if the memory is
    /// known, the longest sequence that fits.
    pub fn caches(&self, plan: Option<&Plan>, ask: &Ask) -> Vec<CacheSize> {
        let plans: Vec<Plan> = match plan {
            Some(plan) => vec![plan.clone()],
            None => STRATEGIES.iter().filter_map(|strategy| Plan::named(strategy.name).ok()).collect(),
        };
        let possible = plans.iter().filter(|plan| plan.check(&self.needs).is_ok());
        let mut sizes: Vec<CacheSize> = possible.map(|plan| self.cache_size(plan, ask)).collect();
        // Without attention, most strategies are the same.
        sizes.dedup();
        sizes
    }

    fn cache_size(&self, plan: &Plan, ask: &Ask) -> CacheSize {
        let &Ask { tokens, rows, element, memory } = ask;
        let whole = |tokens| plan.bytes(&self.needs, tokens, element).saturating_mul(rows);
        let offloaded = |tokens| plan.bytes_offloaded(&self.needs, tokens, element).saturating_mul(rows);
        let left = memory.map(|memory| memory.saturating_sub(self.beside_the_cache(rows, element)));
        CacheSize {
            cache: plan.describe(&self.needs),
            a_token: whole(tokens) / tokens.saturating_mul(rows).max(1),
            bytes: whole(tokens),
            offloaded_bytes: offloaded(tokens),
            longest: left.map(|left| longest(left, &whole)),
            longest_offloaded: left.map(|left| longest(left, &offloaded)),
        }
    }

    /// Bytes of the weights and of a step's activations, in elements of `element` bytes.
    pub fn beside_the_cache(&self, rows: usize, element: usize) -> u64 {
        let weights = self.parameters.saturating_mul(element as u64);
        weights.saturating_add(self.sizes.working_bytes(rows, SMALLEST_CHUNK, element) as u64)
    }
}

/// Number of prompt tokens that are fed at once if there is little memory.
pub(crate) const SMALLEST_CHUNK: usize = 16;

/// The parameters of [`Inspection::caches`]: the size of a batch, and the memory that it has to fit into.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    tokens: usize,
    rows: usize,
    element: usize,
    memory: Option<u64>,
}

impl Ask {
    /// Creates a query for one row of `tokens` tokens in float32.
    pub fn new(tokens: usize) -> Self {
        Self { tokens, rows: 1, element: 4, memory: None }
    }

    /// Sets the number of rows in the batch.
    pub fn rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// Sets the size in bytes of an element of weights and caches: 4 for float32, 2 for float16.
    pub fn element(self, bytes: usize) -> Self {
        Self { element: bytes, ..self }
    }

    /// Sets the memory of the device in bytes. Without it, the number of tokens that fit is unknown.
    pub fn memory(self, bytes: impl Into<Option<u64>>) -> Self {
        Self { memory: bytes.into(), ..self }
    }
}

/// The size of a cache on a device in bytes, and the number of tokens per row that fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheSize {
    /// The strategy and its settings, in the syntax of [`Plan::named`].
    pub cache: String,
    /// Mean bytes per token and row.
    pub a_token: usize,
    /// Bytes of all rows on the device.
    pub bytes: usize,
    /// Bytes of all rows on the device, with the layers in host memory.
    pub offloaded_bytes: usize,
    /// The longest rows that fit together with the weights; `None` if the memory is unknown.
    pub longest: Option<Longest>,
    /// The longest rows that fit with the layers in host memory.
    pub longest_offloaded: Option<Longest>,
}

/// The longest sequence that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Longest {
    /// The maximum number of tokens per row; 0 if none fits.
    Tokens(usize),
    /// Any length: from some length on, the cache does not grow.
    Any,
}

/// The maximum number of tokens that take at most `left` bytes. More tokens never take fewer bytes.
fn longest(left: u64, bytes: &dyn Fn(usize) -> usize) -> Longest {
    /// More tokens than any sequence has.
    const MOST: usize = 1 << if usize::BITS > 40 { 40 } else { 30 };

    let fits = |tokens| bytes(tokens) as u64 <= left;
    if fits(MOST) {
        return Longest::Any;
    }
    let (mut fit, mut too_many) = (0, MOST);
    while fit + 1 < too_many {
        let middle = fit + (too_many - fit) / 2;
        if fits(middle) { fit = middle } else { too_many = middle }
    }
    Longest::Tokens(fit)
}

/// The tokenizer of a folder or a GGUF file, read without its weights; `None` if it has none.
///
/// # Errors
/// [`Error::File`](kiln_core::Error::File) for a missing or damaged file.
pub fn tokenizer_of(model: impl AsRef<Path>) -> Result<Option<Tokenizer>> {
    tokenizer(&Checkpoint::open(model.as_ref())?)
}

/// The generation settings of a folder or a GGUF file.
///
/// # Errors
/// [`Error::File`](kiln_core::Error::File) for a missing or damaged file.
pub fn generation_config_of(model: impl AsRef<Path>) -> Result<GenerationConfig> {
    generation_config(&Checkpoint::open(model.as_ref())?)
}

pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// The tokenizer of a checkpoint, if it has one.
pub(crate) fn tokenizer(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>> {
    let config = tokenizer_config(checkpoint)?;
    let Some(json) = tokenizer_json(checkpoint, &config)? else { return Ok(None) };
    let tokenizer = Tokenizer::from_json(json).map_err(|why| wrong(checkpoint, TOKENIZER, why))?;
    Ok(Some(tokenizer.split_special_tokens(config.splits_special_tokens())))
}

/// The contents of `tokenizer.json`, if there is one, with the tokens of `config`, which a folder has in a
/// separate file.
pub(crate) fn tokenizer_json(checkpoint: &Checkpoint, config: &TokenizerConfig) -> Result<Option<Value>> {
    let mut tokenizer = match json(checkpoint, TOKENIZER)? {
        Value::Null => return Ok(None),
        tokenizer => tokenizer,
    };
    // A GGUF file has all tokens in one list.
    if !checkpoint.is_gguf() {
        config.complete(&mut tokenizer);
    }
    Ok(Some(tokenizer))
}

/// The settings of a checkpoint's tokenizer that are not in `tokenizer.json`.
pub(crate) fn tokenizer_config(checkpoint: &Checkpoint) -> Result<TokenizerConfig> {
    let json = |file: &str| json(checkpoint, file);
    let (config, special) = (json("tokenizer_config.json")?, json("special_tokens_map.json")?);
    TokenizerConfig::new(&config, &special, &json("added_tokens.json")?)
        .map_err(|(file, why)| wrong(checkpoint, file, why))
}

/// The JSON of a file; null if there is no such file.
pub(crate) fn json(checkpoint: &Checkpoint, file: &str) -> Result<Value> {
    let wrong = |e| wrong(checkpoint, file, format!("is not valid JSON: {e}"));
    checkpoint.text(file)?.map_or(Ok(Value::Null), |text| serde_json::from_str(&text).map_err(wrong))
}

fn wrong(checkpoint: &Checkpoint, file: &str, why: String) -> Error {
    Error::File { path: checkpoint.path_of(file), why }
}

/// Reads `generation_config.json`, and nothing else if it exists, as in Transformers. Models older than this
/// file have its settings in `config.json`.
pub(crate) fn generation_config(checkpoint: &Checkpoint) -> Result<GenerationConfig> {
    const FILE: &str = "generation_config.json";
    match checkpoint.text(FILE)? {
        Some(text) => GenerationConfig::from_text(&checkpoint.path_of(FILE), &text),
        None => {
            GenerationConfig::from_model_config(&checkpoint.path_of("config.json"), checkpoint.config.json())
        }
    }
}

/// Translates transformers' `cache_implementation` and `cache_config` into the syntax of [`Plan::named`]. As
/// there, the default backend for packing is quanto.
pub fn cache_text(implementation: &str, config: Option<&Value>) -> String {
    let empty = Map::new();
    let config = config.and_then(Value::as_object).unwrap_or(&empty);
    if implementation != "quantized" {
        return implementation.to_owned();
    }
    // Kiln does not control where torch computes.
    let settings = config.iter().filter(|(key, _)| !matches!(key.as_str(), "device" | "compute_dtype"));
    let text = |(key, value): (&String, &Value)| match value.as_str() {
        Some(text) => format!("{key}={text}"),
        None => format!("{key}={value}"),
    };
    let backend = (!config.contains_key("backend")).then(|| "backend=quanto".to_owned());
    let settings: Vec<String> = settings.map(text).chain(backend).collect();
    format!("{implementation}:{}", settings.join(","))
}

/// The caches that a folder asks for.
///
/// An unknown cache is ignored with a warning: it is a preference of the folder's author, and the model works
/// with every cache.
pub(crate) fn own_plan(config: &GenerationConfig) -> Plan {
    if config.use_cache == Some(false) {
        return Plan::none();
    }
    let asked = config.cache_implementation.as_deref();
    match asked.map(|name| Plan::named(&cache_text(name, config.cache_config.as_ref()))) {
        Some(Ok(plan)) => plan,
        Some(Err(error)) => {
            let error = plain(&error.to_string());
            tracing::warn!(%error, "the folder's cache_implementation is not used");
            Plan::dynamic()
        }
        None => Plan::dynamic(),
    }
}
