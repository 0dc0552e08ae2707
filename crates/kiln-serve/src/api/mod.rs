//! The endpoints.

mod answer;
mod chat;
mod completions;
mod embeddings;
mod logprobs;
mod page;
mod reader;
mod settings;
mod tools;

use std::{sync::Arc, time::SystemTime};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State, rejection::BytesRejection},
    http::{StatusCode, header},
    response::IntoResponse,
    routing::{get, post},
};
use kiln::{ChatTemplate, Model, Plan, Pooling, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

pub(crate) use self::answer::finish_reason;
use crate::{error::ApiError, worker::Worker};

/// Largest body, in bytes.
const LARGEST_BODY: usize = 16 << 20;

/// Longest path of a field that a message repeats.
const LONGEST_PATH: usize = 200;

/// The state that all handlers share.
pub(crate) struct Shared {
    pub(crate) model: Model,
    /// The name by which requests ask for the model.
    pub(crate) name: String,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) plan: Option<Plan>,
    /// Other kinds of caches that a request may ask for.
    pub(crate) plans: Vec<Plan>,
    /// Number of tokens of a prompt in a pass.
    pub(crate) chunk: usize,
    /// The most choices that are computed at once.
    pub(crate) rows: usize,
    pub(crate) pooling: Option<Pooling>,
    pub(crate) worker: Worker,
    /// When the server started, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) fingerprint: String,
}

type Server = State<Arc<Shared>>;

/// A body, unless it is too long or was not sent whole.
type Body = Result<Bytes, BytesRejection>;

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/", get(page::html))
        .route("/page.css", get(page::css))
        .route("/page.js", get(page::script))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/props", get(props))
        .route("/version", get(async || Json(json!({ "version": env!("CARGO_PKG_VERSION") }))))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/embeddings", post(embeddings::embed))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "there is no such address"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes another method")
        })
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .with_state(shared)
}

async fn health(State(shared): Server) -> (StatusCode, Json<Value>) {
    let (status, word) = match shared.worker.has_failed() {
        true => (StatusCode::SERVICE_UNAVAILABLE, "failed"),
        false => (StatusCode::OK, "ok"),
    };
    (status, Json(json!({ "status": word, "running": shared.worker.running() })))
}

/// The metrics, in the text format of OpenMetrics, which Prometheus asks for.
async fn metrics(State(shared): Server) -> Result<impl IntoResponse, ApiError> {
    const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written");
    let text = shared.worker.metrics.text().map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, KIND)], text))
}

/// The properties of the server.
async fn props(State(shared): Server) -> Json<Value> {
    let (model, worker) = (&shared.model, &shared.worker);
    let [caches, prefixes] = worker.cache_bytes();
    let default = shared.plan.as_ref().unwrap_or(model.plan());
    Json(json!({
        "model": shared.name,
        "version": env!("CARGO_PKG_VERSION"),
        "device": format!("{} ({})", model.opened().info.name, model.opened().info.adapter),
        "dtype": model.dtype().name(),
        "context": model.sizes().positions,
        "cache": default.to_string(),
        "caches": std::iter::once(default).chain(&shared.plans).map(Plan::to_string).collect::<Vec<_>>(),
        "rows": shared.rows,
        "prefill_chunk": shared.chunk,
        "running": worker.running().saturating_sub(worker.waiting()),
        "waiting": worker.waiting(),
        "memory": { "weights": model.weight_bytes(), "caches": caches, "prefixes": prefixes },
        "system_fingerprint": shared.fingerprint,
    }))
}

async fn models(State(shared): Server) -> Json<Value> {
    Json(json!({ "object": "list", "data": [shared.model_object()] }))
}

async fn model(State(shared): Server, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    shared.check_name(&id)?;
    Ok(Json(shared.model_object()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    content: String,
    #[serde(default)]
    add_special: bool,
}

/// Tokenizes a text, as llama.cpp's server does.
async fn tokenize(State(shared): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let Text { content, add_special } = parsed(body)?;
    let encode = move || match add_special {
        true => shared.model.encode(&content),
        false => shared.model.encode_more(&content),
    };
    // A long text would keep a thread of HTTP from all others.
    let tokens = tokio::task::spawn_blocking(encode).await;
    let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the tokenizer failed on this text");
    Ok(Json(json!({ "tokens": tokens.map_err(failed)?? })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokens {
    tokens: Vec<TokenId>,
}

async fn detokenize(State(shared): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let Tokens { tokens } = parsed(body)?;
    Ok(Json(json!({ "content": shared.model.decode(&tokens)? })))
}

/// Parses a body, and names the place of a fault.
fn parsed<T: for<'de> Deserialize<'de>>(body: Body) -> Result<T, ApiError> {
    let body =
        body.map_err(|e| ApiError::new(e.status(), format!("the body cannot be read: {}", e.body_text())))?;
    let mut json = serde_json::Deserializer::from_slice(&body);
    let value = located(serde_path_to_error::deserialize(&mut json))?;
    json.end().map_err(|e| ApiError::bad(format!("the body is no JSON object: {e}")))?;
    Ok(value)
}

/// Reads fields of an object that was parsed.
fn fields<T: for<'de> Deserialize<'de>>(body: &Map<String, Value>) -> Result<T, ApiError> {
    located(serde_path_to_error::deserialize(Value::Object(body.clone())))
}

fn located<T>(result: Result<T, serde_path_to_error::Error<serde_json::Error>>) -> Result<T, ApiError> {
    result.map_err(|error| match error.path().to_string() {
        path if path == "." || path.len() > LONGEST_PATH => {
            ApiError::bad(format!("the body is no such JSON object: {}", error.inner()))
        }
        path => ApiError::field(&path, error.inner()),
    })
}

pub(crate) fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

impl Shared {
    fn check_name(&self, name: &str) -> Result<(), ApiError> {
        if name == self.name {
            return Ok(());
        }
        let message = format!("the model `{name}` does not exist; this server has `{}`", self.name);
        Err(ApiError {
            code: Some("model_not_found"),
            param: Some("model".to_owned()),
            ..ApiError::new(StatusCode::NOT_FOUND, message)
        })
    }

    fn model_object(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "kiln",
            "max_model_len": self.model.sizes().positions,
        })
    }
}
