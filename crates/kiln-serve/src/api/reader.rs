//! The parts of a chat answer: content, reasoning and calls of tools.

use std::mem;

use kiln::{AnswerParser, AnswerPart, ToolCall};
use serde::Deserialize;
use serde_json::{Map, Value, json, value::RawValue};

/// Reads the parts of one choice from the pieces of its text.
#[derive(Clone, Debug)]
pub(super) enum Reader {
    /// All text is content.
    Plain,
    /// As the model's family marks its parts.
    Marked {
        parser: AnswerParser,
        /// Whether calls after the first are left out.
        one_call: bool,
        calls: usize,
    },
    /// JSON that a grammar forced: the arguments of a call of this tool, which are told at once, or a list of
    /// calls.
    Forced { name: Option<String>, text: String },
}

#[derive(Deserialize)]
struct Forced<'a> {
    name: String,
    #[serde(borrow)]
    arguments: &'a RawValue,
}

impl Reader {
    /// Takes a piece. Returns the parts that are certain.
    pub(super) fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        match self {
            Self::Plain if piece.is_empty() => Vec::new(),
            Self::Plain => vec![AnswerPart::Content(piece.to_owned())],
            Self::Marked { parser, .. } => {
                let parts = parser.push(piece);
                self.allowed(parts)
            }
            Self::Forced { .. } if piece.is_empty() => Vec::new(),
            Self::Forced { name: Some(name), text } if text.is_empty() => {
                text.push_str(piece);
                let call = ToolCall { name: mem::take(name), arguments: piece.to_owned() };
                vec![AnswerPart::Call(call)]
            }
            Self::Forced { name: Some(_), .. } => vec![AnswerPart::Arguments(piece.to_owned())],
            Self::Forced { name: None, text } => {
                text.push_str(piece);
                Vec::new()
            }
        }
    }

    /// Whether the text goes on with reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self, Self::Marked { parser, .. } if parser.is_reasoning())
    }

    /// Returns the rest, after the last piece.
    pub(super) fn finish(&mut self) -> Vec<AnswerPart> {
        match self {
            Self::Plain => Vec::new(),
            Self::Marked { parser, .. } => {
                let parts = parser.finish();
                self.allowed(parts)
            }
            Self::Forced { name: Some(_), .. } => Vec::new(),
            Self::Forced { name: None, text } => match serde_json::from_str::<Vec<Forced<'_>>>(text) {
                Ok(calls) => calls
                    .into_iter()
                    .map(|Forced { name, arguments }| {
                        AnswerPart::Call(ToolCall { name, arguments: arguments.get().to_owned() })
                    })
                    .collect(),
                // It was cut off.
                Err(_) => vec![AnswerPart::Content(mem::take(text))],
            },
        }
    }

    fn allowed(&mut self, mut parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        if let Self::Marked { one_call, calls, .. } = self {
            parts.retain(|part| {
                let is_call = matches!(part, AnswerPart::Call(_));
                *calls += usize::from(is_call);
                let is_of_call = is_call || matches!(part, AnswerPart::Arguments(_));
                !(is_of_call && *one_call && *calls > 1)
            });
        }
        parts
    }
}

/// The message of a choice, as far as it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Message {
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<ToolCall>,
}

/// Whether the arguments of a call are a whole object. They are none if the answer was cut off.
pub(super) fn is_whole(call: &ToolCall) -> bool {
    serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok()
}

/// The text of a call, for an API that cannot tell one whose arguments are not whole.
pub(super) fn text_of(ToolCall { name, arguments }: &ToolCall) -> String {
    format!("{{\"name\": {}, \"arguments\": {arguments}", json!(name))
}

impl Message {
    /// Makes text of the calls whose arguments are not whole, for an API whose arguments are objects.
    pub(super) fn only_whole_calls(&mut self) {
        let (whole, broken) = mem::take(&mut self.calls).into_iter().partition(is_whole);
        self.calls = whole;
        let broken: Vec<ToolCall> = broken;
        self.content.extend(broken.iter().map(text_of));
    }

    pub(super) fn add(&mut self, part: &AnswerPart) {
        match part {
            AnswerPart::Content(text) => self.content.push_str(text),
            AnswerPart::Reasoning(text) => self.reasoning.push_str(text),
            AnswerPart::Call(call) => self.calls.push(call.clone()),
            AnswerPart::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(more);
                }
            }
            _ => {}
        }
    }
}
