//! `/v1/embeddings`

use axum::{Json, extract::State};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use kiln::{EmbeddingInput, Model};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Body, Server, fields, parsed, prompts::Prompts};
use crate::{error::ApiError, fields as known};

/// Most inputs of a request, as OpenAI has it.
const MOST_INPUTS: usize = 2048;

#[derive(Debug, Deserialize)]
struct Embedding {
    model: String,
    input: Prompts,
    #[serde(default)]
    encoding_format: Encoding,
    dimensions: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Encoding {
    #[default]
    Float,
    /// Float32 numbers, the lowest byte first.
    Base64,
}

pub(super) async fn embed(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let mut body: Map<String, Value> = parsed(body)?;
    known::check(&mut body, &[known::EMBEDDINGS])?;
    for name in ["model", "input"] {
        if !body.contains_key(name) {
            return Err(ApiError::field(name, "is missing"));
        }
    }
    let Embedding { model, input, encoding_format, dimensions } = fields(&body)?;
    let served = models.get(Some(&model)).await?;
    let inputs: Vec<EmbeddingInput> = input.list().into_iter().map(EmbeddingInput::from).collect();
    if !(1..=MOST_INPUTS).contains(&inputs.len()) {
        return Err(ApiError::field(
            "input",
            format!("has {}, must have from 1 to {MOST_INPUTS}", inputs.len()),
        ));
    }
    let pooling = served.pooling;
    let compute = move |model: &Model| model.embed(inputs).pooling(pooling).dimensions(dimensions).run();
    let computed = served.worker.call(compute).await??;
    let tokens: usize = computed.tokens.iter().sum();
    let object = |(index, vector): (usize, Vec<f32>)| {
        let numbers = match encoding_format {
            Encoding::Float => json!(vector),
            Encoding::Base64 => {
                let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
                json!(BASE64_STANDARD.encode(bytes))
            }
        };
        json!({ "object": "embedding", "index": index, "embedding": numbers })
    };
    let data: Vec<Value> = computed.vectors.into_iter().enumerate().map(object).collect();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    Ok(Json(json!({ "object": "list", "data": data, "model": served.name, "usage": usage })))
}
