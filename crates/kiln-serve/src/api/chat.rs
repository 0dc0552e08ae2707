//! `/v1/chat/completions`

use std::{collections::BTreeMap, sync::Arc};

use axum::{Extension, extract::State, response::Response};
use kiln::{
    AnswerFormat, ChatTemplate, Conversation, Message,
    expert::{Data, RenderOptions},
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Body, Server,
    answer::{Answer, Form},
    fields, parsed,
    reader::Reader,
    settings::Settings,
    tools::{Calls, Tools},
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
    #[serde(default)]
    tools: Vec<Value>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
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
    let mut choices = settings.choices(&shared, key)?;
    let template = match &shared.template {
        Some(template) => template.clone(),
        None if shared.model.chat_templates().by_name.is_empty() => ChatTemplate::chatml(),
        None => shared.model.chat_templates().choose(!chat.tools.is_empty())?,
    };
    let given = (chat.tools.clone(), chat.tool_choice.clone(), chat.parallel_tool_calls);
    let tools = Tools::of(given.0, given.1, given.2, &template)?;
    let (conversation, options) = (chat.conversation(&tools, &template)?, chat.options()?);
    let forced = tools.grammar()?;
    if forced.is_some() && choices.grammar.is_some() {
        return Err(ApiError::field("response_format", "goes without a tool that must be called"));
    }
    let special_tokens = &shared.model.chat_templates().special_tokens;
    let prompt = template.render(&conversation, special_tokens, &options)?;
    check_rendered(&conversation, &prompt)?;
    let format = AnswerFormat::of(&template);
    let reader = match (&tools.calls, &forced) {
        (Calls::Named(name), _) => Reader::Forced { name: Some(name.clone()), text: String::new() },
        (Calls::Required, _) => Reader::Forced { name: None, text: String::new() },
        // The grammar has no marks.
        (Calls::None | Calls::Auto, _) if choices.grammar.is_some() || !format.is_marked() => Reader::Plain,
        (calls, _) => {
            let list = if *calls == Calls::Auto { &tools.list[..] } else { &[] };
            choices.special_tokens = true;
            Reader::Marked { parser: format.parser(&prompt, list), one_call: !tools.parallel, calls: 0 }
        }
    };
    choices.grammar = forced.or(choices.grammar);
    let of_choice = |index: usize| -> Make {
        let (template, conversation, options) = (template.clone(), conversation.clone(), options.clone());
        let (choices, shared) = (choices.clone(), Arc::clone(&shared));
        Box::new(move |model| {
            choices.of(model.answer(&template, &conversation, &options)?, index, &shared).stream()
        })
    };
    let all = (0..choices.n).map(of_choice).collect();
    let starts = vec![String::new(); choices.n];
    let answer = Answer::begin(Form::Chat, shared.clone(), all, starts, &reader, &choices).await?;
    if settings.stream { Ok(answer.stream(settings.includes_usage())) } else { answer.whole().await }
}

impl Chat {
    fn conversation(&self, tools: &Tools, template: &ChatTemplate) -> Result<Conversation, ApiError> {
        if self.messages.is_empty() || self.messages.len() > MOST_MESSAGES {
            let why = format!("are {}, must be from 1 to {MOST_MESSAGES}", self.messages.len());
            return Err(ApiError::field("messages", why));
        }
        let data = |value: &Value| Data::new(value);
        let mut variables: BTreeMap<String, Data> = self
            .chat_template_kwargs
            .iter()
            .flatten()
            .map(|(name, value)| (name.clone(), data(value)))
            .collect();
        if let Some(effort) = &self.reasoning_effort {
            if template.mentions("reasoning_effort") {
                variables.insert("reasoning_effort".to_owned(), Data::new(effort));
            } else if template.mentions("enable_thinking") {
                variables.insert("enable_thinking".to_owned(), Data::new(effort != "none"));
            } else if effort != "none" {
                let why = "the model's chat template has no setting for it; leave it out";
                return Err(ApiError::field("reasoning_effort", why));
            }
        }
        let tools = (tools.calls != Calls::None).then(|| tools.list.iter().map(data).collect());
        Ok(Conversation {
            tools,
            messages: self
                .messages
                .iter()
                .enumerate()
                .map(|(at, own)| message(at, own))
                .collect::<Result<_, _>>()?,
            documents: self.documents.as_ref().map(|list| list.iter().map(data).collect()),
            variables,
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
    if let Some(calls) = own.get_mut("tool_calls") {
        for call in calls.as_array_mut().into_iter().flatten() {
            // Templates write the object themselves.
            if let Some(text) = call["function"]["arguments"].as_str() {
                match serde_json::from_str::<Map<String, Value>>(text) {
                    Ok(arguments) => call["function"]["arguments"] = Value::Object(arguments),
                    Err(_) => return wrong("tool_calls", "have arguments that are no JSON object"),
                }
            }
        }
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
