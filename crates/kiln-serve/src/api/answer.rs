//! Answers of several choices, in the form of any API: as one object, or piece by piece.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Json,
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response, Sse, sse::Event},
};
use futures_util::{Stream, StreamExt, stream};
use kiln::{AnswerPart, GeneratedToken, Piece, Stats, StopReason};
use serde_json::{Value, json};
use web_time::Instant;

use super::{
    now,
    reader::{Message, Reader},
    settings::Choices,
};
use crate::{
    error::ApiError,
    models::Served,
    tasks::kept_open,
    worker::{End, Events, Make, Told},
};

/// The form of an answer in an API.
pub(super) trait Form: Send + Sized + 'static {
    /// Whether a stream consists of server-sent events; else, of lines of JSON.
    const EVENTS: bool = true;

    /// The answer as one object, after its end.
    fn whole(self, answer: Answer) -> Value;

    /// The frames before the first step.
    fn begin(&mut self, answer: &mut Answer) -> Vec<Frame>;

    /// The frames of a step.
    fn step(&mut self, answer: &mut Answer, step: Step) -> Vec<Frame>;

    /// The frames after the last step.
    fn end(&mut self, answer: &mut Answer) -> Vec<Frame>;

    /// The last frames of a stream that fails.
    fn error(&mut self, error: &ApiError) -> Vec<Frame>;
}

/// An event of a stream, or a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The name of an event.
    pub(super) name: Option<&'static str>,
    pub(super) data: String,
}

impl Frame {
    pub(super) fn new(data: &Value) -> Self {
        Self { name: None, data: data.to_string() }
    }

    pub(super) fn named(name: &'static str, data: &Value) -> Self {
        Self { name: Some(name), data: data.to_string() }
    }
}

/// A change of one choice.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) choice: usize,
    pub(super) parts: Vec<AnswerPart>,
    /// Number of calls of the choice before those of this step.
    pub(super) calls: usize,
    /// Whether it was the last of the choice.
    pub(super) is_last: bool,
}

/// An answer under way.
pub(super) struct Answer {
    pub(super) served: Arc<Served>,
    /// A text that no other answer has.
    pub(super) number: String,
    pub(super) created: u64,
    pub(super) begun: Instant,
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Usage,
    /// Whether log-probabilities were asked for.
    pub(super) logprobs: bool,
    /// Events that came before all choices were accepted.
    early: VecDeque<(usize, Told)>,
    events: Events,
    /// Number of choices that one prompt is computed for, and counted once.
    n: usize,
    /// Number of choices that have not ended.
    open: usize,
}

/// Numbers of tokens of an answer, and times.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    /// Number of tokens of prompts that were not computed again.
    pub(super) cached: usize,
    /// Whether some of these were computed as an answer.
    pub(super) reused_answer: bool,
    pub(super) generated: usize,
    /// Number of tokens of reasoning.
    pub(super) reasoning: usize,
    /// Time to the first token of the first choice, and from there to its end.
    pub(super) prompt_time: Duration,
    pub(super) decode_time: Duration,
}

/// A choice, as far as it was read.
pub(super) struct Choice {
    reader: Reader,
    pub(super) message: Message,
    /// The tokens whose log-probabilities were not told.
    tokens: Vec<GeneratedToken>,
    pub(super) end: Option<End>,
    /// Number of its tokens that the answer counts.
    counted: usize,
}

impl Choice {
    /// Adds parts to the message.
    fn step(&mut self, choice: usize, parts: Vec<AnswerPart>, is_last: bool) -> Step {
        let calls = self.message.calls.len();
        parts.iter().for_each(|part| self.message.add(part));
        Step { choice, parts, calls, is_last }
    }
}

impl Answer {
    /// Submits the choices, and waits until it is known that each is possible.
    pub(super) async fn begin(
        served: Arc<Served>,
        makes: Vec<Make>,
        reader: &Reader,
        Choices { n, logprobs, share, .. }: &Choices,
    ) -> Result<Self, ApiError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (open, begun) = (makes.len(), Instant::now());
        let mut events = served.worker.submit(makes, *share)?;
        let mut usage = Usage::default();
        // A choice may go on while another one waits for memory.
        let (mut accepted, mut early) = (0, VecDeque::new());
        while accepted < open {
            match events.recv().await {
                Some((choice, Told::Accepted { prompt_tokens })) => {
                    accepted += 1;
                    usage.prompt += if choice.is_multiple_of(*n) { prompt_tokens } else { 0 };
                }
                Some((_, Told::Failed(error))) => return Err(error),
                Some(event) => early.push_back(event),
                None => return Err(ended()),
            }
        }
        let choice = || Choice {
            reader: reader.clone(),
            message: Message::default(),
            tokens: Vec::new(),
            end: None,
            counted: 0,
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            // Two runs of the server differ in the time.
            number: format!("{:x}{number:06x}", now()),
            created: now(),
            begun,
            early,
            events,
            choices: (0..open).map(|_| choice()).collect(),
            usage,
            logprobs: logprobs.is_some(),
            n: *n,
            open,
            served,
        })
    }

    /// Answers in this form: at once, or piece by piece.
    pub(super) async fn respond(mut self, form: impl Form, streams: bool) -> Result<Response, ApiError> {
        if streams {
            return Ok(self.stream(form));
        }
        while let Some(step) = self.next().await {
            step?;
        }
        Ok(Json(form.whole(self)).into_response())
    }

    fn stream<F: Form>(mut self, mut form: F) -> Response {
        let first = form.begin(&mut self);
        let rest = stream::unfold(Some((self, form)), async |state| {
            let (mut answer, mut form) = state?;
            Some(match answer.next().await {
                Some(Ok(step)) => (form.step(&mut answer, step), Some((answer, form))),
                // An error is the last event.
                Some(Err(error)) => (form.error(&error), None),
                None => (form.end(&mut answer), None),
            })
        });
        let frames = stream::once(async { first }).chain(rest).flat_map(stream::iter);
        if F::EVENTS { events(frames) } else { lines(frames) }
    }

    /// The next step; `None` after the last of all choices.
    async fn next(&mut self) -> Option<Result<Step, ApiError>> {
        while self.open > 0 {
            let event = match self.early.pop_front() {
                Some(event) => Some(event),
                None => self.events.recv().await,
            };
            match event {
                Some((_, Told::Accepted { .. })) => {}
                Some((choice, Told::Piece(piece))) => return Some(Ok(self.take(choice, piece))),
                Some((choice, Told::Ended(end, stats))) => return Some(Ok(self.end(choice, end, &stats))),
                Some((_, Told::Failed(error))) => return Some(Err(error)),
                None => return Some(Err(ended())),
            }
        }
        None
    }

    fn take(&mut self, index: usize, piece: Piece) -> Step {
        let choice = &mut self.choices[index];
        let was_reasoning = choice.reader.is_reasoning();
        let parts = choice.reader.push(&piece.text);
        choice.counted += piece.tokens.len();
        self.usage.generated += piece.tokens.len();
        if was_reasoning || choice.reader.is_reasoning() {
            self.usage.reasoning += piece.tokens.len();
        }
        if self.logprobs {
            choice.tokens.extend(piece.prompt.into_iter().chain(piece.tokens));
        }
        choice.step(index, parts, false)
    }

    fn end(&mut self, index: usize, end: End, stats: &Stats) -> Step {
        self.open -= 1;
        self.usage.generated += stats.generated.saturating_sub(self.choices[index].counted);
        if index.is_multiple_of(self.n) {
            self.usage.cached += stats.reused;
        }
        self.usage.reused_answer |= stats.reused_answer;
        if index == 0 {
            self.usage.prompt_time = stats.time_to_first_token;
            self.usage.decode_time = stats.decode_time;
        }
        let choice = &mut self.choices[index];
        let parts = choice.reader.finish();
        choice.end = Some(end);
        choice.step(index, parts, true)
    }

    /// Says in a response that bits may differ from those that the request has alone, if they may.
    pub(super) fn tell_inexact(&self, response: &mut Value) {
        if self.usage.reused_answer || !self.served.is_exact {
            response["kiln"] = json!({ "exact": false });
        }
    }

    /// Takes the tokens of a choice whose log-probabilities are not told.
    pub(super) fn take_tokens(&mut self, choice: usize) -> Vec<GeneratedToken> {
        std::mem::take(&mut self.choices[choice].tokens)
    }

    /// Whether there are tokens whose log-probabilities are not told.
    pub(super) fn has_tokens(&self, choice: usize) -> bool {
        !self.choices[choice].tokens.is_empty()
    }

    /// The reason for which a choice ended, in OpenAI's words; `None` while it goes on.
    pub(super) fn finish_reason(&self, choice: usize) -> Option<&'static str> {
        let Choice { message, end, .. } = &self.choices[choice];
        Some(match finish_reason(end.as_ref()?.reason) {
            "stop" if !message.calls.is_empty() => "tool_calls",
            reason => reason,
        })
    }

    /// The identity of a call of a tool.
    pub(super) fn call_id(&self, choice: usize, call: usize) -> String {
        format!("call_{}_{choice}_{call}", self.number)
    }
}

fn events(frames: impl Stream<Item = Frame> + Send + 'static) -> Response {
    let event = |Frame { name, data }: Frame| {
        let event = Event::default().data(data);
        Ok::<_, Infallible>(name.into_iter().fold(event, Event::event))
    };
    kept_open(Sse::new(frames.map(event)))
}

fn lines(frames: impl Stream<Item = Frame> + Send + 'static) -> Response {
    let lines = frames.map(|frame| Ok::<_, Infallible>(frame.data + "\n"));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test")]

    use std::{
        path::Path,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use kiln::{Error, Model};
    use serde_json::Map;

    use super::Answer;
    use crate::{
        ServeOptions, ServedModel,
        api::{reader::Reader, settings::Settings},
        guard::Key,
        models::Models,
        worker::Make,
    };

    #[tokio::test]
    async fn a_choice_goes_on_while_another_one_waits_for_memory() {
        let model = Model::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo")).unwrap();
        let models = Models::new(vec![ServedModel::loaded("demo", model)], ServeOptions::default()).unwrap();
        let served = Arc::new(models).get(None).await.unwrap();
        let choices = Settings::of(&Map::new()).unwrap().choices(&served, Key(None)).unwrap();
        let text = |model: &Model| model.generate("ROMEO:").max_new_tokens(4).temperature(0.0).stream();
        // Memory is there once the other choice has ended.
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let late: Make = Box::new(move |model| match counted.fetch_add(1, Ordering::Relaxed) {
            0 => Err(Error::refused("a cache")),
            _ => text(model),
        });
        let makes = vec![Box::new(text) as Make, late];
        let mut answer = Answer::begin(served, makes, &Reader::Plain, &choices).await.unwrap();
        assert_eq!((asked.load(Ordering::Relaxed), answer.early.is_empty()), (2, false));
        while let Some(step) = answer.next().await {
            step.unwrap();
        }
        let [first, second] = &answer.choices[..] else { unreachable!() };
        assert!(!first.message.content.is_empty());
        assert_eq!(first.message.content, second.message.content);
    }
}
