//! The parts that all answers in the form of OpenAI's API share.

use serde_json::{Value, json};

use super::answer::{Answer, Frame, Usage};
use crate::error::ApiError;

/// The chunks of a stream that count tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    Never,
    /// A last one, without choices.
    AtEnd,
    /// Each counts the tokens so far, of all choices together.
    Always,
}

/// An answer, or a chunk of one.
pub(super) fn frame(answer: &Answer, prefix: &str, object: &str, choices: Vec<Value>) -> Value {
    let mut frame = json!({
        "id": format!("{prefix}-{}", answer.number),
        "object": object,
        "created": answer.created,
        "model": answer.served.name,
        "system_fingerprint": answer.served.fingerprint,
        "choices": choices,
    });
    answer.tell_inexact(&mut frame);
    frame
}

pub(super) fn usage(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": { "cached_tokens": usage.cached },
        "completion_tokens_details": { "reasoning_tokens": usage.reasoning },
    })
}

/// The last events of a stream. `last`: a chunk without choices, for the number of tokens.
pub(super) fn end(answer: &Answer, mut last: Value, counts: Counts) -> Vec<Frame> {
    let done = Frame { name: None, data: "[DONE]".to_owned() };
    if counts == Counts::Never {
        return vec![done];
    }
    last["usage"] = usage(&answer.usage);
    vec![Frame::new(&last), done]
}

/// A chunk of a stream.
pub(super) fn chunk(answer: &Answer, mut chunk: Value, counts: Counts) -> Frame {
    if counts == Counts::Always {
        chunk["usage"] = usage(&answer.usage);
    }
    Frame::new(&chunk)
}

pub(super) fn error(error: &ApiError) -> Vec<Frame> {
    vec![Frame::new(&json!({ "error": error.object() }))]
}
