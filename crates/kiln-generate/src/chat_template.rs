//! Rendering of conversations as prompts: the Jinja templates that come with models (transformers'
//! `apply_chat_template`).
//!
//! The output equals that of transformers, byte for byte. The difference is in what a template may do: it
//! runs within limits, and a fault in it is an error.

use std::{collections::BTreeMap, time::SystemTime};

use kiln_core::{Error, Result};
use minijinja::{
    Value,
    value::{Serde, ValueKind},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

mod engine;
mod filters;
mod meter;
mod methods;
mod operators;
mod python;
mod respelling;
mod source;

/// A value for a template: JSON, with its keys in the order in which they were written.
#[derive(Clone, Debug, PartialEq)]
pub struct Data(Value);

impl Data {
    pub fn new(value: impl Serialize) -> Self {
        Self(Value::from(Serde(value)))
    }
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Value::deserialize(deserializer).map(Self)
    }
}

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// A message: its role, its content, and other fields that the template reads (`tool_calls`, `name`,
/// `reasoning_content`).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Message(Data);

impl Message {
    pub fn new(role: &str, content: &str) -> Self {
        Self(Data(Value::from_pairs([("role", role), ("content", content)])))
    }

    /// `system`, `user`, `assistant` or `tool`; empty if the message has no role.
    pub fn role(&self) -> String {
        self.text("role").unwrap_or_default()
    }

    /// The content, if it is a text and not a list of parts.
    pub fn content(&self) -> Option<String> {
        self.text("content")
    }

    fn text(&self, key: &str) -> Option<String> {
        self.0.0.get_attr(key).ok()?.as_str().map(str::to_owned)
    }

    fn pairs(&self) -> Vec<(Value, Value)> {
        self.0.0.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten().collect()
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let data = Data::deserialize(deserializer)?;
        match data.0.kind() {
            ValueKind::Map => Ok(Self(data)),
            kind => Err(serde::de::Error::custom(format!("a message is an object, not a {kind}"))),
        }
    }
}

/// The input of a template.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Conversation {
    pub messages: Vec<Message>,
    /// JSON schemas of functions that the model may call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Vec<Data>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<Vec<Data>>,
    /// Other variables of the template, such as `enable_thinking`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub variables: BTreeMap<String, Data>,
}

/// Options for rendering a template.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Whether the prompt ends where the model's answer begins.
    pub add_generation_prompt: bool,
    /// The field of the last message that the model continues, most often `content`; the prompt ends with it.
    pub continue_final: Option<String>,
    /// The result of `strftime_now`; `None`: the current time.
    pub now: Option<SystemTime>,
}

/// A parsed template. Faults other than those of its syntax are found when it is rendered.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
}

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if `source` is too long, or not a template.
    pub fn new(source: &str) -> Result<Self> {
        engine::prepared(source).map(|source| Self { source })
    }

    /// Whether the template reads a variable of this name.
    pub fn reads(&self, name: &str) -> bool {
        engine::reads(&self.source, name)
    }

    /// The text of the template, as it is run.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// ChatML, for models without a template, which llama.cpp falls back to as well.
    pub fn chatml() -> Self {
        let source = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + \
                      '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
        Self { source: source.to_owned() }
    }

    /// Renders the prompt. `special_tokens` are variables too (`bos_token`); variables of the conversation
    /// override them.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if the template rejects the conversation (`raise_exception`), has a fault,
    /// takes too many steps, recurses too deeply or produces too much text.
    pub fn render(
        &self,
        conversation: &Conversation,
        special_tokens: &BTreeMap<String, String>,
        options: &RenderOptions,
    ) -> Result<String> {
        if conversation.messages.is_empty() {
            return Err(refused("a conversation needs a message"));
        }
        let mut messages: Vec<Vec<(Value, Value)>> = conversation
            .messages
            .iter()
            .map(|message| with_reasoning(without_none(message.pairs())))
            .collect();
        let continued = match &options.continue_final {
            Some(_) if options.add_generation_prompt => {
                return Err(refused("the last message cannot be continued where another one is to begin"));
            }
            Some(field) => Some(self.mark_end(&mut messages, field)?),
            None => None,
        };

        let of = |data: &Data| data.0.clone();
        let list =
            |list: &Option<Vec<Data>>| list.as_ref().map(|list| list.iter().map(of).collect::<Value>());
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        variables
            .extend(special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))));
        variables.extend(conversation.variables.iter().map(|(name, data)| (name.as_str(), of(data))));
        variables.insert("messages", messages.into_iter().map(Value::from_pairs).collect());
        variables.insert("tools", Value::from(list(&conversation.tools)));
        variables.insert("documents", Value::from(list(&conversation.documents)));
        variables.insert("add_generation_prompt", Value::from(options.add_generation_prompt));
        let text = engine::rendered(&self.source, Value::from_pairs(variables), options.now)?;
        match continued {
            Some(last) => cut_at_mark(text, &last),
            None => Ok(text),
        }
    }

    /// Marks the end of the text that the model continues, and returns that text.
    fn mark_end(&self, messages: &mut [Vec<(Value, Value)>], field: &str) -> Result<String> {
        let Some(last) = messages.last_mut() else { return Err(refused("a conversation needs a message")) };
        let value =
            |name: &str| last.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, v)| v.clone());
        let Some(content) = value(field) else {
            return Err(refused(&format!("the last message has no `{field}` to continue")));
        };
        // Reasoning has several names, and the template may read any of them.
        let fields: Vec<&str> = match REASONING.contains(&field) {
            true => REASONING.into_iter().filter(|name| value(name).as_ref() == Some(&content)).collect(),
            false => vec![field],
        };
        if !fields.iter().any(|field| self.source.contains(field)) {
            return Err(refused(&format!("it does not read `{field}`, so that cannot be continued")));
        }
        let (text, marked) = match content.as_str() {
            Some(text) => (text.to_owned(), Value::from(format!("{text}{END_MARK}"))),
            None => marked_parts(&content)?,
        };
        for (key, value) in last.iter_mut() {
            if key.as_str().is_some_and(|key| fields.contains(&key)) {
                *value = marked.clone();
            }
        }
        Ok(text)
    }
}

/// Names under which a message's reasoning is passed; templates read the first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Follows a text whose end must be found again in the prompt.
const END_MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

fn refused(why: &str) -> Error {
    Error::ChatTemplate { why: why.to_owned() }
}

/// Removes null values: programs write `"tool_calls": null` for a missing value, and templates ask whether it
/// is defined.
fn without_none(pairs: Vec<(Value, Value)>) -> Vec<(Value, Value)> {
    pairs.into_iter().filter(|(_, value)| !value.is_none()).collect()
}

/// Adds reasoning under all the names by which templates read it.
fn with_reasoning(mut pairs: Vec<(Value, Value)>) -> Vec<(Value, Value)> {
    let value =
        |name: &&str| pairs.iter().find(|(key, _)| key.as_str() == Some(*name)).map(|(_, v)| v.clone());
    let Some(reasoning) = REASONING.iter().find_map(value) else { return pairs };
    if value(&"thinking").is_none() {
        pairs.insert(0, (Value::from("thinking"), reasoning.clone()));
    }
    match pairs.iter_mut().find(|(key, _)| key.as_str() == Some("reasoning_content")) {
        Some((_, value)) => *value = reasoning,
        None => pairs.push((Value::from("reasoning_content"), reasoning)),
    }
    pairs
}

/// Appends the mark to the last text in a list of parts. Returns that text and the list.
fn marked_parts(parts: &Value) -> Result<(String, Value)> {
    let none = || refused("the last message has no text to continue");
    let mut parts: Vec<Value> = parts.try_iter().map_err(|_| none())?.collect();
    let text_of = |part: &Value| part.get_attr("text").ok()?.as_str().map(str::to_owned);
    let Some((at, text)) = parts.iter().enumerate().rev().find_map(|(i, part)| Some((i, text_of(part)?)))
    else {
        return Err(none());
    };
    if let Some(part) = parts.get_mut(at) {
        let pairs = part.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
        let marked = pairs.map(|(key, value)| match key.as_str() {
            Some("text") => (key, Value::from(format!("{text}{END_MARK}"))),
            _ => (key, value),
        });
        *part = Value::from_pairs(marked.collect::<Vec<_>>());
    }
    Ok((text, Value::from(parts)))
}

/// Cuts the prompt at the mark. A template that trims a message also trims the space in the mark; then it
/// would have trimmed white space before the mark as well.
fn cut_at_mark(prompt: String, last: &str) -> Result<String> {
    let at = prompt.rfind(END_MARK.trim_end()).filter(|_| prompt.contains(last.trim()));
    let Some(before) = at.and_then(|at| prompt.get(..at)) else {
        return Err(refused("it does not repeat the last message as it is, so that cannot be continued"));
    };
    let kept = prompt.get(before.len()..).is_some_and(|rest| rest.starts_with(END_MARK));
    Ok(if kept { before } else { before.trim_end() }.to_owned())
}

/// The templates of a model, by name, and the special tokens with which they are rendered.
#[derive(Clone, Debug, Default)]
pub struct ChatTemplates {
    /// Sources of the templates, which are parsed when they are used.
    pub by_name: BTreeMap<String, String>,
    /// Special tokens by name, such as `bos_token`.
    pub special_tokens: BTreeMap<String, String>,
}

impl ChatTemplates {
    /// Chooses the only template or the default one; for a conversation with tools, `tool_use` if there is
    /// one.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if there is none, if none of them is the default, and for an invalid template.
    pub fn choose(&self, with_tools: bool) -> Result<ChatTemplate> {
        let tools = self.by_name.get("tool_use").filter(|_| with_tools);
        match tools.or_else(|| self.by_name.get("default")) {
            Some(source) => ChatTemplate::new(source),
            None if self.by_name.is_empty() => Err(refused("the model has none")),
            None => Err(refused(&format!(
                "the model has several and none is the default; name one of {}",
                self.names()
            ))),
        }
    }

    /// The template of this name.
    ///
    /// # Errors
    /// [`Error::Unknown`] with the existing names.
    pub fn named(&self, name: &str) -> Result<ChatTemplate> {
        match self.by_name.get(name) {
            Some(source) => ChatTemplate::new(source),
            None => {
                let known = self.by_name.keys().cloned().collect();
                Err(Error::Unknown { what: "chat template", name: name.to_owned(), known })
            }
        }
    }

    fn names(&self) -> String {
        self.by_name.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}
