//! `/v1/responses`

mod form;
mod stored;

use std::{collections::BTreeMap, sync::Arc};

use axum::{Extension, extract::State, response::Response};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value, json};

use self::form::Responses;
pub(super) use self::stored::{Stored, delete, get};
use super::{
    Body, Server,
    answer::Answer,
    chat, fields, parsed,
    settings::{ResponseFormat, Settings},
    turn::Turn,
};
use crate::{error::ApiError, fields as known, guard::Key};

/// Parts of a response that a request may ask for.
const LOGPROBS: &str = "message.output_text.logprobs";
const REASONING: &str = "reasoning.encrypted_content";

#[derive(Debug, Deserialize)]
struct Request {
    model: Option<String>,
    input: Option<Input>,
    instructions: Option<String>,
    previous_response_id: Option<String>,
    #[serde(default)]
    stream: bool,
    store: Option<bool>,
    max_output_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_logprobs: Option<u64>,
    #[serde(default)]
    include: Vec<String>,
    #[serde(default)]
    tools: Vec<Tool>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Text>,
    reasoning: Option<Reasoning>,
    metadata: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be a text, or a list of items")]
enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Tool {
    Function { name: String, description: Option<String>, parameters: Option<Value>, strict: Option<bool> },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: Option<Format>,
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Format {
    Text,
    JsonObject,
    JsonSchema {
        schema: Value,
        #[serde(default, rename = "name")]
        _name: IgnoredAny,
        #[serde(default, rename = "description")]
        _description: IgnoredAny,
        /// Answers always match the schema.
        #[serde(default, rename = "strict")]
        _strict: IgnoredAny,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    effort: Option<String>,
    summary: Option<String>,
    #[serde(default, rename = "generate_summary")]
    _generate_summary: IgnoredAny,
}

pub(super) async fn create(
    State(models): Server,
    Extension(stored): Extension<Arc<Stored>>,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::RESPONSES])?;
    let request: Request = fields(&body)?;
    let name = request.model.clone().ok_or_else(|| ApiError::field("model", "is missing"))?;
    let mut messages = match &request.previous_response_id {
        None => Vec::new(),
        Some(id) => stored.find(key, id, |kept| kept.messages.clone())?,
    };
    match &request.input {
        None => return Err(ApiError::field("input", "is missing")),
        Some(Input::Text(text)) => messages.push(json!({ "role": "user", "content": text })),
        Some(Input::Items(items)) => {
            for (at, item) in items.iter().enumerate() {
                add(&mut messages, at, item)?;
            }
        }
    }
    let settings = request.settings(&body)?;
    let served = models.get(Some(&name)).await?;
    let choices = settings.choices(&served, key)?;
    // Instructions are not carried over to the next response.
    let system = request.instructions.as_ref().map(|text| json!({ "role": "system", "content": text }));
    let all = system.into_iter().chain(messages.iter().cloned());
    let own = all.enumerate().map(|(at, message)| match message {
        Value::Object(message) => chat::message(at, message),
        _ => Err(ApiError::field("input", "must be a text, or a list of items")),
    });
    let turn = Turn {
        messages: own.collect::<Result<_, _>>()?,
        tools: request.tools.iter().map(chat_tool).collect(),
        tool_choice: request.chat_tool_choice()?,
        parallel_tool_calls: request.parallel_tool_calls,
        effort: request.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone()),
        ..Turn::default()
    };
    let store = request.store.unwrap_or(true).then_some((stored, key, messages));
    let answer = turn.begin(served, choices).await?;
    let streams = request.stream;
    let form = Responses::new(request.shell(&answer, &body), store);
    answer.respond(form, streams).await
}

impl Request {
    fn settings(&self, body: &Map<String, Value>) -> Result<Settings, ApiError> {
        if self.max_output_tokens == Some(0) {
            return Err(ApiError::field("max_output_tokens", "is 0, must be at least 1"));
        }
        if let Some(other) = self.include.iter().find(|name| ![LOGPROBS, REASONING].contains(&name.as_str()))
        {
            return Err(ApiError::field("include", format!("`{other}` is no part of a response here")));
        }
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_deref());
        if !matches!(verbosity, None | Some("medium")) {
            return Err(ApiError::field("text.verbosity", "no model here has levels of it"));
        }
        let summary = self.reasoning.as_ref().and_then(|reasoning| reasoning.summary.as_deref());
        if !matches!(summary, None | Some("auto")) {
            let why = "reasoning is told as it is, not in summary";
            return Err(ApiError::field("reasoning.summary", why));
        }
        let has_logprobs = self.include.iter().any(|name| name == LOGPROBS);
        let response_format = match self.text.as_ref().and_then(|text| text.format.as_ref()) {
            None | Some(Format::Text) => None,
            Some(Format::JsonObject) => Some(ResponseFormat::JsonObject),
            Some(Format::JsonSchema { schema, .. }) => Some(ResponseFormat::schema(schema.clone())),
        };
        Ok(Settings {
            max_completion_tokens: self.max_output_tokens,
            logprobs: (has_logprobs || self.top_logprobs.is_some()).then_some(Value::Bool(true)),
            response_format,
            ..Settings::of(body)?
        })
    }

    fn chat_tool_choice(&self) -> Result<Option<Value>, ApiError> {
        match &self.tool_choice {
            Some(Value::Object(choice)) => match (choice.get("type"), choice.get("name")) {
                (Some(Value::String(kind)), Some(name)) if kind == "function" => {
                    Ok(Some(json!({ "type": "function", "function": { "name": name } })))
                }
                _ => Err(ApiError::field(
                    "tool_choice",
                    "must be `none`, `auto`, `required` or a function by its name",
                )),
            },
            other => Ok(other.clone()),
        }
    }

    /// The response without its output.
    fn shell(self, answer: &Answer, body: &Map<String, Value>) -> Value {
        let given = |name: &str, otherwise: Value| body.get(name).cloned().unwrap_or(otherwise);
        json!({
            "id": format!("resp_{}", answer.number),
            "object": "response",
            "created_at": answer.created,
            "model": answer.served.name,
            "status": "in_progress",
            "error": null,
            "incomplete_details": null,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata.unwrap_or_default(),
            "output": [],
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": self.previous_response_id,
            "reasoning": given("reasoning", json!({ "effort": null, "summary": null })),
            "store": self.store.unwrap_or(true),
            "temperature": self.temperature,
            "text": given("text", json!({ "format": { "type": "text" } })),
            "tool_choice": given("tool_choice", json!("auto")),
            "tools": given("tools", json!([])),
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": null,
        })
    }
}

fn chat_tool(Tool::Function { name, description, parameters, strict }: &Tool) -> Value {
    let mut function = json!({ "name": name });
    if let Some(description) = description {
        function["description"] = json!(description);
    }
    if let Some(parameters) = parameters {
        function["parameters"] = parameters.clone();
    }
    if let Some(strict) = strict {
        function["strict"] = json!(strict);
    }
    json!({ "type": "function", "function": function })
}

/// Adds an item of the input to the messages of a chat.
fn add(messages: &mut Vec<Value>, at: usize, item: &Map<String, Value>) -> Result<(), ApiError> {
    let wrong = |field: &str, why: &str| Err(ApiError::field(&format!("input[{at}]{field}"), why));
    let text = |name: &str| item.get(name).and_then(Value::as_str);
    // Calls and reasoning belong to one message, in a chat.
    let assistant = |messages: &mut Vec<Value>| {
        let continues = messages.last().is_some_and(|last| last["role"] == "assistant");
        if !continues {
            messages.push(json!({ "role": "assistant", "content": "" }));
        }
        messages.len() - 1
    };
    match text("type") {
        None | Some("message") => {
            let Some(role) = text("role") else { return wrong(".role", "is missing") };
            let content = item.get("content").cloned().unwrap_or_default();
            match messages.last_mut() {
                // After its reasoning.
                Some(last) if role == "assistant" && last["role"] == role && last["content"] == "" => {
                    last["content"] = content;
                }
                _ => messages.push(json!({ "role": role, "content": content })),
            }
        }
        Some("function_call") => {
            let (Some(id), Some(name), Some(arguments)) = (text("call_id"), text("name"), text("arguments"))
            else {
                return wrong("", "must have `call_id`, `name` and `arguments`");
            };
            let message = assistant(messages);
            let function = json!({ "name": name, "arguments": arguments });
            let call = json!({ "id": id, "type": "function", "function": function });
            match messages[message].get_mut("tool_calls").and_then(Value::as_array_mut) {
                Some(calls) => calls.push(call),
                None => messages[message]["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let Some(id) = text("call_id") else { return wrong(".call_id", "is missing") };
            let output = item.get("output").cloned().unwrap_or_default();
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
        }
        Some("reasoning") => {
            let parts = item.get("content").and_then(Value::as_array).into_iter().flatten();
            let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
            if !text.is_empty() {
                messages.push(json!({ "role": "assistant", "content": "", "reasoning_content": text }));
            }
        }
        Some(kind) => return wrong(".type", &format!("`{kind}` is not read here")),
    }
    Ok(())
}
