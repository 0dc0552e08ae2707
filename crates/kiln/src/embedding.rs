//! Embeddings: texts as vectors whose directions are close if the texts mean the same (Reimers and Gurevych,
//! 2019, <https://arxiv.org/abs/1908.10084>).

mod modules;
mod pooling;

use burn::tensor::Tensor;
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{Logits, TokenId},
    model_cache::ModelCache,
    read_back,
};

pub use self::{modules::EmbeddingConfig, pooling::Pooling};
use self::{
    modules::Step,
    pooling::{Pooled, Span},
};
use crate::Model;

/// A text, or its tokens, as input of [`Model::embed`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmbeddingInput {
    Text(String),
    /// Tokens as they are: neither a prompt nor special tokens are added.
    Tokens(Vec<TokenId>),
}

impl From<&str> for EmbeddingInput {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for EmbeddingInput {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<TokenId>> for EmbeddingInput {
    fn from(tokens: Vec<TokenId>) -> Self {
        Self::Tokens(tokens)
    }
}

/// Embeddings, in the order of their inputs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Embeddings {
    /// One vector for each input, all of one length.
    pub vectors: Vec<Vec<f32>>,
    /// Number of tokens of each input.
    pub tokens: Vec<usize>,
}

/// A request for embeddings, made by [`Model::embed`] and run by [`vectors`](Self::vectors).
#[must_use = "nothing is computed before `vectors` or `run`"]
pub struct EmbeddingRequest<'a> {
    model: Model,
    inputs: Vec<EmbeddingInput>,
    prompt: Option<String>,
    prompt_name: Option<String>,
    pooling: Option<Pooling>,
    normalize: Option<bool>,
    dimensions: Option<usize>,
    truncate: bool,
    on_progress: Option<Box<dyn FnMut(usize) + 'a>>,
}

impl std::fmt::Debug for EmbeddingRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddingRequest").field("inputs", &self.inputs.len()).finish_non_exhaustive()
    }
}

/// The tokens of an input.
struct Text {
    tokens: Vec<TokenId>,
    /// Number of tokens of the prompt, if they are left out of the pooling.
    skipped: usize,
}

impl<'a> EmbeddingRequest<'a> {
    pub(crate) fn new(model: Model, inputs: Vec<EmbeddingInput>) -> Self {
        Self {
            model,
            inputs,
            prompt: None,
            prompt_name: None,
            pooling: None,
            normalize: None,
            dimensions: None,
            truncate: false,
            on_progress: None,
        }
    }

    /// Puts this text before each text. Default: the prompt that the folder names as its default, if any.
    pub fn prompt(self, prompt: impl Into<String>) -> Self {
        Self { prompt: Some(prompt.into()), ..self }
    }

    /// Puts the prompt with this name in the folder before each text, such as `query` or `document`.
    pub fn prompt_name(self, name: impl Into<String>) -> Self {
        Self { prompt_name: Some(name.into()), ..self }
    }

    /// Sets how the vectors of tokens become one. Default: as the folder says.
    pub fn pooling(self, pooling: impl Into<Option<Pooling>>) -> Self {
        Self { pooling: pooling.into(), ..self }
    }

    /// Scales vectors to length 1, or leaves their length. Default: as the folder says.
    pub fn normalize(self, normalize: impl Into<Option<bool>>) -> Self {
        Self { normalize: normalize.into(), ..self }
    }

    /// Keeps only this many first numbers of each vector, for models that were trained for it (Kusupati et
    /// al., 2022, <https://arxiv.org/abs/2205.13147>). Normalized vectors are normalized again.
    #[doc(alias = "truncate_dim")]
    pub fn dimensions(self, dimensions: impl Into<Option<usize>>) -> Self {
        Self { dimensions: dimensions.into(), ..self }
    }

    /// Cuts the end of texts that are longer than the model takes. Default: they are an error.
    pub fn truncate(self, truncate: bool) -> Self {
        Self { truncate, ..self }
    }

    /// Sets a callback for the number of inputs that are done.
    pub fn on_progress<'b>(self, on_progress: impl FnMut(usize) + 'b) -> EmbeddingRequest<'b> {
        let Self { model, inputs, prompt, prompt_name, pooling, normalize, dimensions, truncate, .. } = self;
        let on_progress: Option<Box<dyn FnMut(usize) + 'b>> = Some(Box::new(on_progress));
        EmbeddingRequest {
            model,
            inputs,
            prompt,
            prompt_name,
            pooling,
            normalize,
            dimensions,
            truncate,
            on_progress,
        }
    }

    /// Computes the vectors.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub fn vectors(self) -> Result<Vec<Vec<f32>>> {
        Ok(self.run()?.vectors)
    }

    /// Computes the vectors, and counts tokens.
    ///
    /// # Errors
    /// The errors of [`run_async`](Self::run_async).
    pub fn run(self) -> Result<Embeddings> {
        read_back::wait(self.run_async())
    }

    /// Computes the vectors, and counts tokens. Awaits the device.
    ///
    /// # Errors
    /// [`Error::Setting`] for a folder that does not name its pooling if none is set, for an unknown prompt,
    /// and for more dimensions than there are; [`Error::Prompt`] for a text that is empty or too long; the
    /// errors of [`CausalModel::forward`](crate::expert::CausalModel::forward).
    pub async fn run_async(mut self) -> Result<Embeddings> {
        let model = self.model.clone();
        let config = model.embedding_config()?;
        let poolings = match self.pooling {
            Some(pooling) => vec![pooling],
            None => config.poolings.clone(),
        };
        if model.causal().features().is_some() {
            let why = "takes sounds, and makes no embeddings of texts".to_owned();
            return Err(Error::Setting { name: "model", why });
        }
        if poolings.is_empty() {
            let why = format!(
                "is not given, and the folder has no modules.json to say it; use one of {}",
                Pooling::NAMES.map(|(name, _)| name).join(", ")
            );
            return Err(Error::Setting { name: "pooling", why });
        }
        let width = config.width(model.sizes().hidden, &poolings)?;
        if let Some(dimensions) = self.dimensions.filter(|n| !(1..=width).contains(n)) {
            let why = format!("are {dimensions}, and the vectors have {width} numbers");
            return Err(Error::Setting { name: "dimensions", why });
        }
        let texts = self.texts(config)?;
        let mut vectors: Vec<Vec<f32>> = vec![Vec::new(); texts.len()];
        let mut order: Vec<usize> = (0..texts.len()).collect();
        // Texts of similar lengths share a pass.
        order.sort_by_key(|&i| std::cmp::Reverse(texts[i].tokens.len()));
        let most = model.largest_chunk(1);
        let mut done = 0;
        let mut rest = &order[..];
        while let Some(&longest) = rest.first() {
            let columns = texts[longest].tokens.len();
            let rows = (most / columns).clamp(1, rest.len());
            let (own, others) = rest.split_at(rows);
            rest = others;
            let own_texts: Vec<&Text> = own.iter().map(|&i| &texts[i]).collect();
            let pooled = match columns > most && !model.causal().is_bidirectional() {
                true => in_chunks(&model, own_texts[0], &poolings, most)?,
                false => at_once(&model, &own_texts, &poolings)?,
            };
            let result = self.finished(config, pooled);
            let len = result.dims()[1];
            let numbers: Vec<f32> = read_back::start(result).finish().await?.iter().collect();
            for (&i, vector) in own.iter().zip(numbers.chunks(len)) {
                vectors[i] = vector.to_vec();
            }
            done += own.len();
            if let Some(on_progress) = &mut self.on_progress {
                on_progress(done);
            }
        }
        Ok(Embeddings { vectors, tokens: texts.iter().map(|text| text.tokens.len()).collect() })
    }

    /// The prompt that is put before each text.
    fn own_prompt<'c>(&'c self, config: &'c EmbeddingConfig) -> Result<Option<&'c str>> {
        match (&self.prompt, &self.prompt_name) {
            (Some(_), Some(_)) => {
                let why = "is given, and the name of one, too; leave one of them out".to_owned();
                Err(Error::Setting { name: "prompt", why })
            }
            (Some(prompt), None) => Ok(Some(prompt)),
            (None, Some(name)) => config.prompt(name).map(Some),
            (None, None) => Ok(config.default_prompt()),
        }
    }

    /// Tokenizes all texts.
    fn texts(&self, config: &EmbeddingConfig) -> Result<Vec<Text>> {
        let prompt = self.own_prompt(config)?.unwrap_or_default();
        let sizes = self.model.sizes();
        let most = config.max_tokens.unwrap_or(usize::MAX).min(sizes.positions);
        let skipped = match config.include_prompt || prompt.is_empty() {
            true => 0,
            false => self.prompt_len(config, prompt)?,
        };
        let text = |(i, input): (usize, &EmbeddingInput)| {
            let wrong = |why: String| Error::Prompt { why: format!("input {} {why}", i + 1) };
            let (tokens, skipped) = match input {
                EmbeddingInput::Text(text) => {
                    // As sentence-transformers does.
                    let text = config.cased(format!("{prompt}{text}").trim());
                    (self.encoded(&text, most, config.cuts_beginning)?, skipped)
                }
                EmbeddingInput::Tokens(tokens) => (tokens.clone(), 0),
            };
            if let Some(token) = tokens.iter().find(|token| **token as usize >= sizes.vocab) {
                return Err(wrong(format!("has token {token}, and the vocabulary {} tokens", sizes.vocab)));
            }
            if tokens.len() > most {
                let why = format!(
                    "has {} tokens, and the model takes {most}; shorten it, or set `truncate`",
                    tokens.len()
                );
                return Err(wrong(why));
            }
            if tokens.len() <= skipped {
                return Err(wrong("has no tokens".to_owned()));
            }
            Ok(Text { tokens, skipped })
        };
        self.inputs.iter().enumerate().map(text).collect()
    }

    /// Tokenizes a text. One that is cut keeps the special tokens around it.
    fn encoded(&self, text: &str, most: usize, cuts_beginning: bool) -> Result<Vec<TokenId>> {
        let tokens = self.model.encode(text)?;
        if !self.truncate || tokens.len() <= most {
            return Ok(tokens);
        }
        let plain = self.model.encode_more(text)?;
        let begin = tokens.windows(plain.len().max(1)).position(|window| window == plain).unwrap_or(0);
        let (before, rest) = tokens.split_at(begin);
        let (own, after) = rest.split_at(plain.len().min(rest.len()));
        let kept = most.saturating_sub(before.len() + after.len()).clamp(1, own.len().max(1));
        let own = match cuts_beginning {
            true => &own[own.len().saturating_sub(kept)..],
            false => &own[..kept.min(own.len())],
        };
        Ok([before, own, after].concat())
    }

    /// Number of tokens of the prompt, without the special tokens at its end.
    fn prompt_len(&self, config: &EmbeddingConfig, prompt: &str) -> Result<usize> {
        let prompt = config.cased(prompt.trim());
        let (whole, plain) = (self.model.encode(&prompt)?, self.model.encode_more(&prompt)?);
        let begin = whole.windows(plain.len().max(1)).position(|window| window == plain).unwrap_or(0);
        Ok((begin + plain.len()).min(whole.len()))
    }

    /// Applies the modules after the pooling to `[texts, width]`.
    fn finished(&self, config: &EmbeddingConfig, pooled: Tensor<2>) -> Tensor<2> {
        let (steps, is_normalized) = match config.steps.split_last() {
            Some((Step::Normalize, before)) => (before, true),
            _ => (&config.steps[..], false),
        };
        let mut x = steps.iter().fold(pooled, |x, step| step.apply(x));
        if let Some(dimensions) = self.dimensions {
            x = x.narrow(1, 0, dimensions);
        }
        match self.normalize.unwrap_or(is_normalized) {
            true => Step::Normalize.apply(x),
            false => x,
        }
    }
}

/// Pools texts that are computed in one pass.
fn at_once(model: &Model, texts: &[&Text], poolings: &[Pooling]) -> Result<Tensor<2>> {
    let rows: Vec<Vec<TokenId>> = texts.iter().map(|text| text.tokens.clone()).collect();
    let mut cache = model.cache(&Plan::none())?;
    let hidden = fed(model, &rows, &mut cache)?;
    let columns = hidden.dims()[1];
    let spans: Vec<Span> = texts
        .iter()
        .map(|text| {
            let len = text.tokens.len();
            Span { columns: columns - len..columns, first: 0, skipped: text.skipped, len }
        })
        .collect();
    let mut pooled = Pooled::new(poolings);
    pooled.add(hidden, &spans);
    pooled.finish()
}

/// Pools a long text that is computed in chunks.
fn in_chunks(model: &Model, text: &Text, poolings: &[Pooling], most: usize) -> Result<Tensor<2>> {
    let mut cache = model.cache(&Plan::dynamic())?;
    let mut pooled = Pooled::new(poolings);
    for (i, chunk) in text.tokens.chunks(most).enumerate() {
        let hidden = fed(model, &[chunk.to_vec()], &mut cache)?;
        let (first, len) = (i * most, text.tokens.len());
        pooled.add(hidden, &[Span { columns: 0..chunk.len(), first, skipped: text.skipped, len }]);
    }
    pooled.finish()
}

/// Returns the hidden states of rows, in float32.
fn fed(model: &Model, rows: &[Vec<TokenId>], cache: &mut ModelCache) -> Result<Tensor<3>> {
    let batch = Batch::ragged(rows, 0, model.device())?;
    let hidden = model.causal().forward(&batch, Logits::Hidden, cache)?;
    Ok(hidden.cast(burn::tensor::DType::F32))
}
