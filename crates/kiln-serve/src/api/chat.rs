//! `/v1/chat/completions`

use std::collections::BTreeMap;

use axum::{Extension, extract::State, response::Response};
use kiln::{AnswerPart, Message, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    Body, Server,
    answer::{Answer, Form, Frame, Step},
    fields, logprobs,
    openai::{self, Counts},
    parsed,
    reader::Message as Read,
    settings::Settings,
    turn::Turn,
};
use crate::{error::ApiError, fields as known, guard::Key};

#[derive(Debug, Deserialize)]
struct Request {
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
    thinking_token_budget: Option<usize>,
}

pub(super) async fn complete(
    State(models): Server,
    Extension(key): Extension<Key>,
    body: Body,
) -> Result<Response, ApiError> {
    let (settings, turn) = request(parsed(body).await?)?;
    let served = models.get(Some(settings.model()?)).await?;
    let choices = settings.choices(&served, key)?;
    let answer = turn.begin(served, choices).await?;
    let form = Chat { counts: settings.counts() };
    answer.respond(form, settings.stream).await
}

/// The prompt of a conversation, as llama.cpp's server tells it.
pub(super) async fn apply_template(State(models): Server, body: Body) -> Result<axum::Json<Value>, ApiError> {
    let (settings, turn) = request(parsed(body).await?)?;
    let served = models.get(settings.model.as_deref()).await?;
    Ok(axum::Json(json!({ "prompt": turn.prompt(&served).await? })))
}

fn request(mut body: Map<String, Value>) -> Result<(Settings, Turn), ApiError> {
    known::check(&mut body, &[known::CHAT, known::COMMON])?;
    if body.get("logprobs").is_some_and(|logprobs| !logprobs.is_boolean()) {
        return Err(ApiError::field("logprobs", "must be true or false"));
    }
    if !body.contains_key("messages") {
        return Err(ApiError::field("messages", "is missing"));
    }
    let settings = Settings::of(&body)?;
    let request: Request = fields(&body)?;
    let messages = request.messages.into_iter().enumerate().map(|(at, own)| message(at, own));
    let turn = Turn {
        messages: messages.collect::<Result<_, _>>()?,
        variables: request.chat_template_kwargs.unwrap_or_default(),
        documents: request.documents,
        tools: request.tools,
        tool_choice: request.tool_choice,
        parallel_tool_calls: request.parallel_tool_calls,
        thinks: None,
        effort: request.reasoning_effort,
        budget: request.thinking_token_budget,
        adds_prompt: request.add_generation_prompt,
        continues: request.continue_final_message,
    };
    Ok((settings, turn))
}

/// Reads a message. Parts of text become one text, a line each.
pub(super) fn message(at: usize, mut own: Map<String, Value>) -> Result<Message, ApiError> {
    let wrong = |field: &str, why: &str| Err(ApiError::field(&format!("messages[{at}].{field}"), why));
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
                (Some("text" | "input_text" | "output_text"), Some(text)) => texts.push(text),
                (Some(kind), _) => {
                    return wrong("content", &format!("has a part of type `{kind}`; only text is read"));
                }
                (None, _) => return wrong("content", "has a part without a type"),
            }
        }
        let text = texts.join("\n");
        own.insert("content".to_owned(), text.into());
    }
    let is_assistant = own.get("role").is_some_and(|role| role == "assistant");
    match own.get("content") {
        Some(Value::String(_)) => {}
        Some(Value::Null) | None if own.contains_key("tool_calls") => {}
        // A turn that was cut off before its first word.
        Some(Value::Null) if is_assistant => _ = own.insert("content".to_owned(), "".into()),
        _ => return wrong("content", "must be a text, or a list of parts of text"),
    }
    if let Some(calls) = own.get_mut("tool_calls") {
        for call in calls.as_array_mut().into_iter().flatten() {
            // Templates write the object themselves.
            if let Some(text) = call["function"]["arguments"].as_str() {
                // Those of a call that was cut off stay text.
                if let Ok(arguments) = serde_json::from_str::<Map<String, Value>>(text) {
                    call["function"]["arguments"] = Value::Object(arguments);
                }
            }
        }
    }
    serde_json::from_value(Value::Object(own)).map_err(|e| ApiError::field(&format!("messages[{at}]"), e))
}

/// OpenAI's form of a chat.
struct Chat {
    counts: Counts,
}

impl Form for Chat {
    fn whole(self, mut answer: Answer) -> Value {
        let all = 0..answer.choices.len();
        let choice = |index| {
            let logprobs = next_logprobs(&mut answer, index);
            let reason = answer.finish_reason(index);
            let message = object(&answer, index);
            json!({ "index": index, "logprobs": logprobs, "finish_reason": reason, "message": message })
        };
        let choices = all.map(choice).collect();
        let mut whole = openai::frame(&answer, "chatcmpl", "chat.completion", choices);
        whole["usage"] = openai::usage(&answer.usage);
        whole
    }

    fn begin(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let delta = json!({ "role": "assistant", "content": "" });
        (0..answer.choices.len()).map(|index| self.chunk(answer, index, &delta, None)).collect()
    }

    fn step(
        &mut self,
        answer: &mut Answer,
        Step { choice, parts, calls: mut call, is_last }: Step,
    ) -> Vec<Frame> {
        let mut frames = Vec::new();
        for part in &parts {
            let delta = match part {
                AnswerPart::Content(text) => json!({ "content": text }),
                // llama.cpp and DeepSeek have one name, vLLM the other.
                AnswerPart::Reasoning(text) => json!({ "reasoning_content": text, "reasoning": text }),
                AnswerPart::Call(own) => {
                    let mut delta = call_object(answer, choice, call, own);
                    delta["index"] = json!(call);
                    call += 1;
                    json!({ "tool_calls": [delta] })
                }
                AnswerPart::Arguments(more) if call > 0 => {
                    json!({ "tool_calls": [{ "index": call - 1, "function": { "arguments": more } }] })
                }
                _ => continue,
            };
            frames.push(self.chunk(answer, choice, &delta, None));
        }
        if is_last || (frames.is_empty() && answer.has_tokens(choice)) {
            let reason = answer.finish_reason(choice);
            frames.push(self.chunk(answer, choice, &json!({}), reason));
        }
        frames
    }

    fn end(&mut self, answer: &mut Answer) -> Vec<Frame> {
        let last = openai::frame(answer, "chatcmpl", "chat.completion.chunk", Vec::new());
        openai::end(answer, last, self.counts)
    }

    fn error(&mut self, error: &ApiError) -> Vec<Frame> {
        openai::error(error)
    }
}

impl Chat {
    /// An event for a change of a choice, with the log-probabilities of tokens whose are not told.
    fn chunk(&self, answer: &mut Answer, index: usize, delta: &Value, reason: Option<&str>) -> Frame {
        let logprobs = if answer.has_tokens(index) { next_logprobs(answer, index) } else { Value::Null };
        let choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": reason, "delta": delta });
        let chunk = openai::frame(answer, "chatcmpl", "chat.completion.chunk", vec![choice]);
        openai::chunk(answer, chunk, self.counts)
    }
}

/// The log-probabilities of the next tokens of a choice; null if none were asked for.
fn next_logprobs(answer: &mut Answer, index: usize) -> Value {
    if !answer.logprobs {
        return Value::Null;
    }
    let tokens = answer.take_tokens(index);
    json!({ "content": logprobs::of_chat(&answer.served.model, &tokens), "refusal": null })
}

fn call_object(
    answer: &Answer,
    choice: usize,
    call: usize,
    ToolCall { name, arguments }: &ToolCall,
) -> Value {
    json!({
        "id": answer.call_id(choice, call),
        "type": "function",
        "function": { "name": name, "arguments": arguments },
    })
}

/// The whole message of a choice.
fn object(answer: &Answer, choice: usize) -> Value {
    let Read { content, reasoning, calls } = &answer.choices[choice].message;
    let content = if content.is_empty() && !calls.is_empty() { Value::Null } else { json!(content) };
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
        message["reasoning"] = json!(reasoning);
    }
    if !calls.is_empty() {
        let of = |(at, call)| call_object(answer, choice, at, call);
        message["tool_calls"] = calls.iter().enumerate().map(of).collect();
    }
    message
}
