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
use kiln::{GeneratedToken, Stats, StopReason};
use serde_json::{Value, json};

use super::{Shared, logprobs, now, settings::Choices};
use crate::{
    error::ApiError,
    worker::{Make, Reader, Told},
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
    reader: Reader,
    /// A text that each choice begins with, such as its prompt.
    starts: Vec<String>,
    /// Number of choices that one prompt is computed for, and counted once.
    n: usize,
    prompt_tokens: usize,
    /// Number of tokens of prompts that were not computed again.
    cached: usize,
    generated: usize,
    /// Number of characters of each choice so far, if log-probabilities are told.
    offsets: Option<Vec<usize>>,
    /// Number of choices that have not ended.
    open: usize,
    /// Whether the last chunk of a stream counts tokens.
    include_usage: bool,
}

impl Answer {
    /// Submits the choices, and waits until it is known that each is possible.
    pub(super) async fn begin(
        form: Form,
        shared: Arc<Shared>,
        choices: Vec<Make>,
        starts: Vec<String>,
        Choices { n, logprobs, .. }: &Choices,
    ) -> Result<Self, ApiError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let open = choices.len();
        let mut reader = shared.worker.submit(choices)?;
        for _ in 0..open {
            match reader.recv().await {
                Some((_, Told::Accepted)) => {}
                Some((_, Told::Failed(error))) => return Err(error),
                _ => return Err(ended()),
            }
        }
        let prefix = if form == Form::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{}-{}", shared.started, NUMBER.fetch_add(1, Ordering::Relaxed));
        let created = now();
        let length = |start: &String| start.chars().count();
        let offsets = logprobs.is_some().then(|| starts.iter().map(length).collect());
        Ok(Self {
            form,
            shared,
            id,
            created,
            reader,
            offsets,
            starts,
            n: *n,
            prompt_tokens: 0,
            cached: 0,
            generated: 0,
            open,
            include_usage: false,
        })
    }

    /// Waits for the whole answer.
    pub(super) async fn whole(mut self) -> Result<Response, ApiError> {
        let mut texts = self.starts.clone();
        let mut tokens: Vec<Vec<GeneratedToken>> = vec![Vec::new(); texts.len()];
        let mut reasons = vec![""; texts.len()];
        while self.open > 0 {
            match self.reader.recv().await {
                Some((choice, Told::Piece(piece))) => {
                    texts.get_mut(choice).into_iter().for_each(|text| text.push_str(&piece.text));
                    tokens.get_mut(choice).into_iter().for_each(|all| all.extend_from_slice(&piece.tokens));
                }
                Some((choice, Told::Ended(reason, stats))) => {
                    self.count(choice, stats);
                    reasons.get_mut(choice).into_iter().for_each(|own| *own = finish_reason(reason));
                }
                Some((_, Told::Accepted)) => {}
                Some((_, Told::Failed(error))) => return Err(error),
                None => return Err(ended()),
            }
        }
        let mut choices = Vec::new();
        for (index, (text, reason)) in texts.into_iter().zip(reasons).enumerate() {
            let logprobs = self.logprobs(index, tokens.get(index).map_or(&[], Vec::as_slice));
            choices.push(match self.form {
                Form::Chat => json!({
                    "index": index,
                    "message": { "role": "assistant", "content": text, "refusal": null },
                    "logprobs": logprobs,
                    "finish_reason": reason,
                }),
                Form::Text => {
                    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason })
                }
            });
        }
        let mut answer = self.frame("chat.completion", choices);
        answer["usage"] = self.usage();
        Ok(Json(answer).into_response())
    }

    /// Sends pieces as they come. An error is the last event.
    pub(super) fn stream(mut self, include_usage: bool) -> Response {
        self.include_usage = include_usage;
        let first = match self.form {
            Form::Chat => (0..self.open)
                .map(|index| self.chunk(index, &json!({ "role": "assistant", "content": "" }), &[], None))
                .collect(),
            Form::Text => {
                let starts =
                    self.starts.clone().into_iter().enumerate().filter(|(_, start)| !start.is_empty());
                starts.map(|(index, start)| self.chunk(index, &json!(start), &[], None)).collect::<Vec<_>>()
            }
        };
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
            let error = match answer.reader.recv().await {
                Some((_, Told::Accepted)) => return Some((Vec::new(), Some(answer))),
                Some((choice, Told::Piece(piece))) => {
                    let text = piece.text;
                    let delta =
                        if answer.form == Form::Chat { json!({ "content": text }) } else { json!(text) };
                    return Some((vec![answer.chunk(choice, &delta, &piece.tokens, None)], Some(answer)));
                }
                Some((choice, Told::Ended(reason, stats))) => {
                    answer.count(choice, stats);
                    let delta = if answer.form == Form::Chat { json!({}) } else { json!("") };
                    let last = answer.chunk(choice, &delta, &[], Some(finish_reason(reason)));
                    return Some((vec![last], Some(answer)));
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

    fn chunk(
        &mut self,
        index: usize,
        delta: &Value,
        tokens: &[GeneratedToken],
        reason: Option<&str>,
    ) -> Event {
        let key = if self.form == Form::Chat { "delta" } else { "text" };
        let logprobs = if tokens.is_empty() { Value::Null } else { self.logprobs(index, tokens) };
        let choice = json!({ "index": index, key: delta, "logprobs": logprobs, "finish_reason": reason });
        Event::default().data(self.frame("chat.completion.chunk", vec![choice]).to_string())
    }

    /// The log-probabilities of the next tokens of a choice; null if none were asked for.
    fn logprobs(&mut self, choice: usize, tokens: &[GeneratedToken]) -> Value {
        let model = &self.shared.model;
        match (self.form, self.offsets.as_mut().and_then(|offsets| offsets.get_mut(choice))) {
            (_, None) => Value::Null,
            (Form::Chat, Some(_)) => json!({ "content": logprobs::of_chat(model, tokens), "refusal": null }),
            (Form::Text, Some(offset)) => logprobs::of_text(model, tokens, offset),
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
