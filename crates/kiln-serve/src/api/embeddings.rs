//! `/v1/embeddings`

use axum::{Json, extract::State};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use kiln::{EmbeddingInput, Model};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Body, Server, fields, parsed,
    prompts::{Prompt, Prompts},
};
use crate::{error::ApiError, fields as known, models::Served};

/// Bytes of texts whose vectors are computed at once.
const GROUP_BYTES: usize = 2048;

/// Longest part of a text that is read before it is cut, in bytes.
const LONGEST_TEXT: usize = 1 << 20;

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

/// Computes the vectors of texts, and counts tokens. A few texts at once, so that answers go on in between.
/// `truncate`: whether texts that are too long are cut.
pub(super) async fn compute(
    served: &Served,
    inputs: Vec<Prompt>,
    dimensions: Option<usize>,
    truncate: bool,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let (mut vectors, mut tokens) = (Vec::with_capacity(inputs.len()), 0);
    let mut inputs = inputs.into_iter().peekable();
    while inputs.peek().is_some() {
        let (mut group, mut bytes) = (Vec::new(), 0);
        while let Some(next) = inputs.next_if(|next| group.is_empty() || bytes + next.bytes() <= GROUP_BYTES)
        {
            bytes += next.bytes();
            group.push(match next {
                Prompt::Text(text) if truncate => Prompt::Text(cut(text)),
                // Tokens of megabytes are not made on the thread of the engine.
                Prompt::Text(text) => {
                    served.model.check_length(&text, &served.model.cache(served.model.plan())?)?;
                    Prompt::Text(text)
                }
                tokens @ Prompt::Tokens(_) => tokens,
            });
        }
        let pooling = served.pooling;
        let compute = async move |model: Model| {
            let inputs = group.into_iter().map(EmbeddingInput::from);
            let request = model.embed(inputs.collect::<Vec<_>>()).pooling(pooling);
            request.dimensions(dimensions).truncate(truncate).run_async().await
        };
        let computed = served.worker.call(compute).await??;
        vectors.extend(computed.vectors);
        tokens += computed.tokens.iter().sum::<usize>();
    }
    Ok((vectors, tokens))
}

/// The beginning of a text, which has more tokens than any model takes.
fn cut(mut text: String) -> String {
    text.truncate(
        (0..=LONGEST_TEXT.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0),
    );
    text
}

pub(super) async fn embed(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::EMBEDDINGS])?;
    for name in ["model", "input"] {
        if !body.contains_key(name) {
            return Err(ApiError::field(name, "is missing"));
        }
    }
    let Embedding { model, input, encoding_format, dimensions } = fields(&body)?;
    let served = models.get(Some(&model)).await?;
    let inputs = input.list();
    if !(1..=MOST_INPUTS).contains(&inputs.len()) {
        return Err(ApiError::field(
            "input",
            format!("has {}, must have from 1 to {MOST_INPUTS}", inputs.len()),
        ));
    }
    let (vectors, tokens) = compute(&served, inputs, dimensions, false).await?;
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
    let data: Vec<Value> = vectors.into_iter().enumerate().map(object).collect();
    let usage = json!({ "prompt_tokens": tokens, "total_tokens": tokens });
    Ok(Json(json!({ "object": "list", "data": data, "model": served.name, "usage": usage })))
}
