//! What a Hugging Face folder holds beside its weights.

use std::{collections::BTreeMap, path::Path};

use kiln_cache::{Plan, STRATEGIES};
use kiln_core::{Error, Result, need::LayerNeed};
use kiln_generate::GenerationConfig;
use kiln_models::{Sizes, checkpoint::Checkpoint, configure};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

/// Facts about a checkpoint, read from its config and headers.
#[derive(Clone, Debug)]
pub struct Inspection {
    pub model_type: String,
    pub sizes: Sizes,
    /// Elements of all weights
    pub parameters: u64,
    /// Elements and bytes by the name of the type they are stored as
    pub by_dtype: BTreeMap<String, (u64, u64)>,
    /// Files that hold weights
    pub shards: usize,
    needs: Vec<LayerNeed>,
}

impl Inspection {
    /// # Errors
    /// What [`Checkpoint::open`] and [`configure`] say.
    pub fn of(folder: &Path) -> Result<Self> {
        let checkpoint = Checkpoint::open(folder)?;
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

    /// Bytes a row of `tokens` tokens takes with each cache strategy that can serve the model, held in elements of
    /// `element` bytes.
    pub fn cache_bytes(&self, tokens: usize, element: usize) -> Vec<(&'static str, usize)> {
        let bytes = |plan: &Plan| {
            let block = |need: &LayerNeed| match need {
                LayerNeed::Attention(need) | LayerNeed::EncoderDecoder(need) => {
                    plan.spec(need).factory.bytes(need, tokens, element)
                }
                LayerNeed::Recurrent(need) => need.channels * (need.conv_width + need.state_dim) * element,
                LayerNeed::Nothing => 0,
            };
            self.needs.iter().map(block).fold(0, usize::saturating_add)
        };
        let plans = STRATEGIES.iter().filter_map(|strategy| {
            let plan = Plan::named(strategy.name()).ok()?;
            plan.check(&self.needs).ok()?;
            Some((strategy.name(), bytes(&plan)))
        });
        plans.collect()
    }
}

/// `generation_config.json`, completed by the ids that only `config.json` has.
pub(crate) fn generation_config(folder: &Path, checkpoint: &Checkpoint) -> Result<GenerationConfig> {
    let path = folder.join("generation_config.json");
    let from_file = match path.exists() {
        true => GenerationConfig::from_file(&path)?,
        false => GenerationConfig::default(),
    };
    let ids = |key: &str| checkpoint.config.get(key).cloned().map(|value| (key.to_owned(), value));
    let ids = ["eos_token_id", "pad_token_id", "bos_token_id"].into_iter().filter_map(ids).collect();
    Ok(from_file.merged_over(&GenerationConfig::from_arguments(&ids)?))
}

pub(crate) fn tokenizer(folder: &Path) -> Result<Option<Tokenizer>> {
    let path = folder.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    let wrong = |why: String| Error::File { path: path.clone(), why };
    let mut tokenizer = Tokenizer::from_file(&path).map_err(|e| wrong(e.to_string()))?;
    // Left over from training: a prompt is neither cut nor filled up, as in transformers.
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
    Ok(Some(tokenizer))
}

/// What transformers' `cache_implementation` and `cache_config` ask for, as the command line writes it. Numbers are
/// packed by quanto where no backend is named, as there.
pub fn cache_text(implementation: &str, config: Option<&Value>) -> String {
    let empty = Map::new();
    let config = config.and_then(Value::as_object).unwrap_or(&empty);
    if implementation != "quantized" {
        return implementation.to_owned();
    }
    // Where torch computes is not ours to say.
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
/// One that is not known here is passed over with a warning: it says how the folder's author liked it best, and every
/// cache gives the model what it needs.
pub(crate) fn own_plan(config: &GenerationConfig) -> Result<Plan> {
    if config.use_cache == Some(false) {
        return Plan::named("none");
    }
    let asked = config.cache_implementation.as_deref();
    match asked.map(|name| Plan::named(&cache_text(name, config.cache_config.as_ref()))) {
        Some(Ok(plan)) => Ok(plan),
        Some(Err(error)) => {
            tracing::warn!(%error, "the folder's cache_implementation is not used");
            Plan::named("dynamic")
        }
        None => Plan::named("dynamic"),
    }
}
