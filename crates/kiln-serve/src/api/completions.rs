//! `/v1/completions`

use std::sync::Arc;

use axum::{Extension, extract::State, response::Response};
use kiln::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Body, Server,
    answer::{Answer, Form},
    fields, parsed,
    reader::Reader,
    settings::Settings,
};
use crate::{error::ApiError, fields as known, guard::Key, worker::Make};

/// Most texts of a request: prompts times choices.
const MOST_TEXTS: usize = 128;

#[derive(Debug, Deserialize)]
struct Completion {
    prompt: Prompts,
    #[serde(default)]
    echo: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text, a list of texts, a list of tokens, or a list of these")]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<TokenId>),
    Lists(Vec<Vec<TokenId>>),
}

/// One prompt.
#[derive(Clone, Debug)]
enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

pub(super) async fn complete(
    State(shared): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body)?;
    known::check(&mut body, &[known::COMPLETIONS, known::COMMON])?;
    shared.model.causal().check_generative()?;
    if !body.contains_key("prompt") {
        return Err(ApiError::field("prompt", "is missing"));
    }
    let settings = Settings::of(&body)?;
    let Completion { prompt, echo } = fields(&body)?;
    let choices = settings.choices(&shared, key)?;
    let prompts: Vec<Prompt> = match prompt {
        Prompts::Text(text) => vec![Prompt::Text(text)],
        Prompts::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
        Prompts::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
        Prompts::Lists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
    };
    let of_answer = choices.clone();
    if body.get("logprobs").is_some_and(Value::is_boolean) {
        return Err(ApiError::field("logprobs", "must be a number"));
    }
    if echo && choices.logprobs.is_some() {
        return Err(ApiError::field("logprobs", "those of the prompt (`echo`) are not told"));
    }
    let texts = prompts.len() * choices.n;
    if !(1..=MOST_TEXTS).contains(&texts) {
        let why = format!("asks for {texts} texts, must be from 1 to {MOST_TEXTS}");
        return Err(ApiError::field("prompt", why));
    }
    let (mut all, mut starts): (Vec<Make>, Vec<String>) = (Vec::new(), Vec::new());
    for prompt in prompts {
        let start = match &prompt {
            _ if !echo => String::new(),
            Prompt::Tokens(tokens) => shared.model.decode(tokens)?,
            Prompt::Text(text) => text.clone(),
        };
        for index in 0..choices.n {
            let (choices, prompt, of) = (choices.clone(), prompt.clone(), Arc::clone(&shared));
            all.push(Box::new(move |model| {
                let tokens = match prompt {
                    Prompt::Text(text) => {
                        // A text of megabytes would keep the engine from all others.
                        choices.check_length(&text, model)?;
                        model.encode(&text)?
                    }
                    Prompt::Tokens(tokens) => tokens,
                };
                let choices = choices.within(model.sizes().positions.saturating_sub(tokens.len()));
                choices.of(model.generate(tokens), index, &of).stream()
            }));
            starts.push(start.clone());
        }
    }
    let answer = Answer::begin(Form::Text, shared.clone(), all, starts, &Reader::Plain, &of_answer).await?;
    if settings.stream { Ok(answer.stream(settings.includes_usage())) } else { answer.whole().await }
}
