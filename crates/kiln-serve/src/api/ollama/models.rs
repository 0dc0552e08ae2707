//! The models, as ollama tells them.

use std::sync::Arc;

use axum::{Json, extract::State, http::StatusCode};
use kiln::{AnswerFormat, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    api::{Body, Server, date, fields, now, parsed},
    error::ApiError,
    fields as known,
    models::Served,
};

pub(crate) async fn tags(State(models): Server) -> Json<Value> {
    let loaded = models.loaded();
    let entry = |name: &str| {
        let served = loaded.iter().find(|served| served.name == name);
        let mut entry = json!({
            "name": name,
            "model": name,
            "modified_at": date(models.created()),
            "size": served.map_or(0, |served| served.model.weight_bytes()),
            "digest": served.map_or("", |served| served.model.fingerprint().unwrap_or_default()),
        });
        entry["details"] = details(served.map(Arc::as_ref));
        entry
    };
    Json(json!({ "models": models.names().map(entry).collect::<Vec<_>>() }))
}

/// The models that are loaded.
pub(crate) async fn ps(State(models): Server) -> Json<Value> {
    let entry = |served: &Arc<Served>| {
        let bytes = served.model.weight_bytes();
        let mut entry = json!({
            "name": served.name,
            "model": served.name,
            "size": bytes + served.model.host_weight_bytes(),
            "size_vram": bytes,
            "digest": served.model.fingerprint().unwrap_or_default(),
            "context_length": served.model.sizes().positions,
        });
        if let Some(time) = models.expires(&served.name) {
            entry["expires_at"] = json!(date(now() + time.as_secs()));
        }
        entry["details"] = details(Some(served));
        entry
    };
    Json(json!({ "models": models.loaded().iter().map(entry).collect::<Vec<_>>() }))
}

fn details(served: Option<&Served>) -> Value {
    let parameters = served.map(|served| format!("{:.1}B", served.model.parameters() as f64 / 1e9));
    json!({ "format": "kiln", "parameter_size": parameters.unwrap_or_default() })
}

#[derive(Debug, Deserialize)]
struct Show {
    model: Option<String>,
    name: Option<String>,
}

pub(crate) async fn show(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::OLLAMA_SHOW])?;
    let Show { model, name } = fields(&body)?;
    let name = model.or(name).ok_or_else(|| ApiError::field("model", "is missing"))?;
    let served = models.get(Some(&name)).await?;
    let model = &served.model;
    let template = served.template.clone().or_else(|| model.chat_templates().choose(true).ok());
    let mut capabilities = Vec::new();
    if model.causal().check_generative().is_ok() {
        capabilities.push("completion");
    }
    if template.as_ref().is_some_and(|template| template.reads("tools")) {
        capabilities.push("tools");
    }
    if template.as_ref().is_some_and(|template| AnswerFormat::of(template).has_reasoning()) {
        capabilities.push("thinking");
    }
    if served.pooling.is_some() || model.embedding_config().is_ok() {
        capabilities.push("embedding");
    }
    Ok(Json(json!({
        "modified_at": date(models.created()),
        "details": details(Some(&served)),
        "template": template.as_ref().map_or("", ChatTemplate::source),
        "model_info": {
            "general.parameter_count": model.parameters(),
            "general.context_length": model.sizes().positions,
        },
        "capabilities": capabilities,
    })))
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Models are chosen by whoever starts the server.
pub(crate) async fn forbidden() -> ApiError {
    let message = "models are given when the server starts (`kiln serve --model`), not over the network";
    ApiError::new(StatusCode::FORBIDDEN, message)
}
