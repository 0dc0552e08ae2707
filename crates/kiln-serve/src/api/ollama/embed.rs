//! `/api/embed`, and the older `/api/embeddings`

use std::sync::Arc;

use axum::{Json, extract::State};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use web_time::Instant;

use super::{KeepAlive, keep};
use crate::{
    api::{Body, Server, embeddings, fields, parsed, prompts::Prompt, settings::OneOrMany},
    error::ApiError,
    fields as known,
    models::{Models, Served},
};

#[derive(Debug, Deserialize)]
struct EmbedRequest {
    model: Option<String>,
    input: Option<OneOrMany>,
    prompt: Option<String>,
    truncate: Option<bool>,
    dimensions: Option<usize>,
    keep_alive: Option<KeepAlive>,
}

pub(crate) async fn embed(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let request = embed_request(body, known::OLLAMA_EMBED).await?;
    let inputs = match request.input {
        None => return Err(ApiError::field("input", "is missing")),
        Some(OneOrMany::One(text)) => vec![text],
        Some(OneOrMany::Many(texts)) => texts,
    };
    let begun = Instant::now();
    let cut = request.truncate.unwrap_or(true);
    let (served, embeddings, tokens) =
        vectors(&models, request.model, request.keep_alive, inputs, cut, request.dimensions).await?;
    Ok(Json(json!({
        "model": served.name,
        "embeddings": embeddings,
        "total_duration": u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    })))
}

/// The older form of `/api/embed`, for one text.
pub(crate) async fn old_embed(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let request = embed_request(body, known::OLLAMA_EMBEDDINGS).await?;
    let Some(prompt) = request.prompt else { return Err(ApiError::field("prompt", "is missing")) };
    let (_, embeddings, _) =
        vectors(&models, request.model, request.keep_alive, vec![prompt], true, None).await?;
    Ok(Json(json!({ "embedding": embeddings.first() })))
}

async fn embed_request(body: Body, table: &[(&str, known::Use)]) -> Result<EmbedRequest, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[table])?;
    fields(&body)
}

async fn vectors(
    models: &Arc<Models>,
    name: Option<String>,
    time: Option<KeepAlive>,
    texts: Vec<String>,
    cut: bool,
    dimensions: Option<usize>,
) -> Result<(Arc<Served>, Vec<Vec<f32>>, usize), ApiError> {
    let name = name.ok_or_else(|| ApiError::field("model", "is missing"))?;
    keep(models, &name, time.as_ref())?;
    let served = models.get(Some(&name)).await?;
    let inputs = texts.into_iter().map(Prompt::Text).collect();
    let (vectors, tokens) = embeddings::compute(&served, inputs, dimensions, cut).await?;
    Ok((served, vectors, tokens))
}
