//! Answers of several choices: as one object, or as a stream of events.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Json,
    http::StatusCode,
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
};
use futures_util::{StreamExt, stream};
use kiln::{AnswerPart, GeneratedToken, Piece, Stats, StopReason};
use serde_json::{Value, json};

use super::{
    Shared, logprobs, now,
    reader::{Message, Reader},
    settings::Choices,
};
use crate::{
    error::ApiError,
    worker::{Events, Make, Told},
};

/// Time after which a comment keeps a quiet stream open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The form of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Chat,
    Text,
}

/// An answer under way.
pub(super) struct Answer {
    form: Form,
    shared: Arc<Shared>,
    id: String,
    created: u64,
    events: Events,
    choices: Vec<Choice>,
    /// Number of choices that one prompt is computed for, and counted once.
    n: usize,
    prompt_tokens: usize,
    /// Number of tokens of prompts that were not computed again.
    cached: usize,
    generated: usize,
    /// Number of tokens of reasoning.
    reasoning: usize,
    logprobs: bool,
    /// Number of choices that have not ended.
    open: usize,
    /// Whether the last chunk of a stream counts tokens.
    include_usage: bool,
}

/// A choice, as far as it was read.
struct Choice {
    reader: Reader,
    message: Message,
    /// The tokens whose log-probabilities were not told.
    tokens: Vec<GeneratedToken>,
    /// Number of characters before them.
    offset: usize,
    reason: &'static str,
}

impl Choice {
    /// `start`: a text that it begins with, such as the prompt.
    fn new(reader: Reader, start: String) -> Self {
        let offset = start.chars().count();
        let mut message = Message::default();
        if !start.is_empty() {
            message.add(AnswerPart::Content(start), "", 0);
        }
        Self { reader, message, tokens: Vec::new(), offset, reason: "" }
    }
}

impl Answer {
    /// Submits the choices, and waits until it is known that each is possible.
    pub(super) async fn begin(
        form: Form,
        shared: Arc<Shared>,
        makes: Vec<Make>,
        starts: Vec<String>,
        reader: &Reader,
        Choices { n, logprobs, .. }: &Choices,
    ) -> Result<Self, ApiError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let open = makes.len();
        let mut events = shared.worker.submit(makes)?;
        for _ in 0..open {
            match events.recv().await {
                Some((_, Told::Accepted)) => {}
                Some((_, Told::Failed(error))) => return Err(error),
                _ => return Err(ended()),
            }
        }
        let prefix = if form == Form::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{}-{}", shared.started, NUMBER.fetch_add(1, Ordering::Relaxed));
        let created = now();
        let choices = starts.into_iter().map(|start| Choice::new(reader.clone(), start)).collect();
        Ok(Self {
            form,
            shared,
            id,
            created,
            events,
            choices,
            n: *n,
            logprobs: logprobs.is_some(),
            reasoning: 0,
            prompt_tokens: 0,
            cached: 0,
            generated: 0,
            open,
            include_usage: false,
        })
    }

    /// Waits for the whole answer.
    pub(super) async fn whole(mut self) -> Result<Response, ApiError> {
        while self.open > 0 {
            match self.events.recv().await {
                Some((choice, Told::Piece(piece))) => _ = self.take(choice, piece),
                Some((choice, Told::Ended(reason, stats))) => _ = self.end(choice, reason, stats),
                Some((_, Told::Accepted)) => {}
                Some((_, Told::Failed(error))) => return Err(error),
                None => return Err(ended()),
            }
        }
        let mut choices = Vec::new();
        for index in 0..self.choices.len() {
            let logprobs = self.next_logprobs(index);
            let Choice { message, reason, .. } = &self.choices[index];
            let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": reason });
            match self.form {
                Form::Chat => choice["message"] = message.object(),
                Form::Text => choice["text"] = message.content().into(),
            }
            choices.push(choice);
        }
        let mut answer = self.frame("chat.completion", choices);
        answer["usage"] = self.usage();
        Ok(Json(answer).into_response())
    }

    /// Sends pieces as they come. An error is the last event.
    pub(super) fn stream(mut self, include_usage: bool) -> Response {
        self.include_usage = include_usage;
        let first: Vec<Event> = (0..self.choices.len())
            .filter_map(|index| {
                let delta = match (self.form, self.choices[index].message.content()) {
                    (Form::Chat, _) => json!({ "role": "assistant", "content": "" }),
                    (Form::Text, "") => return None,
                    (Form::Text, start) => json!({ "content": start }),
                };
                Some(self.chunk(index, &delta, None))
            })
            .collect();
        let rest = stream::unfold(Some(self), async |answer| {
            let mut answer = answer?;
            if answer.open == 0 {
                let mut last = Vec::new();
                if answer.include_usage {
                    let mut chunk = answer.frame("chat.completion.chunk", Vec::new());
                    chunk["usage"] = answer.usage();
                    last.push(Event::default().data(chunk.to_string()));
                }
                last.push(Event::default().data("[DONE]"));
                return Some((last, None));
            }
            let error = match answer.events.recv().await {
                Some((_, Told::Accepted)) => return Some((Vec::new(), Some(answer))),
                Some((choice, Told::Piece(piece))) => {
                    let deltas = answer.take(choice, piece);
                    return Some((answer.chunks(choice, deltas, None), Some(answer)));
                }
                Some((choice, Told::Ended(reason, stats))) => {
                    let deltas = answer.end(choice, reason, stats);
                    let reason = answer.choices.get(choice).map(|choice| choice.reason);
                    return Some((answer.chunks(choice, deltas, reason), Some(answer)));
                }
                Some((_, Told::Failed(error))) => error,
                None => ended(),
            };
            Some((vec![Event::default().data(json!({ "error": error.object() }).to_string())], None))
        });
        let events = stream::once(async { first }).chain(rest).flat_map(stream::iter);
        Sse::new(events.map(Ok::<_, Infallible>))
            .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
            .into_response()
    }

    /// Takes a piece of a choice. Returns the changes of its message.
    fn take(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        let Some(choice) = self.choices.get_mut(index) else { return Vec::new() };
        let was_reasoning = choice.reader.is_reasoning();
        let parts = choice.reader.push(&piece.text);
        if was_reasoning || choice.reader.is_reasoning() {
            self.reasoning += piece.tokens.len();
        }
        if self.logprobs {
            choice.tokens.extend(piece.tokens);
        }
        parts.into_iter().map(|part| choice.message.add(part, &self.id, index)).collect()
    }

    /// Ends a choice. Returns the last changes of its message.
    fn end(&mut self, index: usize, reason: StopReason, stats: Stats) -> Vec<Value> {
        self.count(index, stats);
        let Some(choice) = self.choices.get_mut(index) else { return Vec::new() };
        let rest = choice.reader.finish();
        let deltas = rest.into_iter().map(|part| choice.message.add(part, &self.id, index)).collect();
        choice.reason = match finish_reason(reason) {
            "stop" if choice.message.has_calls() => "tool_calls",
            reason => reason,
        };
        deltas
    }

    /// Events for the changes of a choice, and for its end.
    fn chunks(&mut self, index: usize, deltas: Vec<Value>, reason: Option<&str>) -> Vec<Event> {
        let mut events: Vec<Event> = deltas.iter().map(|delta| self.chunk(index, delta, None)).collect();
        let waits = self.logprobs && self.choices.get(index).is_some_and(|choice| !choice.tokens.is_empty());
        if reason.is_some() || (waits && events.is_empty()) {
            events.push(self.chunk(index, &json!({}), reason));
        }
        events
    }

    /// An event for a change of a choice, with the log-probabilities of tokens whose are not told.
    fn chunk(&mut self, index: usize, delta: &Value, reason: Option<&str>) -> Event {
        let has_tokens = self.choices.get(index).is_some_and(|choice| !choice.tokens.is_empty());
        let logprobs = if has_tokens { self.next_logprobs(index) } else { Value::Null };
        let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": reason });
        match self.form {
            Form::Chat => choice["delta"] = delta.clone(),
            Form::Text => choice["text"] = delta.get("content").cloned().unwrap_or_else(|| "".into()),
        }
        Event::default().data(self.frame("chat.completion.chunk", vec![choice]).to_string())
    }

    /// The log-probabilities of the next tokens of a choice; null if none were asked for.
    fn next_logprobs(&mut self, index: usize) -> Value {
        let Some(choice) = self.choices.get_mut(index).filter(|_| self.logprobs) else { return Value::Null };
        let (model, tokens) = (&self.shared.model, std::mem::take(&mut choice.tokens));
        match self.form {
            Form::Chat => json!({ "content": logprobs::of_chat(model, &tokens), "refusal": null }),
            Form::Text => logprobs::of_text(model, &tokens, &mut choice.offset),
        }
    }

    fn frame(&self, of_chat: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": if self.form == Form::Chat { of_chat } else { "text_completion" },
            "created": self.created,
            "model": self.shared.name,
            "system_fingerprint": self.shared.fingerprint,
            "choices": choices,
        })
    }

    fn count(&mut self, choice: usize, stats: Stats) {
        self.open -= 1;
        self.generated += stats.generated;
        if choice.is_multiple_of(self.n) {
            self.prompt_tokens += stats.prompt_tokens + stats.reused;
            self.cached += stats.reused;
        }
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated,
            "prompt_tokens_details": { "cached_tokens": self.cached },
            "completion_tokens_details": { "reasoning_tokens": self.reasoning },
        })
    }
}

fn ended() -> ApiError {
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "the engine ended the request; see the server's messages",
    )
}

pub(crate) fn finish_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::EndOfText | StopReason::StopString => "stop",
        _ => "length",
    }
}
