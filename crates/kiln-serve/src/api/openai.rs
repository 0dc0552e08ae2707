//! The parts that all answers in the form of OpenAI's API share.

use serde_json::{Value, json};

use super::answer::{Answer, Frame, Usage};
use crate::error::ApiError;

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

/// The last events of a stream. `counts`: a chunk without choices, if tokens are to be counted.
pub(super) fn end(counts: Option<Value>) -> Vec<Frame> {
    let done = Frame { name: None, data: "[DONE]".to_owned() };
    counts.map(|chunk| Frame::new(&chunk)).into_iter().chain([done]).collect()
}

pub(super) fn error(error: &ApiError) -> Vec<Frame> {
    vec![Frame::new(&json!({ "error": error.object() }))]
}
