//! The form of responses: items, and named events.

use std::sync::Arc;

use kiln::{AnswerPart, ToolCall};
use serde_json::{Value, json};

use super::{add, stored::Stored};
use crate::{
    api::{
        answer::{Answer, Form, Frame, Step},
        logprobs, now, reader,
    },
    error::ApiError,
    guard::Key,
};

/// The form of responses.
pub(super) struct Responses {
    /// The response without its output.
    shell: Value,
    /// Whether and for whom it is kept, with the conversation so far.
    store: Option<(Arc<Stored>, Key, Vec<Value>)>,
    /// The items of the output that are whole.
    items: Vec<Value>,
    /// The item that a stream is in, and its text.
    open: Option<(Kind, String)>,
    /// The call that a stream is in.
    open_call: Option<usize>,
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
    pub(super) fn new(shell: Value, store: Option<(Arc<Stored>, Key, Vec<Value>)>) -> Self {
        Self { shell, store, items: Vec::new(), open: None, open_call: None, sent: 0 }
    }

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

    /// Ends the open item, but not one with a text if the next part is of the same kind.
    fn close(&mut self, frames: &mut Vec<Frame>, answer: &Answer, next: Option<Kind>) {
        self.close_call(frames, answer);
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
            "status": match is_whole {
                true if reader::is_whole(own) => "completed",
                true => "incomplete",
                false => "in_progress",
            },
        })
    }

    /// Begins a call.
    fn call(&mut self, frames: &mut Vec<Frame>, answer: &Answer, call: usize) {
        self.close(frames, answer, None);
        let (index, item) = (self.items.len(), self.call_item(answer, call, false));
        self.event(frames, "response.output_item.added", json!({ "output_index": index, "item": item }));
        self.open_call = Some(call);
    }

    fn arguments(&mut self, frames: &mut Vec<Frame>, answer: &Answer, more: &str) {
        let (id, index) = (self.id(answer, "fc"), self.items.len());
        let delta = json!({ "item_id": id, "output_index": index, "delta": more });
        self.event(frames, "response.function_call_arguments.delta", delta);
    }

    /// Ends the call that was begun.
    fn close_call(&mut self, frames: &mut Vec<Frame>, answer: &Answer) {
        let Some(call) = self.open_call.take() else { return };
        let (id, index) = (self.id(answer, "fc"), self.items.len());
        let ToolCall { name, arguments } = &answer.choices[0].message.calls[call];
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
        response["completed_at"] = json!(now());
        response["usage"] = json!({
            "input_tokens": usage.prompt,
            "input_tokens_details": { "cached_tokens": usage.cached, "cache_write_tokens": 0 },
            "output_tokens": usage.generated,
            "output_tokens_details": { "reasoning_tokens": usage.reasoning },
            "total_tokens": usage.prompt + usage.generated,
        });
        answer.tell_inexact(&mut response);
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

    fn step(&mut self, answer: &mut Answer, Step { parts, calls: mut call, .. }: Step) -> Vec<Frame> {
        let mut frames = Vec::new();
        for part in parts {
            match part {
                AnswerPart::Content(text) => self.text(&mut frames, answer, Kind::Message, &text),
                AnswerPart::Reasoning(text) => self.text(&mut frames, answer, Kind::Reasoning, &text),
                AnswerPart::Call(own) => {
                    self.call(&mut frames, answer, call);
                    self.arguments(&mut frames, answer, &own.arguments);
                    call += 1;
                }
                AnswerPart::Arguments(more) => self.arguments(&mut frames, answer, &more),
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
