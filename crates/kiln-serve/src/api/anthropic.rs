//! Anthropic's `/v1/messages`

use axum::{Extension, Json, extract::State, response::Response};
use kiln::{AnswerPart, Message, StopReason};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value, json};

use super::{
    Body, Server,
    answer::{Answer, Choice, Form, Frame, Step},
    chat, fields, parsed,
    settings::{OneOrMany, ResponseFormat, Settings},
    turn::Turn,
};
use crate::{
    error::{ApiError, ErrorForm},
    fields as known,
    guard::Key,
};

#[derive(Debug, Deserialize)]
struct Request {
    model: Option<String>,
    messages: Option<Vec<Given>>,
    max_tokens: Option<usize>,
    system: Option<Content>,
    #[serde(default)]
    stop_sequences: Vec<String>,
    #[serde(default)]
    stream: bool,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    #[serde(default)]
    tools: Vec<Tool>,
    tool_choice: Option<ToolChoice>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    kiln: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    role: Role,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    User,
    Assistant,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text, or a list of blocks of text, thinking, tool_use or tool_result")]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Block {
    Text {
        text: String,
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
        #[serde(default, rename = "citations")]
        _citations: IgnoredAny,
    },
    Thinking {
        thinking: String,
        #[serde(default, rename = "signature")]
        _signature: IgnoredAny,
    },
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<Content>,
        #[serde(default)]
        is_error: bool,
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
    strict: Option<bool>,
    #[serde(default)]
    input_examples: Vec<Value>,
    #[serde(default)]
    defer_loading: bool,
    #[serde(default, rename = "cache_control")]
    _cache_control: IgnoredAny,
    #[serde(default, rename = "eager_input_streaming")]
    _eager_input_streaming: IgnoredAny,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<usize>,
    display: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputConfig {
    effort: Option<String>,
    format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum OutputFormat {
    JsonSchema { schema: Value },
}

pub(super) async fn answer(
    State(models): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let (request, turn) = request(parsed(body).await?)?;
    let Some(max_tokens) = request.max_tokens else {
        return Err(ApiError::field("max_tokens", "is missing"));
    };
    let format = request.output_config.and_then(|config| config.format);
    let settings = Settings {
        max_tokens: Some(max_tokens),
        stop: Some(OneOrMany::Many(request.stop_sequences.clone())),
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k,
        response_format: format.map(|OutputFormat::JsonSchema { schema }| ResponseFormat::schema(schema)),
        kiln: request.kiln.map(serde_json::from_value).transpose().map_err(|e| ApiError::field("kiln", e))?,
        ..Settings::default()
    };
    let served = models.get(request.model.as_deref()).await?;
    let choices = settings.choices(&served, key)?;
    let shows = request.thinking.is_none_or(|thinking| thinking.display.as_deref() != Some("omitted"));
    let answer = turn.begin(served, choices).await?;
    let form = Messages { max_tokens, stops: request.stop_sequences, shows, open: None, blocks: 0 };
    answer.respond(form, request.stream).await
}

pub(super) async fn count_tokens(State(models): Server, body: Body) -> Result<Json<Value>, ApiError> {
    let (request, turn) = request(parsed(body).await?)?;
    let served = models.get(request.model.as_deref()).await?;
    let tokens = super::encode(served.clone(), turn.prompt(&served).await?, false).await?;
    Ok(Json(json!({ "input_tokens": tokens.len() })))
}

fn request(mut body: Map<String, Value>) -> Result<(Request, Turn), ApiError> {
    known::check(&mut body, &[known::MESSAGES])?;
    let mut request: Request = fields(&body)?;
    if request.model.is_none() {
        return Err(ApiError::field("model", "is missing"));
    }
    let Some(given) = request.messages.take() else {
        return Err(ApiError::field("messages", "is missing"));
    };
    let continues = given.last().is_some_and(|last| last.role == Role::Assistant);
    let mut messages = Vec::new();
    if let Some(system) = request.system.take() {
        let text = text_of(system, "system")?;
        // Some clients send an empty one.
        if !text.is_empty() {
            messages.push(Message::new("system", &text));
        }
    }
    for (at, Given { role, content }) in given.into_iter().enumerate() {
        add(&mut messages, at, role, content)?;
    }
    let tools: Vec<Value> =
        request.tools.drain(..).enumerate().map(|(at, own)| tool(at, own)).collect::<Result<_, _>>()?;
    let (tool_choice, parallel_tool_calls) = match request.tool_choice.take() {
        None => (None, None),
        Some(ToolChoice { kind, name, disable_parallel_tool_use }) => {
            let choice = match (kind.as_str(), name) {
                ("auto" | "none", None) => json!(kind),
                ("any", None) => json!("required"),
                ("tool", Some(name)) => json!({ "type": "function", "function": { "name": name } }),
                _ => {
                    let why = "must be of the type `auto`, `any` or `none`, or `tool` with a name";
                    return Err(ApiError::field("tool_choice", why));
                }
            };
            (Some(choice), Some(!disable_parallel_tool_use))
        }
    };
    let (mut thinks, mut budget) = (None, None);
    if let Some(thinking) = &request.thinking {
        match (thinking.kind.as_str(), thinking.budget_tokens) {
            ("enabled", Some(tokens)) => (thinks, budget) = (Some(true), Some(tokens)),
            ("disabled", None) => thinks = Some(false),
            // As the model likes.
            ("adaptive", None) => {}
            ("enabled", None) => return Err(ApiError::field("thinking.budget_tokens", "is missing")),
            _ => {
                let why = "must be `enabled` with `budget_tokens`, `adaptive` or `disabled`";
                return Err(ApiError::field("thinking.type", why));
            }
        }
        if !matches!(thinking.display.as_deref(), None | Some("summarized" | "omitted")) {
            return Err(ApiError::field("thinking.display", "must be `summarized` or `omitted`"));
        }
    }
    let turn = Turn {
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        thinks,
        budget,
        effort: request.output_config.as_ref().and_then(|config| config.effort.clone()),
        continues,
        ..Turn::default()
    };
    Ok((request, turn))
}

/// Adds a message. Results of tools are messages of their own in chat templates.
fn add(messages: &mut Vec<Message>, at: usize, role: Role, content: Content) -> Result<(), ApiError> {
    let wrong = |why: &str| Err(ApiError::field(&format!("messages[{at}].content"), why));
    let mut push = |message: Value| {
        let Value::Object(message) = message else { return Ok(()) };
        messages.push(chat::message(at, message)?);
        Ok::<_, ApiError>(())
    };
    let role_name = match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    };
    let blocks = match content {
        Content::Text(text) => return push(json!({ "role": role_name, "content": text })),
        Content::Blocks(blocks) => blocks,
    };
    let (mut texts, mut reasoning, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match (block, role) {
            (Block::Text { text, .. }, _) => texts.push(text),
            (Block::Thinking { thinking, .. }, Role::Assistant) => reasoning.push(thinking),
            (Block::ToolUse { id, name, input, .. }, Role::Assistant) => {
                let function = json!({ "name": name, "arguments": input });
                calls.push(json!({ "id": id, "type": "function", "function": function }));
            }
            (Block::ToolResult { tool_use_id, content, is_error, .. }, Role::User) => {
                let mut text = content.map_or(Ok(String::new()), |content| {
                    text_of(content, &format!("messages[{at}].content"))
                })?;
                if is_error {
                    // Templates have no mark for it.
                    text.insert_str(0, "Error: ");
                }
                push(json!({ "role": "tool", "tool_call_id": tool_use_id, "content": text }))?;
            }
            (Block::Thinking { .. } | Block::ToolUse { .. }, _) => {
                return wrong("has a block that only the assistant writes");
            }
            (Block::ToolResult { .. }, _) => return wrong("has a `tool_result`, which the user sends"),
        }
    }
    if texts.is_empty() && calls.is_empty() && reasoning.is_empty() {
        return Ok(());
    }
    let mut message = json!({ "role": role_name, "content": texts.join("\n") });
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning.join("\n"));
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    push(message)
}

fn text_of(content: Content, field: &str) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Blocks(blocks) => {
            let text = |block| match block {
                Block::Text { text, .. } => Ok(text),
                _ => Err(ApiError::field(field, "must consist of blocks of text")),
            };
            Ok(blocks.into_iter().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
    }
}

/// A tool in OpenAI's form.
fn tool(at: usize, tool: Tool) -> Result<Value, ApiError> {
    let wrong = |field: &str, why: &str| Err(ApiError::field(&format!("tools[{at}].{field}"), why));
    if tool.kind.as_ref().is_some_and(|kind| kind != "custom") {
        return wrong("type", "is a tool of Anthropic's servers; only `custom` is known here");
    }
    if !tool.input_examples.is_empty() {
        return wrong("input_examples", "are not shown to the model; put them into the description");
    }
    if tool.defer_loading {
        return wrong("defer_loading", "there is no search for tools here; leave it out");
    }
    let mut function = json!({ "name": tool.name });
    if let Some(description) = tool.description {
        function["description"] = json!(description);
    }
    if let Some(schema) = tool.input_schema {
        function["parameters"] = schema;
    }
    if let Some(strict) = tool.strict {
        function["strict"] = json!(strict);
    }
    Ok(json!({ "type": "function", "function": function }))
}

/// Anthropic's form of an answer.
struct Messages {
    max_tokens: usize,
    stops: Vec<String>,
    /// Whether reasoning is shown.
    shows: bool,
    /// The kind of the block that is open in a stream.
    open: Option<&'static str>,
    /// Number of blocks that ended.
    blocks: usize,
}

impl Messages {
    fn message(answer: &Answer, content: Vec<Value>) -> Value {
        json!({
            "id": format!("msg_{}", answer.number),
            "type": "message",
            "role": "assistant",
            "model": answer.served.name,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(answer),
        })
    }

    /// The reason for which the answer ended, and the stop sequence.
    fn stop(&self, answer: &Answer) -> [Value; 2] {
        let Choice { message, end, .. } = &answer.choices[0];
        let Some(end) = end else { return [Value::Null, Value::Null] };
        let stop = end.stop.as_ref().filter(|stop| self.stops.contains(stop));
        let reason = match end.reason {
            StopReason::StopString if stop.is_some() => "stop_sequence",
            StopReason::EndOfText | StopReason::StopString if !message.calls.is_empty() => "tool_use",
            StopReason::EndOfText | StopReason::StopString => "end_turn",
            _ if answer.usage.generated < self.max_tokens => "model_context_window_exceeded",
            _ => "max_tokens",
        };
        [json!(reason), json!(stop)]
    }

    /// Ends the open block, and begins one of this kind unless it goes on.
    fn change(&mut self, frames: &mut Vec<Frame>, kind: Option<&'static str>, block: Value) {
        if self.open.is_some() && (self.open != kind || kind == Some("tool_use")) {
            let stop = json!({ "type": "content_block_stop", "index": self.blocks });
            frames.push(Frame::named("content_block_stop", &stop));
            (self.open, self.blocks) = (None, self.blocks + 1);
        }
        if self.open.is_none() && kind.is_some() {
            let start =
                json!({ "type": "content_block_start", "index": self.blocks, "content_block": block });
            frames.push(Frame::named("content_block_start", &start));
            self.open = kind;
        }
    }

    fn delta(&self, frames: &mut Vec<Frame>, delta: Value) {
        let delta = json!({ "type": "content_block_delta", "index": self.blocks, "delta": delta });
        frames.push(Frame::named("content_block_delta", &delta));
    }
}

fn usage(answer: &Answer) -> Value {
    let usage = &answer.usage;
    json!({
        "input_tokens": usage.prompt.saturating_sub(usage.cached),
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.generated,
    })
}

fn tool_use(answer: &Answer, call: usize, input: &Value) -> Value {
    let name = &answer.choices[0].message.calls[call].name;
    json!({ "type": "tool_use", "id": answer.call_id(0, call), "name": name, "input": input })
}

impl Form for Messages {
    fn whole(self, mut answer: Answer) -> Value {
        answer.choices[0].message.only_whole_calls();
        let message = &answer.choices[0].message;
        let mut content = Vec::new();
        if !message.reasoning.is_empty() && self.shows {
            content.push(json!({ "type": "thinking", "thinking": message.reasoning, "signature": "" }));
        }
        if !message.content.is_empty() {
            content.push(json!({ "type": "text", "text": message.content }));
        }
        for (at, call) in message.calls.iter().enumerate() {
            let input = serde_json::from_str(&call.arguments).unwrap_or_default();
            content.push(tool_use(&answer, at, &input));
        }
        let mut whole = Self::message(&answer, content);
        [whole["stop_reason"], whole["stop_sequence"]] = self.stop(&answer);
        answer.tell_inexact(&mut whole);
        whole
    }

    fn begin(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let start = json!({ "type": "message_start", "message": Self::message(answer, Vec::new()) });
        vec![Frame::named("message_start", &start), Frame::named("ping", &json!({ "type": "ping" }))]
    }

    fn step(&mut self, answer: &mut Answer, Step { parts, calls: mut call, .. }: Step) -> Vec<Frame> {
        let mut frames = Vec::new();
        for part in parts {
            match part {
                AnswerPart::Content(text) => {
                    self.change(&mut frames, Some("text"), json!({ "type": "text", "text": "" }));
                    self.delta(&mut frames, json!({ "type": "text_delta", "text": text }));
                }
                AnswerPart::Reasoning(text) if self.shows => {
                    let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                    self.change(&mut frames, Some("thinking"), block);
                    self.delta(&mut frames, json!({ "type": "thinking_delta", "thinking": text }));
                }
                AnswerPart::Call(own) => {
                    self.change(&mut frames, Some("tool_use"), tool_use(answer, call, &json!({})));
                    let delta = json!({ "type": "input_json_delta", "partial_json": own.arguments });
                    self.delta(&mut frames, delta);
                    call += 1;
                }
                AnswerPart::Arguments(more) => {
                    self.delta(&mut frames, json!({ "type": "input_json_delta", "partial_json": more }));
                }
                _ => {}
            }
        }
        frames
    }

    fn end(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let mut frames = Vec::new();
        self.change(&mut frames, None, Value::Null);
        let [reason, stop] = self.stop(answer);
        let delta = json!({ "stop_reason": reason, "stop_sequence": stop });
        let mut delta = json!({ "type": "message_delta", "delta": delta, "usage": usage(answer) });
        answer.tell_inexact(&mut delta);
        frames.push(Frame::named("message_delta", &delta));
        frames.push(Frame::named("message_stop", &json!({ "type": "message_stop" })));
        frames
    }

    fn error(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![Frame::named("error", &error.body(ErrorForm::Anthropic))]
    }
}
