//! The endpoints.

mod answer;
mod anthropic;
mod audio;
mod body;
mod chat;
mod completions;
mod embeddings;
mod logprobs;
mod ollama;
mod openai;
mod openapi;
mod page;
mod prompts;
mod reader;
mod responses;
mod settings;
mod tools;
mod turn;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Extension, Json, Router,
    extract::{DefaultBodyLimit, Path, Query, Request, State, rejection::PathRejection},
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{MethodRouter, delete, get, post},
};
use kiln::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};
use web_time::SystemTime;

pub(crate) use self::answer::finish_reason;
use self::body::{Body, apart, fields, parsed};
use crate::{
    error::{ApiError, ErrorForm},
    models::{Models, Served},
};

/// Largest body, in bytes.
const LARGEST_BODY: usize = 16 << 20;

/// Longest identity of a request that a client gives, in bytes.
const LONGEST_ID: usize = 200;

type Server = State<Arc<Models>>;

pub(crate) fn router(models: Arc<Models>) -> Router {
    Router::new()
        .route("/", get(page::html))
        .route("/page.css", get(page::css))
        .route("/page.js", get(page::script))
        .route("/health", get(health))
        .route("/ready", get(health))
        .route("/metrics", get(metrics))
        .route("/props", get(props))
        .route("/version", get(async || Json(json!({ "version": env!("CARGO_PKG_VERSION") }))))
        .route("/openapi.json", get(openapi::document))
        .route("/v1/models", get(list))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completions::complete))
        .route("/v1/messages", post(anthropic::answer))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/audio/transcriptions", audio_route(post(audio::transcribe)))
        .route("/v1/audio/translations", audio_route(post(audio::translate)))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(ollama::embed))
        .route("/api/embeddings", post(ollama::old_embed))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::ps))
        .route("/api/show", post(ollama::show))
        .route("/api/version", get(ollama::version))
        .route("/api/pull", post(ollama::forbidden))
        .route("/api/push", post(ollama::forbidden))
        .route("/api/create", post(ollama::forbidden))
        .route("/api/copy", post(ollama::forbidden))
        .route("/api/delete", delete(ollama::forbidden))
        .route("/api/blobs/{digest}", post(ollama::forbidden))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/embeddings", post(embeddings::embed))
        .route("/apply-template", post(chat::apply_template))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "there is no such address"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes another method")
        })
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .layer(Extension(Arc::new(responses::Stored::default())))
        .with_state(models)
}

/// Recordings are larger than other bodies.
fn audio_route(route: MethodRouter<Arc<Models>>) -> MethodRouter<Arc<Models>> {
    route.layer(DefaultBodyLimit::max(audio::LARGEST_RECORDING))
}

/// Gives each response the identity of its request, and errors the form of the API that was asked.
pub(crate) async fn finish(request: Request, next: Next) -> Response {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    const ID: HeaderName = HeaderName::from_static("x-request-id");
    let form = ErrorForm::of(request.uri().path());
    let given = request.headers().get(ID).filter(|id| id.len() <= LONGEST_ID).cloned();
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>() {
        response = error.response(form);
    }
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let own = || HeaderValue::from_str(&format!("req-{:x}-{number:x}", now())).ok();
    if let Some(id) = given.or_else(own) {
        // Anthropic's clients read the other name.
        response.headers_mut().insert(HeaderName::from_static("request-id"), id.clone());
        response.headers_mut().insert(ID, id);
    }
    response
}

/// Whether the engines work. Kubernetes and routers ask for it.
async fn health(State(models): Server) -> (StatusCode, Json<Value>) {
    let loaded = models.loaded();
    let (status, word) = match loaded.iter().any(|served| served.worker.has_failed()) {
        true => (StatusCode::SERVICE_UNAVAILABLE, "failed"),
        false => (StatusCode::OK, "ok"),
    };
    let running: usize = loaded.iter().map(|served| served.worker.running()).sum();
    (status, Json(json!({ "status": word, "running": running })))
}

/// The metrics, in the text format of OpenMetrics, which Prometheus asks for.
async fn metrics(State(models): Server) -> Result<impl IntoResponse, ApiError> {
    const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be written");
    let text = models.metrics().text().map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, KIND)], text))
}

#[derive(Deserialize)]
struct Which {
    model: Option<String>,
}

/// The properties of a model and its engine. Asking for them neither loads the model nor keeps it loaded.
async fn props(State(models): Server, Query(which): Query<Which>) -> Result<Json<Value>, ApiError> {
    let name = models.name(which.model.as_deref())?;
    let loaded = models.loaded();
    Ok(Json(match loaded.iter().find(|served| served.name == name) {
        Some(served) => served.props(),
        None => json!({ "model": name, "loaded": false }),
    }))
}

/// The models, in the forms of OpenAI and Anthropic.
async fn list(State(models): Server) -> Json<Value> {
    let data = models.objects();
    let id = |object: Option<&Value>| object.map(|object| object["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    Json(json!({ "object": "list", "data": data, "has_more": false, "first_id": first, "last_id": last }))
}

async fn model(
    State(models): Server,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let id = id.map_or_else(|error| error.body_text(), |Path(id)| id);
    let name = models.name(Some(&id))?.to_owned();
    let objects = models.objects();
    let object = objects.into_iter().find(|object| object["id"] == name);
    Ok(Json(object.unwrap_or_default()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    content: String,
    #[serde(default)]
    add_special: bool,
    model: Option<String>,
}

/// Tokenizes a text, as llama.cpp's server does.
async fn tokenize(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let Text { content, add_special, model } = parsed(body).await?;
    let served = models.get(model.as_deref()).await?;
    Ok(Json(json!({ "tokens": encode(served, content, add_special).await? })))
}

/// The tokens of a text. `special`: with those that the tokenizer adds.
async fn encode(served: Arc<Served>, text: String, special: bool) -> Result<Vec<TokenId>, ApiError> {
    let encode = move || match special {
        true => served.model.encode(&text),
        false => served.model.encode_more(&text),
    };
    apart(move || Ok(encode()?)).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokens {
    tokens: Vec<TokenId>,
    model: Option<String>,
}

async fn detokenize(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let Tokens { tokens, model } = parsed(body).await?;
    let served = models.get(model.as_deref()).await?;
    Ok(Json(json!({ "content": served.model.decode(&tokens)? })))
}

/// Seconds since 1970 as a date and a time.
pub(crate) fn date(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).ok();
    seconds.and_then(|seconds| jiff::Timestamp::from_second(seconds).ok()).unwrap_or_default().to_string()
}

pub(crate) fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
