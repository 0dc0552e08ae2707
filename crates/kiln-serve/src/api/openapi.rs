//! The description of the endpoints (`OpenAPI` 3.1), from the tables of fields that requests are checked by.

use axum::{Json, extract::State};
use serde_json::{Map, Value, json};

use super::Server;
use crate::fields::{self as known, Use};

type Fields = &'static [&'static [(&'static str, Use)]];

/// An endpoint: its path, what it does, its fields, and those that must be there.
type Endpoint = (&'static str, &'static str, Fields, &'static [&'static str]);

/// The endpoints that take JSON.
const POSTS: [Endpoint; 14] = [
    ("/v1/chat/completions", "Answers a conversation", &[known::CHAT, known::COMMON], &["model", "messages"]),
    ("/v1/completions", "Continues texts", &[known::COMPLETIONS, known::COMMON], &["model", "prompt"]),
    ("/v1/responses", "Answers a conversation by items", &[known::RESPONSES], &["model"]),
    (
        "/v1/messages",
        "Answers a conversation, as Anthropic's API does",
        &[known::MESSAGES],
        &["model", "messages", "max_tokens"],
    ),
    (
        "/v1/messages/count_tokens",
        "Counts the tokens of a conversation",
        &[known::MESSAGES],
        &["model", "messages"],
    ),
    ("/v1/embeddings", "Computes embeddings of texts", &[known::EMBEDDINGS], &["model", "input"]),
    ("/api/chat", "Answers a conversation, as ollama does", &[known::OLLAMA_CHAT, known::OLLAMA], &["model"]),
    (
        "/api/generate",
        "Continues a text, as ollama does",
        &[known::OLLAMA_GENERATE, known::OLLAMA],
        &["model"],
    ),
    ("/api/embed", "Computes embeddings of texts, as ollama does", &[known::OLLAMA_EMBED], &["model"]),
    ("/api/embeddings", "Computes the embedding of a text", &[known::OLLAMA_EMBEDDINGS], &["model"]),
    ("/api/show", "Describes a model", &[known::OLLAMA_SHOW], &[]),
    (
        "/apply-template",
        "Writes a conversation as the model reads it",
        &[known::CHAT, known::COMMON],
        &["messages"],
    ),
    ("/tokenize", "Makes tokens of a text", &[known::TOKENIZE], &["content"]),
    ("/detokenize", "Makes a text of tokens", &[known::DETOKENIZE], &["tokens"]),
];

/// The endpoints that take recordings.
const FORMS: [(&str, &str); 2] = [
    ("/v1/audio/transcriptions", "Writes down speech"),
    ("/v1/audio/translations", "Writes down speech in English"),
];

/// The endpoints without a body.
const GETS: [(&str, &str); 10] = [
    ("/health", "Whether the engines work"),
    ("/ready", "Whether the engines work"),
    ("/metrics", "Counts and times, as Prometheus reads them"),
    ("/props", "Properties of a model and its engine"),
    ("/version", "The version of the server"),
    ("/v1/models", "The models"),
    ("/api/tags", "The models, as ollama lists them"),
    ("/api/ps", "The models that are loaded, as ollama lists them"),
    ("/api/version", "The version of the server, as ollama tells it"),
    ("/openapi.json", "This description"),
];

/// The types of fields, by their names. Others take several types.
const TYPES: [(&str, &[&str]); 5] = [
    (
        "boolean",
        &[
            "stream",
            "echo",
            "ignore_eos",
            "skip_special_tokens",
            "no_stop_trim",
            "return_hidden_states",
            "add_generation_prompt",
            "continue_final_message",
            "separate_reasoning",
            "stream_reasoning",
            "include_reasoning",
            "parallel_tool_calls",
            "store",
            "raw",
            "truncate",
            "shift",
            "verbose",
            "add_special",
        ],
    ),
    (
        "integer",
        &[
            "top_k",
            "seed",
            "max_tokens",
            "min_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "n",
            "priority",
            "top_logprobs",
            "thinking_token_budget",
            "dimensions",
        ],
    ),
    (
        "number",
        &[
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ],
    ),
    (
        "string",
        &[
            "model",
            "name",
            "cache_salt",
            "instructions",
            "previous_response_id",
            "content",
            "encoding_format",
        ],
    ),
    (
        "object",
        &[
            "stream_options",
            "logit_bias",
            "kiln",
            "response_format",
            "chat_template_kwargs",
            "options",
            "text",
            "reasoning",
            "thinking",
            "output_config",
        ],
    ),
];

/// The schema of a field.
fn schema(name: &str) -> Value {
    let message = json!({
        "type": "object", "required": ["role"],
        "properties": { "role": { "type": "string" }, "content": {} },
    });
    match name {
        "messages" => json!({ "type": "array", "items": message }),
        "tools" => json!({ "type": "array", "items": { "type": "object" } }),
        "stop_sequences" | "include" => json!({ "type": "array", "items": { "type": "string" } }),
        "tokens" => json!({ "type": "array", "items": { "type": "integer", "minimum": 0 } }),
        "stop" => {
            json!({ "oneOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" } }] })
        }
        _ => match TYPES.iter().find(|(_, names)| names.contains(&name)) {
            Some((kind, _)) => json!({ "type": kind }),
            None => json!({}),
        },
    }
}

/// The schema of a body. Fields that are refused are left out.
fn body(fields: Fields, required: &[&str], models: &[&str]) -> Value {
    let mut properties = Map::new();
    for (name, used) in fields.iter().copied().flatten() {
        let mut schema = schema(name);
        match used {
            Use::Refused(..) => continue,
            Use::Only(value, why) => schema = json!({ "const": value, "description": why }),
            Use::Accepted => schema = json!({ "description": "changes nothing" }),
            Use::Honoured if *name == "model" => schema["enum"] = json!(models),
            Use::Honoured => {}
        }
        if let (false, Some(kind)) = (required.contains(name), schema["type"].as_str().map(str::to_owned)) {
            // Null is the same as no field.
            schema["type"] = json!([kind, "null"]);
            if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
                values.push(Value::Null);
            }
        }
        properties.insert((*name).to_owned(), schema);
    }
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

fn operation(summary: &str) -> Value {
    let error = json!({ "description": "The error, in the form of the API" });
    json!({ "summary": summary, "responses": { "200": { "description": "As the API has it" }, "default": error } })
}

/// An operation on what the address names by its identity.
fn of_id(summary: &str) -> Value {
    let id = json!({ "name": "id", "in": "path", "required": true, "schema": { "type": "string" } });
    let mut operation = operation(summary);
    operation["parameters"] = json!([id]);
    operation
}

pub(super) async fn document(State(models): Server) -> Json<Value> {
    let names: Vec<&str> = models.names().collect();
    let mut paths = Map::new();
    for (path, summary) in GETS {
        paths.insert(path.to_owned(), json!({ "get": operation(summary) }));
    }
    paths.insert("/v1/models/{id}".to_owned(), json!({ "get": of_id("A model") }));
    let response = json!({ "get": of_id("A response that was kept"), "delete": of_id("Forgets a response") });
    paths.insert("/v1/responses/{id}".to_owned(), response);
    let mut post = |path: &str, summary: &str, kind: &str, schema: Value| {
        let mut operation = operation(summary);
        operation["requestBody"] = json!({ "required": true, "content": { kind: { "schema": schema } } });
        paths.insert(path.to_owned(), json!({ "post": operation }));
    };
    for (path, summary, fields, required) in POSTS {
        post(path, summary, "application/json", body(fields, required, &names));
    }
    for (path, summary) in FORMS {
        let mut schema = body(&[known::AUDIO], &["model"], &names);
        schema["properties"]["file"] = json!({ "type": "string", "contentMediaType": "audio/wav" });
        schema["required"] = json!(["file", "model"]);
        // Lists are named with brackets, too.
        schema["additionalProperties"] = json!(true);
        post(path, summary, "multipart/form-data", schema);
    }
    Json(json!({
        "openapi": "3.1.0",
        "info": { "title": "kiln serve", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": { "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } } },
        "security": [{}, { "key": [] }],
    }))
}
