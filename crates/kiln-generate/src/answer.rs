//! The parts of an answer: text, reasoning, and calls of tools, each as the model's family writes it.
//!
//! The family is found in the chat template, which writes the same marks. A parser takes a text in pieces of
//! any size and loses none of it: a call that cannot be read is text.

mod begun;
mod budget;
mod calls;
mod strict;

use std::mem;

use kiln_core::{Result, model::TokenId};
use serde_json::Value;

pub use self::budget::ReasoningBudget;
use self::{
    begun::{Beginning, Place, is_between},
    calls::Body,
    strict::Json,
};
use crate::ChatTemplate;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnswerPart {
    Content(String),
    Reasoning(String),
    /// A call. Its arguments may go on.
    Call(ToolCall),
    /// More of the arguments of the last call.
    Arguments(String),
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    /// A JSON object, as the model wrote it. It has no end if the answer was cut off.
    pub arguments: String,
}

/// How a model marks the parts of its answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnswerFormat {
    reasoning: Option<[&'static str; 2]>,
    calls: Option<Calls>,
    /// The JSON of calls; `None` if they are written otherwise.
    json: Option<Json>,
    /// Whether each part is a message of its own, with a channel (gpt-oss).
    has_channels: bool,
}

/// The marks around calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Calls {
    open: &'static str,
    /// `None`: calls end with the answer.
    close: Option<&'static str>,
    body: Body,
    /// Whether an answer that begins with a brace is a call without a mark.
    bare: bool,
}

/// The marks of families, by a text that only their templates have. The first that is found counts.
const FAMILIES: [(&str, Calls); 7] = [
    (
        "<｜tool▁calls▁begin｜>",
        marked("<｜tool▁calls▁begin｜>", Some("<｜tool▁calls▁end｜>"), Body::DeepSeek),
    ),
    ("<|tool_call_start|>", marked("<|tool_call_start|>", Some("<|tool_call_end|>"), Body::Python)),
    ("[TOOL_CALLS]", marked("[TOOL_CALLS]", None, Body::Mistral)),
    ("<|tool_call|>", marked("<|tool_call|>", Some("<|/tool_call|>"), Body::Tagged)),
    ("<tool_calls>", marked("<tool_calls>", Some("</tool_calls>"), Body::Tagged)),
    ("<tool_call>", Calls { bare: true, ..marked("<tool_call>", Some("</tool_call>"), Body::Tagged) }),
    ("<|python_tag|>", Calls { bare: true, ..marked("<|python_tag|>", None, Body::Tagged) }),
];

/// Marks of the messages of gpt-oss.
const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];

const fn marked(open: &'static str, close: Option<&'static str>, body: Body) -> Calls {
    Calls { open, close, body, bare: false }
}

impl AnswerFormat {
    /// The format of models with this chat template.
    pub fn of(template: &ChatTemplate) -> Self {
        Self::of_source(template.source())
    }

    fn of_source(template: &str) -> Self {
        let reasoning = [["<think>", "</think>"], ["[THINK]", "[/THINK]"]];
        let calls = FAMILIES.iter().find(|(mark, _)| template.contains(mark)).map(|(_, calls)| *calls);
        // These write XML, or the name of the function apart.
        let is_other = ["<function=", "<arg_key>", "[ARGS]"].iter().any(|mark| template.contains(mark));
        let json = match calls.map(|calls| calls.open) {
            _ if is_other => None,
            Some("<tool_call>" | "<|python_tag|>") => Some(Json::One),
            Some("<|tool_call|>" | "<tool_calls>" | "[TOOL_CALLS]") => Some(Json::List),
            _ => None,
        };
        Self {
            reasoning: reasoning.into_iter().find(|[_, close]| template.contains(close)),
            calls: calls.filter(|_| template.contains("tools")),
            json,
            has_channels: template.contains("<|channel|>"),
        }
    }

    /// Whether calls of tools can be read.
    pub fn has_calls(&self) -> bool {
        self.calls.is_some() || self.has_channels
    }

    /// Whether anything is marked.
    pub fn is_marked(&self) -> bool {
        self.reasoning.is_some() || self.has_calls()
    }

    /// Whether reasoning is marked.
    pub fn has_reasoning(&self) -> bool {
        self.reasoning.is_some() || self.has_channels
    }

    /// An end to reasoning after this many tokens, in an answer to `prompt`, a rendered conversation; `None`
    /// if the model's reasoning has no mark at its end that can be forced. `encode`: makes tokens of a text.
    ///
    /// # Errors
    /// The errors of `encode`.
    pub fn reasoning_budget(
        &self,
        prompt: &str,
        tokens: usize,
        encode: impl Fn(&str) -> Result<Vec<TokenId>>,
    ) -> Result<Option<ReasoningBudget>> {
        let Some([open, close]) = self.reasoning.filter(|_| !self.has_channels) else { return Ok(None) };
        let is_open = prompt.trim_end().ends_with(open);
        Ok(Some(ReasoningBudget { open: encode(open)?, close: encode(close)?, is_open, tokens }))
    }

    /// Creates a parser for the answer to `prompt`, a rendered conversation, which may begin the reasoning.
    /// `tools`: the functions that may be called, as OpenAI's API has them; none if calls are not to be read.
    pub fn parser(&self, prompt: &str, tools: &[Value]) -> AnswerParser {
        let prompt = prompt.trim_end();
        let state = match self.reasoning {
            _ if self.has_channels => State::Header,
            Some([open, _]) if prompt.ends_with(open) => State::Reasoning,
            _ => State::Text,
        };
        AnswerParser {
            format: Self { calls: self.calls.filter(|_| !tools.is_empty()), ..self.clone() },
            tools: tools.to_vec(),
            is_new: state != State::Text,
            state,
            held: String::new(),
            is_first: true,
        }
    }
}

/// Reads the parts of an answer from its text.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    format: AnswerFormat,
    tools: Vec<Value>,
    state: State,
    /// Text that is not told yet.
    held: String,
    /// Whether nothing but white space came since a mark, which is then left out.
    is_new: bool,
    /// Whether nothing but white space came at all.
    is_first: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Text,
    Reasoning,
    /// Between the marks of calls. `mark`: the mark before them, if there was one, and none of them was told.
    Calls {
        mark: &'static str,
        /// Whether one of them was told.
        told: bool,
    },
    /// In the arguments of a call that was told. `then`: where they end.
    Arguments {
        place: Place,
        then: After,
    },
    /// After the arguments, in the object that has them.
    Object {
        place: Place,
    },
    /// The header of a message, before its text.
    Header,
    /// The text of a message.
    Message(Kind),
}

/// The place after the arguments of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// The object that has the arguments goes on to its end.
    Object,
    /// Between the marks of calls.
    Calls,
    /// A message of gpt-oss, up to its mark.
    Message,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Content,
    Reasoning,
    /// A call of this tool.
    Call(String),
    /// A call that was told.
    Told,
}

impl AnswerParser {
    /// Takes more of the text. Returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// Returns the rest, after the last piece.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let held = mem::take(&mut self.held);
        match mem::replace(&mut self.state, State::Text) {
            State::Calls { mark, told } => self.read_calls(mark, told, &held, "", &mut parts),
            State::Message(Kind::Told) => say(AnswerPart::Content, held.trim(), &mut parts),
            State::Arguments { .. } | State::Object { .. } => {}
            State::Message(Kind::Call(name)) => read_message(name, &held, &mut parts),
            State::Reasoning | State::Message(Kind::Reasoning) => {
                say(AnswerPart::Reasoning, &held, &mut parts)
            }
            State::Text | State::Message(Kind::Content) => say(AnswerPart::Content, &held, &mut parts),
            // A text without a header, or a header without a text.
            State::Header if !held.contains("<|") => say(AnswerPart::Content, &held, &mut parts),
            State::Header => {}
        }
        parts
    }

    /// Whether the text goes on with reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Message(Kind::Reasoning))
    }

    /// Goes on to the next mark. Returns whether there was one.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if !matches!(self.state, State::Header | State::Arguments { .. } | State::Object { .. }) {
            if self.is_new {
                let white = self.held.len() - self.held.trim_start().len();
                self.held.drain(..white);
                self.is_new = self.held.is_empty();
            }
            if self.held.trim_start().is_empty() {
                return false;
            }
        }
        match self.state.clone() {
            State::Text => self.advance_text(parts),
            State::Reasoning => {
                let [_, close] = self.format.reasoning.unwrap_or_default();
                let found = self.tell(AnswerPart::Reasoning, &[close], true, parts).is_some();
                self.enter_if(found, State::Text)
            }
            State::Calls { mark, told } => {
                let beginning = self.format.calls.and_then(|calls| calls.body.begins(&self.held));
                let is_call = |name: &str| told || !mark.is_empty() || self.names().any(|own| own == name);
                if let Some(Beginning { name, len, is_inner }) = beginning.filter(|own| is_call(&own.name)) {
                    let then = if is_inner { After::Object } else { After::Calls };
                    return self.begin_call(name, len, then, parts);
                }
                let Some(close) = self.format.calls.and_then(|calls| calls.close) else { return false };
                let Some((body, rest)) = self.held.split_once(close) else { return false };
                let (body, rest) = (body.to_owned(), rest.to_owned());
                self.read_calls(mark, told, &body, close, parts);
                self.held = rest;
                self.enter_if(true, State::Text)
            }
            State::Header => {
                let Some((header, rest)) = self.held.split_once(MESSAGE) else { return false };
                let kind = kind_of(header);
                self.held = rest.to_owned();
                self.enter_if(true, State::Message(kind))
            }
            State::Arguments { mut place, then } => {
                let (len, has_ended) = place.pass(&self.held);
                let more: String = self.held.drain(..len).collect();
                match parts.last_mut() {
                    Some(AnswerPart::Call(ToolCall { arguments, .. })) => arguments.push_str(&more),
                    _ => say(AnswerPart::Arguments, &more, parts),
                }
                self.state = match then {
                    _ if !has_ended => State::Arguments { place, then },
                    After::Object => State::Object { place: Place::BEGUN },
                    After::Calls => State::Calls { mark: "", told: true },
                    After::Message => State::Message(Kind::Told),
                };
                self.is_new = has_ended;
                has_ended
            }
            State::Object { mut place } => {
                let (len, has_ended) = place.pass(&self.held);
                self.held.drain(..len);
                self.state = match has_ended {
                    false => State::Object { place },
                    true => State::Calls { mark: "", told: true },
                };
                self.is_new = has_ended;
                has_ended
            }
            State::Message(Kind::Call(name)) if self.held.trim_start().starts_with('{') => {
                let len = self.held.len() - self.held.trim_start().len() + 1;
                self.begin_call(name, len, After::Message, parts)
            }
            State::Message(Kind::Told) => {
                let Some((at, end)) = first(&self.held, &ENDS) else { return false };
                say(AnswerPart::Content, self.held[..at].trim(), parts);
                self.held.drain(..at + end.len());
                self.enter_if(true, State::Header)
            }
            State::Message(Kind::Call(name)) => {
                let Some((at, end)) = first(&self.held, &ENDS) else { return false };
                read_message(name, &self.held[..at], parts);
                self.held.drain(..at + end.len());
                self.enter_if(true, State::Header)
            }
            State::Message(kind) => {
                let part = if kind == Kind::Reasoning { AnswerPart::Reasoning } else { AnswerPart::Content };
                let found = self.tell(part, &ENDS, false, parts).is_some();
                self.enter_if(found, State::Header)
            }
        }
    }

    fn advance_text(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let calls = self.format.calls;
        let is_first = mem::take(&mut self.is_first);
        if let Some(Calls { bare: true, .. }) = calls
            && is_first
            && self.held.trim_start().starts_with('{')
        {
            self.state = State::Calls { mark: "", told: false };
            return true;
        }
        let marks: Vec<&'static str> = self
            .format
            .reasoning
            .iter()
            .map(|[open, _]| *open)
            .chain(calls.map(|calls| calls.open))
            .collect();
        match self.tell(AnswerPart::Content, &marks, true, parts) {
            None => false,
            Some(mark) if calls.is_some_and(|calls| calls.open == mark) => {
                self.enter_if(true, State::Calls { mark, told: false })
            }
            Some(_) => self.enter_if(true, State::Reasoning),
        }
    }

    fn enter_if(&mut self, found: bool, state: State) -> bool {
        if found {
            (self.state, self.is_new) = (state, true);
        }
        found
    }

    /// Tells the text before the first of `marks`, and removes both; without one, the text in which none
    /// begins. `trims`: white space before a mark is left out.
    fn tell(
        &mut self,
        part: fn(String) -> AnswerPart,
        marks: &[&'static str],
        trims: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> Option<&'static str> {
        let found = first(&self.held, marks);
        let end = found.map_or_else(|| certain(&self.held, marks), |(at, _)| at);
        let text = &self.held[..end];
        let told = if trims { text.trim_end().len() } else { end };
        say(part, &text[..told], parts);
        let gone = found.map_or(told, |(at, mark)| at + mark.len());
        self.held.drain(..gone);
        found.map(|(_, mark)| mark)
    }

    /// Tells a call whose arguments begin after `len` bytes.
    fn begin_call(&mut self, name: String, len: usize, then: After, parts: &mut Vec<AnswerPart>) -> bool {
        parts.push(AnswerPart::Call(ToolCall { name, arguments: "{".to_owned() }));
        self.held.drain(..len);
        self.state = State::Arguments { place: Place::BEGUN, then };
        true
    }

    /// The names of the tools.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tool| tool.get("function").unwrap_or(tool)["name"].as_str())
    }

    /// Reads calls between two marks; what cannot be read is text. `told`: whether one of them was told.
    fn read_calls(&self, mark: &str, told: bool, body: &str, close: &str, parts: &mut Vec<AnswerPart>) {
        if told {
            return self.read_more_calls(body, parts);
        }
        let read = self.format.calls.and_then(|calls| calls.body.read(body, &self.tools));
        // Without a mark, an answer in JSON is a call only of a tool that there is.
        let is_known = |call: &ToolCall| self.names().any(|name| name == call.name);
        let is_meant =
            |calls: &Vec<ToolCall>| !calls.is_empty() && (!mark.is_empty() || calls.iter().all(is_known));
        match read.filter(is_meant) {
            Some(calls) => parts.extend(calls.into_iter().map(AnswerPart::Call)),
            None => say(AnswerPart::Content, &format!("{mark}{body}{close}"), parts),
        }
    }

    /// Reads what follows a call before the mark: other calls, or text. Signs between calls, and braces too
    /// many, are neither.
    fn read_more_calls(&self, body: &str, parts: &mut Vec<AnswerPart>) {
        let rest = body.trim_start_matches(|c: char| is_between(c) || c == '}').trim_end_matches(is_between);
        match self.format.calls.and_then(|calls| calls.body.read_more(rest, &self.tools)) {
            Some(calls) => parts.extend(calls.into_iter().map(AnswerPart::Call)),
            None => say(AnswerPart::Content, rest, parts),
        }
    }
}

/// Adds a part, unless it is empty.
fn say(part: fn(String) -> AnswerPart, text: &str, parts: &mut Vec<AnswerPart>) {
    if !text.is_empty() {
        parts.push(part(text.to_owned()));
    }
}

/// The kind of a message of gpt-oss, by its header.
fn kind_of(header: &str) -> Kind {
    let to = header.split_once("to=functions.").map(|(_, to)| to);
    let name =
        |to: &str| to.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().to_owned();
    match to.map(name) {
        Some(name) if !name.is_empty() => Kind::Call(name),
        _ if header.contains("<|channel|>analysis") => Kind::Reasoning,
        _ => Kind::Content,
    }
}

fn read_message(name: String, body: &str, parts: &mut Vec<AnswerPart>) {
    match calls::arguments(body) {
        Some(arguments) => parts.push(AnswerPart::Call(ToolCall { name, arguments })),
        None => say(AnswerPart::Content, body, parts),
    }
}

/// The place of the first mark.
fn first(text: &str, marks: &[&'static str]) -> Option<(usize, &'static str)> {
    marks.iter().filter_map(|mark| Some((text.find(mark)?, *mark))).min_by_key(|(at, _)| *at)
}

/// Number of bytes before the first place where a mark may begin.
fn certain(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest);
    let mut places = text.char_indices().map(|(at, _)| at).skip_while(|&at| at < from);
    let may_begin = |at: &usize| marks.iter().any(|mark| mark.starts_with(&text[*at..]));
    places.find(may_begin).unwrap_or(text.len())
}

#[cfg(test)]
mod tests;
