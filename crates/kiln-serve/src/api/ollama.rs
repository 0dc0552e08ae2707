//! ollama's API: `/api/chat`, `/api/generate`, `/api/embed` and the models.

mod embed;
mod models;

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use kiln::AnswerPart;
use serde::Deserialize;
use serde_json::{Map, Value, json};

pub(super) use self::{
    embed::{embed, old_embed},
    models::{forbidden, ps, show, tags, version},
};
use super::{
    Body, Server,
    answer::{Answer, Form, Frame, Step},
    chat, completions, date, fields, logprobs, now, parsed,
    prompts::Prompt,
    reader,
    settings::{OneOrMany, ResponseFormat, Settings},
    turn::Turn,
};
use crate::{
    error::{ApiError, ErrorForm},
    fields as known,
    guard::Key,
    models::Models,
};

/// The settings that `/api/chat` and `/api/generate` share.
#[derive(Debug, Deserialize)]
struct Common {
    model: Option<String>,
    #[serde(default = "streams")]
    stream: bool,
    #[serde(default)]
    options: Map<String, Value>,
    format: Option<Value>,
    keep_alive: Option<KeepAlive>,
    think: Option<Think>,
    #[serde(default)]
    logprobs: bool,
    top_logprobs: Option<u64>,
    kiln: Option<Value>,
}

fn streams() -> bool {
    true
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a number of seconds, or a text such as `5m`")]
enum KeepAlive {
    Seconds(f64),
    Text(String),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "true, false, or a level")]
enum Think {
    Plain(bool),
    Level(String),
}

#[derive(Debug, Deserialize)]
struct Options {
    seed: Option<i64>,
    num_predict: Option<i64>,
    num_ctx: Option<usize>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    temperature: Option<f32>,
    stop: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
struct ChatRequest {
    #[serde(default)]
    messages: Vec<Map<String, Value>>,
    #[serde(default)]
    tools: Vec<Value>,
}

#[derive(Debug, Deserialize)]
struct GenerateRequest {
    #[serde(default)]
    prompt: String,
    system: Option<String>,
    #[serde(default)]
    raw: bool,
}

pub(super) async fn chat(
    State(models): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::OLLAMA_CHAT, known::OLLAMA])?;
    let common: Common = fields(&body)?;
    let ChatRequest { messages, tools } = fields(&body)?;
    let name = common.name()?;
    common.keep(&models)?;
    if messages.is_empty() {
        return loaded(&models, name, common.keep_alive.as_ref(), Kind::Chat).await;
    }
    let messages = messages.into_iter().enumerate().map(|(at, own)| message(at, own));
    let messages = messages.collect::<Result<_, _>>()?;
    let served = models.get(Some(name)).await?;
    let turn = Turn { messages, tools, ..common.turn() };
    let choices = common.settings()?.choices(&served, key)?;
    turn.begin(served, choices).await?.respond(Ollama { kind: Kind::Chat, told: 0 }, common.stream).await
}

pub(super) async fn generate(
    State(models): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let mut body: Map<String, Value> = parsed(body).await?;
    known::check(&mut body, &[known::OLLAMA_GENERATE, known::OLLAMA])?;
    let common: Common = fields(&body)?;
    let GenerateRequest { prompt, system, raw } = fields(&body)?;
    let name = common.name()?;
    common.keep(&models)?;
    if prompt.is_empty() {
        return loaded(&models, name, common.keep_alive.as_ref(), Kind::Generate).await;
    }
    let served = models.get(Some(name)).await?;
    let choices = common.settings()?.choices(&served, key)?;
    let answer = match raw {
        true if system.is_some() => return Err(ApiError::field("system", "goes without `raw`")),
        true if common.think.is_some() => return Err(ApiError::field("think", "goes without `raw`")),
        true => completions::begin(served, vec![Prompt::Text(prompt)], choices).await?,
        false => {
            let system = system.map(|system| kiln::Message::new("system", &system));
            let messages = system.into_iter().chain([kiln::Message::new("user", &prompt)]).collect();
            Turn { messages, ..common.turn() }.begin(served, choices).await?
        }
    };
    answer.respond(Ollama { kind: Kind::Generate, told: 0 }, common.stream).await
}

impl Common {
    fn name(&self) -> Result<&str, ApiError> {
        self.model.as_deref().ok_or_else(|| ApiError::field("model", "is missing"))
    }

    /// Sets the time that the model stays loaded.
    fn keep(&self, models: &Models) -> Result<(), ApiError> {
        keep(models, self.name()?, self.keep_alive.as_ref())
    }

    fn turn(&self) -> Turn {
        match self.think.clone() {
            None => Turn::default(),
            Some(Think::Plain(thinks)) => Turn { thinks: Some(thinks), ..Turn::default() },
            Some(Think::Level(level)) => Turn { effort: Some(level), ..Turn::default() },
        }
    }

    fn settings(&self) -> Result<Settings, ApiError> {
        let mut options = self.options.clone();
        known::check(&mut options, &[known::OLLAMA_OPTIONS]).map_err(|error| ApiError {
            param: error.param.map(|name| format!("options.{name}")),
            ..error
        })?;
        let options: Options = fields(&options)?;
        let response_format = match &self.format {
            None => None,
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) if text == "json" => Some(ResponseFormat::JsonObject),
            Some(schema @ Value::Object(_)) => Some(ResponseFormat::schema(schema.clone())),
            Some(_) => return Err(ApiError::field("format", "must be `json` or a JSON schema")),
        };
        // Ours is over all tokens, as in Transformers.
        if options.repeat_penalty.is_some_and(|penalty| penalty != 1.0)
            && !matches!(options.repeat_last_n, None | Some(-1))
        {
            let why = "must be -1: a penalty is for all tokens";
            return Err(ApiError::field("options.repeat_last_n", why));
        }
        let max_tokens = match options.num_predict {
            // Until the text ends, or the positions do.
            None | Some(-1 | -2) => None,
            Some(tokens) => match usize::try_from(tokens) {
                Ok(tokens) => Some(tokens),
                Err(_) => {
                    let why = format!("is {tokens}, must be at least 1, or -1 for no limit");
                    return Err(ApiError::field("options.num_predict", why));
                }
            },
        };
        Ok(Settings {
            seed: options.seed,
            max_tokens,
            context: options.num_ctx,
            top_k: options.top_k,
            top_p: options.top_p,
            min_p: options.min_p,
            typical_p: options.typical_p,
            // ollama has 1 for none, as Transformers.
            repetition_penalty: options.repeat_penalty,
            presence_penalty: options.presence_penalty,
            frequency_penalty: options.frequency_penalty,
            temperature: options.temperature,
            stop: options.stop,
            response_format,
            logprobs: self.logprobs.then_some(Value::Bool(true)),
            top_logprobs: self.top_logprobs,
            kiln: self
                .kiln
                .clone()
                .map(serde_json::from_value)
                .transpose()
                .map_err(|e| ApiError::field("kiln", e))?,
            ..Settings::default()
        })
    }
}

/// Sets the time that a model stays loaded. A negative one is for ever; none is that of the server.
fn keep(models: &Models, name: &str, time: Option<&KeepAlive>) -> Result<(), ApiError> {
    let Some(time) = time else { return models.keep(name, None) };
    let wrong = || ApiError::field("keep_alive", "must be a number of seconds, or a text such as `5m`");
    let seconds = match time {
        KeepAlive::Seconds(seconds) => *seconds,
        KeepAlive::Text(text) => seconds(text).ok_or_else(wrong)?,
    };
    let time = match seconds {
        ..0.0 => None,
        // Ten years are for ever, too.
        _ => Some(Duration::try_from_secs_f64(seconds.min(3e8)).map_err(|_| wrong())?),
    };
    models.keep(name, Some(time))
}

/// The seconds of a text such as `1h30m`, `300ms` or `-1`.
fn seconds(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        sum += number
            * match &rest[..unit] {
                "" | "s" => 1.0,
                "ms" => 1e-3,
                "m" => 60.0,
                "h" => 3600.0,
                _ => return None,
            };
        rest = &rest[unit..];
    }
    (!text.is_empty()).then_some(sign * sum)
}

/// Loads a model, or unloads it, for a request without a prompt.
async fn loaded(
    models: &Arc<Models>,
    name: &str,
    time: Option<&KeepAlive>,
    kind: Kind,
) -> Result<Response, ApiError> {
    let unloads = time.is_some_and(|time| match time {
        KeepAlive::Seconds(seconds) => *seconds == 0.0,
        KeepAlive::Text(text) => seconds(text) == Some(0.0),
    });
    if unloads {
        models.unload_idle();
    } else {
        models.get(Some(name)).await?;
    }
    let mut answer = kind.of("", "", &[]);
    answer["model"] = json!(models.name(Some(name))?);
    answer["created_at"] = json!(date(now()));
    answer["done"] = json!(true);
    answer["done_reason"] = json!(if unloads { "unload" } else { "load" });
    Ok(Json(answer).into_response())
}

/// A message in the form of OpenAI's chat.
fn message(at: usize, mut own: Map<String, Value>) -> Result<kiln::Message, ApiError> {
    let wrong = |field: &str, why: &str| Err(ApiError::field(&format!("messages[{at}].{field}"), why));
    if own.get("images").and_then(Value::as_array).is_some_and(|images| !images.is_empty()) {
        return wrong("images", "are not read; only text is");
    }
    own.remove("images");
    if let Some(thinking) = own.remove("thinking").filter(|thinking| !thinking.is_null()) {
        own.insert("reasoning_content".to_owned(), thinking);
    }
    if let Some(name) = own.remove("tool_name").filter(|name| !name.is_null()) {
        own.insert("name".to_owned(), name);
    }
    own.retain(|_, value| !value.is_null());
    own.entry("content").or_insert_with(|| "".into());
    if let Some(calls) = own.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls.iter_mut().filter_map(Value::as_object_mut) {
            call.entry("type").or_insert_with(|| "function".into());
        }
    }
    chat::message(at, own)
}

/// The endpoint that an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Chat,
    Generate,
}

impl Kind {
    /// The fields of a part of an answer.
    fn of(self, content: &str, thinking: &str, calls: &[Value]) -> Value {
        let mut object = match self {
            Self::Chat => json!({ "message": { "role": "assistant", "content": content } }),
            Self::Generate => json!({ "response": content }),
        };
        let place = if self == Self::Chat { &mut object["message"] } else { &mut object };
        if !thinking.is_empty() {
            place["thinking"] = json!(thinking);
        }
        if !calls.is_empty() {
            place["tool_calls"] = json!(calls);
        }
        object
    }
}

/// ollama's form of an answer.
struct Ollama {
    kind: Kind,
    /// Number of calls that were told.
    told: usize,
}

impl Ollama {
    fn line(&self, answer: &mut Answer, content: &str, thinking: &str, calls: &[Value]) -> Value {
        let mut line = self.kind.of(content, thinking, calls);
        line["model"] = json!(answer.served.name);
        line["created_at"] = json!(date(now()));
        line["done"] = json!(false);
        if answer.logprobs && answer.has_tokens(0) {
            let tokens = answer.take_tokens(0);
            line["logprobs"] = logprobs::of_chat(&answer.served.model, &tokens);
        }
        line
    }

    /// Tells those of the first `calls` calls that were not told, and go on no more.
    fn tell_calls(&mut self, answer: &mut Answer, calls: usize, frames: &mut Vec<Frame>) {
        for call in self.told..calls {
            let call = &answer.choices[0].message.calls[call];
            let (text, object) = match reader::is_whole(call) {
                true => (String::new(), vec![call_object(call)]),
                false => (reader::text_of(call), Vec::new()),
            };
            frames.push(Frame::new(&self.line(answer, &text, "", &object)));
        }
        self.told = calls;
    }

    /// Adds the reason of the end, counts and times.
    fn finish(line: &mut Value, answer: &Answer) {
        let usage = &answer.usage;
        let length = answer.finish_reason(0) == Some("length");
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        line["done"] = json!(true);
        line["done_reason"] = json!(if length { "length" } else { "stop" });
        line["total_duration"] = json!(nanoseconds(answer.begun.elapsed()));
        line["load_duration"] = json!(0);
        line["prompt_eval_count"] = json!(usage.prompt);
        line["prompt_eval_duration"] = json!(nanoseconds(usage.prompt_time));
        line["eval_count"] = json!(usage.generated);
        line["eval_duration"] = json!(nanoseconds(usage.decode_time));
        answer.tell_inexact(line);
    }
}

fn call_object(call: &kiln::ToolCall) -> Value {
    let arguments: Map<String, Value> = serde_json::from_str(&call.arguments).unwrap_or_default();
    json!({ "function": { "name": call.name, "arguments": arguments } })
}

impl Form for Ollama {
    const EVENTS: bool = false;

    fn whole(self, mut answer: Answer) -> Value {
        let mut message = std::mem::take(&mut answer.choices[0].message);
        message.only_whole_calls();
        let calls: Vec<Value> = message.calls.iter().map(call_object).collect();
        let mut line = self.line(&mut answer, &message.content, &message.reasoning, &calls);
        Self::finish(&mut line, &answer);
        line
    }

    fn begin(&mut self, _: &mut Answer) -> Vec<Frame> {
        Vec::new()
    }

    fn step(&mut self, answer: &mut Answer, Step { parts, mut calls, is_last, .. }: Step) -> Vec<Frame> {
        let mut frames = Vec::new();
        for part in parts {
            let line = match part {
                AnswerPart::Content(text) => self.line(answer, &text, "", &[]),
                AnswerPart::Reasoning(text) => self.line(answer, "", &text, &[]),
                AnswerPart::Call(_) => {
                    self.tell_calls(answer, calls, &mut frames);
                    calls += 1;
                    continue;
                }
                _ => continue,
            };
            self.tell_calls(answer, calls, &mut frames);
            frames.push(Frame::new(&line));
        }
        if is_last {
            self.tell_calls(answer, calls, &mut frames);
        }
        frames
    }

    fn end(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let mut line = self.line(answer, "", "", &[]);
        Self::finish(&mut line, answer);
        vec![Frame::new(&line)]
    }

    fn error(&mut self, error: &ApiError) -> Vec<Frame> {
        vec![Frame::new(&error.body(ErrorForm::Ollama))]
    }
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn times_are_read() {
        for (text, want) in [
            ("5m", Some(300.0)),
            ("1h30m", Some(5400.0)),
            ("300ms", Some(0.3)),
            ("-1", Some(-1.0)),
            ("10", Some(10.0)),
            ("1.5s", Some(1.5)),
            ("", None),
            ("soon", None),
            ("5d", None),
            ("1é", None),
        ] {
            assert_eq!(seconds(text), want, "{text}");
        }
    }
}
