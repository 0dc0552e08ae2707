//! `/v1/chat/completions`

use std::{collections::BTreeMap, sync::Arc};

use axum::{Extension, extract::State, response::Response};
use kiln::{
    ChatTemplate, Conversation, Message,
    expert::{Data, RenderOptions},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Body, Server,
    answer::{Answer, Form},
    fields, parsed,
    settings::Settings,
};
use crate::{error::ApiError, fields as known, guard::Key, worker::Make};

/// Most messages of a conversation.
const MOST_MESSAGES: usize = 2048;

#[derive(Debug, Deserialize)]
struct Chat {
    messages: Vec<Map<String, Value>>,
    chat_template_kwargs: Option<BTreeMap<String, Value>>,
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: bool,
    documents: Option<Vec<Value>>,
}

pub(super) async fn complete(
    State(shared): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body)?;
    known::check(&mut body, &[known::CHAT, known::COMMON])?;
    shared.model.causal().check_generative()?;
    if body.get("logprobs").is_some_and(|logprobs| !logprobs.is_boolean()) {
        return Err(ApiError::field("logprobs", "must be true or false"));
    }
    if !body.contains_key("messages") {
        return Err(ApiError::field("messages", "is missing"));
    }
    let settings = Settings::of(&body)?;
    let chat: Chat = fields(&body)?;
    let choices = settings.choices(&shared, key)?;
    let template = match &shared.template {
        Some(template) => template.clone(),
        None if shared.model.chat_templates().by_name.is_empty() => ChatTemplate::chatml(),
        None => shared.model.chat_templates().choose(false)?,
    };
    let (conversation, options) = (chat.conversation()?, chat.options()?);
    let special_tokens = &shared.model.chat_templates().special_tokens;
    check_rendered(&conversation, &template.render(&conversation, special_tokens, &options)?)?;
    let of_choice = |index: usize| -> Make {
        let (template, conversation, options) = (template.clone(), conversation.clone(), options.clone());
        let (choices, shared) = (choices.clone(), Arc::clone(&shared));
        Box::new(move |model| {
            choices.of(model.answer(&template, &conversation, &options)?, index, &shared).stream()
        })
    };
    let all = (0..choices.n).map(of_choice).collect();
    let starts = vec![String::new(); choices.n];
    let answer = Answer::begin(Form::Chat, shared.clone(), all, starts, &choices).await?;
    if settings.stream { Ok(answer.stream(settings.includes_usage())) } else { answer.whole().await }
}

impl Chat {
    fn conversation(&self) -> Result<Conversation, ApiError> {
        if self.messages.is_empty() || self.messages.len() > MOST_MESSAGES {
            let why = format!("are {}, must be from 1 to {MOST_MESSAGES}", self.messages.len());
            return Err(ApiError::field("messages", why));
        }
        let data = |value: &Value| Data::new(value);
        Ok(Conversation {
            messages: self
                .messages
                .iter()
                .enumerate()
                .map(|(at, own)| message(at, own))
                .collect::<Result<_, _>>()?,
            documents: self.documents.as_ref().map(|list| list.iter().map(data).collect()),
            variables: self
                .chat_template_kwargs
                .iter()
                .flatten()
                .map(|(name, value)| (name.clone(), data(value)))
                .collect(),
            ..Conversation::default()
        })
    }

    fn options(&self) -> Result<RenderOptions, ApiError> {
        let adds = self.add_generation_prompt.unwrap_or(!self.continue_final_message);
        if adds && self.continue_final_message {
            let why =
                "goes without `add_generation_prompt`: the last message is continued, or another begins";
            return Err(ApiError::field("continue_final_message", why));
        }
        Ok(RenderOptions {
            add_generation_prompt: adds,
            continue_final: self.continue_final_message.then(|| "content".to_owned()),
            ..RenderOptions::default()
        })
    }
}

/// Reads a message. Parts of text become one text, a line each.
fn message(at: usize, own: &Map<String, Value>) -> Result<Message, ApiError> {
    let wrong = |field: &str, why: &str| Err(ApiError::field(&format!("messages[{at}].{field}"), why));
    let mut own = own.clone();
    match own.get("role").and_then(Value::as_str) {
        // A newer name of the same role.
        Some("developer") => _ = own.insert("role".to_owned(), "system".into()),
        Some("system" | "user" | "assistant" | "tool") => {}
        Some(role) => return wrong("role", &format!("is `{role}`, must be system, user, assistant or tool")),
        None => return wrong("role", "is missing"),
    }
    if let Some(Value::Array(parts)) = own.get("content") {
        let mut texts = Vec::new();
        for part in parts {
            match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
                (Some("text"), Some(text)) => texts.push(text),
                (Some(kind), _) => {
                    return wrong("content", &format!("has a part of type `{kind}`; only text is read"));
                }
                (None, _) => return wrong("content", "has a part without a type"),
            }
        }
        let text = texts.join("\n");
        own.insert("content".to_owned(), text.into());
    }
    match own.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Null) | None if own.contains_key("tool_calls") => {}
        _ => return wrong("content", "must be a text, or a list of parts of text"),
    }
    serde_json::from_value(Value::Object(own)).map_err(|e| ApiError::field(&format!("messages[{at}]"), e))
}

/// Checks that no system message is left out, as the templates of some models do without a word.
fn check_rendered(conversation: &Conversation, prompt: &str) -> Result<(), ApiError> {
    let is_lost = |message: &Message| {
        message.role() == "system" && !prompt.contains(message.content().unwrap_or_default().trim())
    };
    match conversation.messages.iter().position(is_lost) {
        Some(at) => {
            let why = "the model's chat template leaves out system messages; say it in the first message";
            Err(ApiError::field(&format!("messages[{at}].content"), why))
        }
        None => Ok(()),
    }
}
