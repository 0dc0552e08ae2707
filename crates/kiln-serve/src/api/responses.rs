//! `/v1/responses`, and the responses that are kept for the next one.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use kiln::AnswerPart;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value, json};

use super::{
    Body, Server,
    answer::{Answer, Form, Frame, Step},
    chat, fields, logprobs, parsed,
    settings::{ResponseFormat, Settings},
    turn::Turn,
};
use crate::{error::ApiError, fields as known, guard::Key};

/// Most responses that are kept, and their bytes. The oldest are dropped.
const MOST_STORED: usize = 1000;
const STORED_BYTES: usize = 64 << 20;

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
    kiln: Option<Value>,
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

/// The responses that are kept for later ones, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Stored(Mutex<VecDeque<Kept>>);

#[derive(Debug)]
struct Kept {
    key: Key,
    response: Value,
    /// The conversation with the answer, as messages of a chat.
    messages: Vec<Value>,
    bytes: usize,
}

impl Stored {
    fn all(&self) -> std::sync::MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, key: Key, response: Value, messages: Vec<Value>) {
        let text = |value: &Value| value.to_string().len();
        let bytes = text(&response) + messages.iter().map(text).sum::<usize>();
        let mut all = self.all();
        all.push_back(Kept { key, response, messages, bytes });
        let mut held: usize = all.iter().map(|kept| kept.bytes).sum();
        while all.len() > MOST_STORED || held > STORED_BYTES {
            held -= all.pop_front().map_or(0, |kept| kept.bytes);
        }
    }

    /// A part of the response with this name, unless it is another user's.
    fn find<T>(&self, key: Key, id: &str, part: impl FnOnce(&Kept) -> T) -> Result<T, ApiError> {
        let all = self.all();
        let kept = all.iter().find(|kept| kept.key == key && kept.response["id"] == id);
        kept.map(part).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> ApiError {
    let message = format!("there is no response `{id}`: it was not stored, or others took its place");
    ApiError {
        code: Some("response_not_found"),
        param: Some("previous_response_id".to_owned()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

pub(super) async fn get(
    Extension(stored): Extension<Arc<Stored>>,
    Extension(key): Extension<Key>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    stored.find(key, &id, |kept| kept.response.clone()).map(Json)
}

pub(super) async fn delete(
    Extension(stored): Extension<Arc<Stored>>,
    Extension(key): Extension<Key>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    stored.find(key, &id, |_| ())?;
    stored.all().retain(|kept| !(kept.key == key && kept.response["id"] == id));
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
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
    let settings = request.settings()?;
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
    let form =
        Responses { shell: request.shell(&answer, &body), store, items: Vec::new(), open: None, sent: 0 };
    answer.respond(form, streams).await
}

impl Request {
    fn settings(&self) -> Result<Settings, ApiError> {
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
        let kiln = self.kiln.clone().map(serde_json::from_value).transpose();
        Ok(Settings {
            max_completion_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            logprobs: (has_logprobs || self.top_logprobs.is_some()).then_some(Value::Bool(true)),
            top_logprobs: self.top_logprobs,
            response_format,
            kiln: kiln.map_err(|error| ApiError::field("kiln", error))?,
            ..Settings::default()
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

/// The form of responses.
struct Responses {
    /// The response without its output.
    shell: Value,
    /// Whether and for whom it is kept, with the conversation so far.
    store: Option<(Arc<Stored>, Key, Vec<Value>)>,
    /// The items of the output that are whole.
    items: Vec<Value>,
    /// The item that a stream is in, and its text.
    open: Option<(Kind, String)>,
    /// Number of events.
    sent: usize,
}

/// The kind of an item with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
}

impl Kind {
    /// The names of events: the prefix, and that of its text.
    fn events(self) -> [&'static str; 2] {
        match self {
            Self::Message => ["response.output_text.delta", "response.output_text.done"],
            Self::Reasoning => ["response.reasoning_text.delta", "response.reasoning_text.done"],
        }
    }

    fn part(self, text: &str) -> Value {
        match self {
            Self::Message => {
                json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
            }
            Self::Reasoning => json!({ "type": "reasoning_text", "text": text }),
        }
    }

    /// The item. Without a text, it begins.
    fn item(self, id: &str, text: Option<&str>) -> Value {
        let status = if text.is_some() { "completed" } else { "in_progress" };
        let content: Vec<Value> = text.map(|text| self.part(text)).into_iter().collect();
        match self {
            Self::Message => json!({
                "id": id, "type": "message", "role": "assistant", "status": status, "content": content,
            }),
            Self::Reasoning => json!({
                "id": id, "type": "reasoning", "summary": [], "status": status, "content": content,
            }),
        }
    }
}

impl Responses {
    /// The identity of the next item.
    fn id(&self, answer: &Answer, kind: &str) -> String {
        format!("{kind}_{}_{}", answer.number, self.items.len())
    }

    fn text_id(&self, answer: &Answer, kind: Kind) -> String {
        self.id(answer, if kind == Kind::Message { "msg" } else { "rs" })
    }

    fn event(&mut self, frames: &mut Vec<Frame>, name: &'static str, mut event: Value) {
        event["type"] = json!(name);
        event["sequence_number"] = json!(self.sent);
        self.sent += 1;
        frames.push(Frame::named(name, &event));
    }

    /// Ends the item with a text, unless the next part is of the same kind.
    fn close(&mut self, frames: &mut Vec<Frame>, answer: &Answer, next: Option<Kind>) {
        let Some((kind, text)) = self.open.take_if(|(kind, _)| Some(*kind) != next) else { return };
        let (id, index) = (self.text_id(answer, kind), self.items.len());
        let place = || json!({ "item_id": id, "output_index": index, "content_index": 0 });
        let mut done = place();
        done["text"] = json!(text);
        if kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        self.event(frames, kind.events()[1], done);
        let mut part = place();
        part["part"] = kind.part(&text);
        self.event(frames, "response.content_part.done", part);
        let item = kind.item(&id, Some(&text));
        let done = json!({ "output_index": index, "item": item });
        self.event(frames, "response.output_item.done", done);
        self.items.push(item);
    }

    fn text(&mut self, frames: &mut Vec<Frame>, answer: &mut Answer, kind: Kind, text: &str) {
        self.close(frames, answer, Some(kind));
        let (id, index) = (self.text_id(answer, kind), self.items.len());
        let place = || json!({ "item_id": id, "output_index": index, "content_index": 0 });
        if self.open.is_none() {
            let added = json!({ "output_index": index, "item": kind.item(&id, None) });
            self.event(frames, "response.output_item.added", added);
            let mut part = place();
            part["part"] = kind.part("");
            self.event(frames, "response.content_part.added", part);
            self.open = Some((kind, String::new()));
        }
        let mut delta = place();
        delta["delta"] = json!(text);
        if kind == Kind::Message {
            let tokens = answer.take_tokens(0);
            delta["logprobs"] = logprobs::of_chat(&answer.served.model, &tokens);
        }
        self.event(frames, kind.events()[0], delta);
        if let Some((_, all)) = &mut self.open {
            all.push_str(text);
        }
    }

    fn call_item(&self, answer: &Answer, call: usize, is_whole: bool) -> Value {
        let own = &answer.choices[0].message.calls[call];
        json!({
            "id": self.id(answer, "fc"),
            "type": "function_call",
            "call_id": answer.call_id(0, call),
            "name": own.name,
            "arguments": if is_whole { own.arguments.as_str() } else { "" },
            "status": if is_whole { "completed" } else { "in_progress" },
        })
    }

    fn call(&mut self, frames: &mut Vec<Frame>, answer: &Answer, call: usize) {
        self.close(frames, answer, None);
        let (id, index) = (self.id(answer, "fc"), self.items.len());
        let arguments = &answer.choices[0].message.calls[call].arguments;
        let begun = self.call_item(answer, call, false);
        self.event(frames, "response.output_item.added", json!({ "output_index": index, "item": begun }));
        let delta = json!({ "item_id": id, "output_index": index, "delta": arguments });
        self.event(frames, "response.function_call_arguments.delta", delta);
        let name = &answer.choices[0].message.calls[call].name;
        let done = json!({ "item_id": id, "output_index": index, "arguments": arguments, "name": name });
        self.event(frames, "response.function_call_arguments.done", done);
        let item = self.call_item(answer, call, true);
        self.event(frames, "response.output_item.done", json!({ "output_index": index, "item": item }));
        self.items.push(item);
    }

    /// The response with its output, which is kept if it is to be.
    fn response(&mut self, answer: &Answer) -> Value {
        let usage = &answer.usage;
        let is_cut = answer.finish_reason(0) == Some("length");
        let mut response = self.shell.clone();
        response["status"] = json!(if is_cut { "incomplete" } else { "completed" });
        if is_cut {
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        response["output"] = json!(self.items);
        response["completed_at"] = json!(super::now());
        response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached, "cache_write_tokens": 0 },
            "output_tokens": usage.generated,
            "output_tokens_details": { "reasoning_tokens": usage.reasoning },
            "total_tokens": usage.prompt + usage.generated,
        });
        if let Some((stored, key, mut messages)) = self.store.take() {
            for item in &self.items {
                if let Value::Object(item) = item {
                    // Each is of a kind that is read.
                    _ = add(&mut messages, 0, item);
                }
            }
            stored.keep(key, response.clone(), messages);
        }
        response
    }
}

impl Form for Responses {
    fn whole(mut self, mut answer: Answer) -> Value {
        let logprobs = match answer.logprobs {
            true => {
                let tokens = answer.take_tokens(0);
                logprobs::of_chat(&answer.served.model, &tokens)
            }
            false => json!([]),
        };
        let message = &answer.choices[0].message;
        if !message.reasoning.is_empty() {
            let id = self.text_id(&answer, Kind::Reasoning);
            self.items.push(Kind::Reasoning.item(&id, Some(&message.reasoning)));
        }
        if !message.content.is_empty() || message.calls.is_empty() {
            let id = self.text_id(&answer, Kind::Message);
            let mut item = Kind::Message.item(&id, Some(&message.content));
            item["content"][0]["logprobs"] = logprobs;
            self.items.push(item);
        }
        for call in 0..answer.choices[0].message.calls.len() {
            self.items.push(self.call_item(&answer, call, true));
        }
        self.response(&answer)
    }

    fn begin(&mut self, _: &mut Answer) -> Vec<Frame> {
        let mut frames = Vec::new();
        for name in ["response.created", "response.in_progress"] {
            self.event(&mut frames, name, json!({ "response": self.shell }));
        }
        frames
    }

    fn step(&mut self, answer: &mut Answer, Step { parts, .. }: Step) -> Vec<Frame> {
        let calls = parts.iter().filter(|part| matches!(part, AnswerPart::Call(_))).count();
        let mut call = answer.choices[0].message.calls.len() - calls;
        let mut frames = Vec::new();
        for part in parts {
            match part {
                AnswerPart::Content(text) => self.text(&mut frames, answer, Kind::Message, &text),
                AnswerPart::Reasoning(text) => self.text(&mut frames, answer, Kind::Reasoning, &text),
                AnswerPart::Call(_) => {
                    self.call(&mut frames, answer, call);
                    call += 1;
                }
                _ => {}
            }
        }
        frames
    }

    fn end(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let mut frames = Vec::new();
        self.close(&mut frames, answer, None);
        let response = self.response(answer);
        let name = match response["status"] == "completed" {
            true => "response.completed",
            false => "response.incomplete",
        };
        self.event(&mut frames, name, json!({ "response": response }));
        frames
    }

    fn error(&mut self, error: &ApiError) -> Vec<Frame> {
        let mut frames = Vec::new();
        let event = json!({ "code": error.code, "message": error.message, "param": error.param });
        self.event(&mut frames, "error", event);
        frames
    }
}
