//! A model in a worker.

use std::sync::Arc;

use js_sys::{Float32Array, Function};
use kiln::{
    Conversation, DtypeChoice, Error, GeneratedText, GenerationConfig, Grammar, Model, ModelBuilder, Plan,
    Request, StopReason,
    device::DeviceName,
    expert::{RenderOptions, SelfTest, keep_verdicts, kept_verdicts, plain},
};
use kiln_serve::Service;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use wasm_bindgen::prelude::*;

use crate::{
    files::{WebFile, WebSource},
    service, thrown,
};

/// A model on the GPU of the browser.
#[wasm_bindgen]
#[derive(Debug)]
pub struct WebModel {
    model: Model,
    service: Service,
}

/// Options for loading a model.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct LoadOptions {
    /// The name of the model.
    name: Option<String>,
    dtype: Option<String>,
    /// The caches of requests that name none.
    cache: Option<String>,
    /// Most bytes of GPU memory.
    memory: Option<u64>,
    /// Most bytes of copies of the beginnings of prompts, for requests through [`WebModel::fetch`].
    prefix_memory: Option<usize>,
    /// Whether the kernels are compared with their references before use.
    self_test: Option<bool>,
    /// The results of earlier comparisons, as [`verdicts`] told them.
    verdicts: String,
}

impl LoadOptions {
    fn builder(&self, files: Vec<WebFile>) -> kiln::Result<ModelBuilder<'static>> {
        let name = self.name.clone().unwrap_or_else(|| "the model".to_owned());
        let dtype: DtypeChoice = self.dtype.as_deref().unwrap_or("auto").parse()?;
        let plan = self.cache.as_deref().map(Plan::named).transpose()?;
        let when = if self.self_test == Some(false) { SelfTest::Never } else { SelfTest::Once };
        let builder = ModelBuilder::from_source(Arc::new(WebSource::new(name, files)?));
        let builder = builder.device(DeviceName::Auto).dtype(dtype).plan(plan);
        Ok(builder.memory(self.memory).self_test(when))
    }
}

/// Options of a request that are no settings of Transformers.
#[derive(Debug, Default)]
struct Options {
    cache: Option<Plan>,
    grammar: Option<Grammar>,
    compile: Option<bool>,
    config: GenerationConfig,
}

/// The outcome of a request, for JavaScript.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Outcome {
    prompt_tokens: usize,
    generated: usize,
    /// `None`: the caller ended it.
    stop_reason: Option<String>,
    stop_string: Option<String>,
    /// Seconds.
    time_to_first_token: f64,
    decode_time: f64,
    tokens_per_second: Option<f64>,
    cache: String,
    /// Bytes that the cache held at the end.
    cache_bytes: u64,
    /// As a text: numbers of JavaScript have 53 bits.
    seed: Option<String>,
}

#[wasm_bindgen]
impl WebModel {
    /// Loads a model from its files. `on_progress` gets the bytes that were read, and all.
    ///
    /// # Errors
    /// An `Error` that is named after its kind.
    pub async fn load(files: Vec<WebFile>, options: String, on_progress: Function) -> Result<Self, JsValue> {
        let options: LoadOptions = parsed("options", &options)?;
        // Texts of another version are of no use.
        if keep_verdicts(&options.verdicts).is_err() {
            keep_verdicts("").map_err(|e| thrown(&e))?;
        }
        let told = |progress: kiln::LoadProgress| {
            _ = on_progress.call2(
                &JsValue::NULL,
                &(progress.read as f64).into(),
                &(progress.total as f64).into(),
            );
        };
        let loaded = async {
            let model = options.builder(files)?.on_progress(told).load_async().await?;
            Ok(Self { service: service::start(&model, options.prefix_memory)?, model })
        };
        loaded.await.map_err(|e: Error| thrown(&e))
    }

    /// Facts about the model and its device, as JSON.
    pub fn facts(&self) -> String {
        let (model, info) = (&self.model, &self.model.opened().info);
        json!({
            "name": model.name(),
            "dtype": model.dtype().name(),
            "parameters": model.parameters(),
            "weightBytes": model.weight_bytes(),
            "positions": model.sizes().positions,
            "cache": model.plan().to_string(),
            "chats": model.chat_templates().choose(false).is_ok(),
            "adapter": info.adapter,
            "api": info.api.to_string(),
            "loadSeconds": model.load_time().as_secs_f64(),
        })
        .to_string()
    }

    /// Continues a text. `on_piece` gets each piece, and ends the text where it returns false. Returns the
    /// outcome as JSON.
    ///
    /// # Errors
    /// An `Error` that is named after its kind.
    pub async fn generate(
        &self,
        prompt: String,
        options: String,
        on_piece: Function,
    ) -> Result<String, JsValue> {
        let options = Options::read(&options).map_err(|e| thrown(&e))?;
        let plan = options.cache.clone();
        answered(options.applied(self.model.generate(prompt)), self.plan(plan), &on_piece).await
    }

    /// Answers a conversation: `messages`, and what else the template of the model takes.
    ///
    /// # Errors
    /// An `Error` that is named after its kind.
    pub async fn chat(
        &self,
        conversation: String,
        options: String,
        on_piece: Function,
    ) -> Result<String, JsValue> {
        let conversation: Conversation = parsed("conversation", &conversation)?;
        let request = || {
            let options = Options::read(&options)?;
            let template = self.model.chat_templates().choose(conversation.tools.is_some())?;
            let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let plan = options.cache.clone();
            Ok((options.applied(self.model.answer(&template, &conversation, &render)?), plan))
        };
        let (request, plan) = request().map_err(|e| thrown(&e))?;
        answered(request, self.plan(plan), &on_piece).await
    }

    /// The vectors of texts.
    ///
    /// # Errors
    /// An `Error` that is named after its kind.
    pub async fn embed(&self, texts: Vec<String>) -> Result<Vec<Float32Array>, JsValue> {
        let embeddings = self.model.embed(texts).run_async().await.map_err(|e| thrown(&e))?;
        Ok(embeddings.vectors.iter().map(|vector| Float32Array::from(&vector[..])).collect())
    }

    /// The number of tokens of a text.
    ///
    /// # Errors
    /// An `Error` if the model has no tokenizer.
    pub fn count(&self, text: &str) -> Result<usize, JsValue> {
        Ok(self.model.encode(text).map_err(|e| thrown(&e))?.len())
    }
}

/// The memory that a model takes, from its configs and the beginnings of its weight files, as JSON.
///
/// # Errors
/// An `Error` that is named after its kind: the options, the configs, the headers, and too little memory.
#[wasm_bindgen]
pub async fn estimate(files: Vec<WebFile>, options: String) -> Result<String, JsValue> {
    let options: LoadOptions = parsed("options", &options)?;
    let estimate = async { options.builder(files)?.estimate_async().await };
    let estimate = estimate.await.map_err(|e| thrown(&e))?;
    let inspection = &estimate.inspection;
    let cache = estimate.cache(1, inspection.sizes.positions.min(1024));
    let told = json!({
        "architecture": inspection.model_type,
        "parameters": inspection.parameters,
        "positions": inspection.sizes.positions,
        "dtype": estimate.dtype.name(),
        "weightBytes": estimate.weight_bytes,
        "cache": estimate.plan.to_string(),
        "cacheBytesPerToken": cache.map(|cache| cache.a_token),
    });
    Ok(told.to_string())
}

/// The results of the comparisons of kernels, for the next load in this browser.
#[wasm_bindgen]
pub fn verdicts() -> Option<String> {
    kept_verdicts()
}

impl WebModel {
    pub(crate) fn service(&self) -> &Service {
        &self.service
    }

    /// The caches of a request that asked for these.
    fn plan(&self, asked: Option<Plan>) -> Plan {
        asked.unwrap_or_else(|| self.model.plan().clone())
    }
}

impl Options {
    /// Reads the options of a request: Kiln's own, and settings of Transformers by their names.
    fn read(text: &str) -> kiln::Result<Self> {
        let wrong = |name, why: String| Error::Setting { name, why };
        let mut options: Map<String, Value> =
            serde_json::from_str(text).map_err(|e| wrong("options", format!("are no object: {e}")))?;
        let mut read = Self::default();
        if let Some(cache) = options.remove("cache") {
            let name = cache.as_str().ok_or_else(|| wrong("cache", "is no text".to_owned()))?;
            read.cache = Some(Plan::named(name)?);
        }
        if let Some(compile) = options.remove("compile") {
            read.compile =
                Some(compile.as_bool().ok_or_else(|| wrong("compile", "is no boolean".to_owned()))?);
        }
        if let Some(grammar) = options.remove("grammar") {
            read.grammar = Some(read_grammar(&grammar)?);
        }
        if let Some(Value::String(seed)) = options.get("seed") {
            let seed: u64 =
                seed.parse().map_err(|_| wrong("seed", format!("`{seed}` is no number of 64 bits")))?;
            options.insert("seed".to_owned(), seed.into());
        }
        // The settings of Transformers that choose a cache.
        for name in ["use_cache", "cache_implementation", "cache_config"] {
            if options.contains_key(name) {
                return Err(wrong(
                    name,
                    "is not read here; use `cache`, such as `none` or `quantized`".to_owned(),
                ));
            }
        }
        read.config = GenerationConfig::from_arguments(&options)?;
        if let Some(name) = options.keys().find(|name| !GenerationConfig::NAMES.contains(&name.as_str())) {
            let known = GenerationConfig::NAMES.iter().map(|name| (*name).to_owned()).collect();
            return Err(Error::Unknown { what: "setting", name: name.clone(), known });
        }
        Ok(read)
    }

    fn applied(self, request: Request<'static>) -> Request<'static> {
        let request = request.config(self.config).grammar(self.grammar).compile(self.compile);
        match self.cache {
            Some(plan) => request.plan(plan),
            None => request,
        }
    }
}

/// Reads `{"json_schema": ..}`, `{"json_object": true}`, `{"regex": ".."}` or `{"lark": ".."}`.
fn read_grammar(grammar: &Value) -> kiln::Result<Grammar> {
    let kinds = grammar.as_object().filter(|kinds| kinds.len() == 1);
    match kinds.and_then(|kinds| kinds.iter().next()).map(|(kind, value)| (&**kind, value)) {
        Some(("json_schema", schema)) => Grammar::json_schema(&schema.to_string()),
        Some(("json_object", Value::Bool(true))) => Ok(Grammar::json_object()),
        Some(("regex", Value::String(text))) => Grammar::regex(text),
        Some(("lark", Value::String(text))) => Grammar::lark(text),
        _ => {
            let why = "is not one of `json_schema`, `json_object: true`, `regex` and `lark`".to_owned();
            Err(Error::Setting { name: "grammar", why })
        }
    }
}

/// Computes an answer, and tells its pieces.
async fn answered(request: Request<'static>, plan: Plan, on_piece: &Function) -> Result<String, JsValue> {
    let mut text = request.stream().map_err(|e| thrown(&e))?;
    let mut is_ended = false;
    while let Some(piece) = text.next_piece().await {
        let piece = piece.map_err(|e| thrown(&e))?;
        if on_piece.call1(&JsValue::NULL, &piece.into())? == JsValue::FALSE {
            is_ended = true;
            break;
        }
    }
    let outcome = Outcome::of(&text, &plan, is_ended);
    serde_json::to_string(&outcome).map_err(|e| JsError::new(&e.to_string()).into())
}

impl Outcome {
    fn of(text: &GeneratedText<'_>, plan: &Plan, is_ended: bool) -> Self {
        let (stats, cache) = (text.stats(), text.cache());
        let decode_time = stats.decode_time.as_secs_f64();
        Self {
            prompt_tokens: stats.prompt_tokens,
            generated: stats.generated,
            stop_reason: text
                .stop_reason()
                .filter(|_| !is_ended)
                .map(|reason: StopReason| reason.to_string()),
            stop_string: text.stop_string().map(str::to_owned),
            time_to_first_token: stats.time_to_first_token.as_secs_f64(),
            decode_time,
            tokens_per_second: (stats.decoded() > 0).then(|| stats.decoded() as f64 / decode_time),
            cache: plan.to_string(),
            cache_bytes: cache.device_bytes() as u64,
            seed: stats.seed.map(|seed| seed.to_string()),
        }
    }
}

/// Parses JSON that the page gave.
fn parsed<T: for<'a> Deserialize<'a>>(name: &'static str, text: &str) -> Result<T, JsValue> {
    serde_json::from_str(text).map_err(|e| {
        let error = Error::Setting { name, why: plain(&e.to_string()) };
        thrown(&error)
    })
}
