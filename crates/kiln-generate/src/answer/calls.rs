//! Calls of tools, as families of models write them.

use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use super::ToolCall;

/// The text between the marks of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// JSON with a name and arguments, one or several (Hermes, Qwen, Llama, Phi, Granite, Jamba); or XML:
    /// `<function=NAME><parameter=KEY>VALUE` (Qwen3-Coder), or `NAME<arg_key>KEY</arg_key><arg_value>VALUE`
    /// (GLM).
    Tagged,
    /// `[{..}]`, or `NAME[ARGS]{..}`.
    Mistral,
    /// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`, or with JSON in a fence.
    DeepSeek,
    /// `[NAME(KEY=VALUE, ..), ..]` (LFM2).
    Python,
}

impl Body {
    /// Reads all calls; `None` if one of them cannot be read.
    pub(super) fn read(self, text: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
        let text = text.trim();
        match self {
            Self::Tagged if text.contains("<function=") => functions(text, tools),
            Self::Tagged if text.starts_with(['{', '[']) => json(text),
            Self::Tagged => pairs(text, tools),
            Self::Mistral if text.starts_with('[') => json(text),
            Self::Mistral => text.split("[TOOL_CALLS]").map(named).collect(),
            Self::DeepSeek => text.split("<｜tool▁call▁begin｜>").skip(1).map(separated).collect(),
            Self::Python => python(text),
        }
    }

    /// Reads calls that follow one in JSON; `None` if the text is something else.
    pub(super) fn read_more(self, text: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
        match self {
            Self::Tagged if text.starts_with("<function=") => functions(text, tools),
            _ if text.starts_with('{') => json(text),
            _ => None,
        }
    }
}

/// Returns a JSON object as it is written; `None` if the text is none.
pub(super) fn arguments(text: &str) -> Option<String> {
    let text = text.trim();
    let is_object = text.starts_with('{') && serde_json::from_str::<&RawValue>(text).is_ok();
    is_object.then(|| text.to_owned())
}

#[derive(Deserialize)]
struct Written<'a> {
    name: Option<String>,
    #[serde(borrow, alias = "parameters", alias = "args")]
    arguments: Option<&'a RawValue>,
    /// The call itself, as OpenAI's API has it.
    #[serde(borrow)]
    function: Option<&'a RawValue>,
}

/// JSON values that follow each other, with or without separators.
fn json(text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<&RawValue>();
        let value = values.next()?.ok()?;
        let end = values.byte_offset();
        add(value, &mut calls, 0)?;
        rest = rest[end..].trim_start_matches(|c: char| c.is_whitespace() || c == ';' || c == ',');
    }
    Some(calls)
}

/// Adds a call, or those of a list. `depth`: number of values around it.
fn add(value: &RawValue, calls: &mut Vec<ToolCall>, depth: usize) -> Option<()> {
    /// A list, a call, and the function in it.
    const DEEPEST: usize = 2;

    if depth > DEEPEST {
        return None;
    }
    if value.get().starts_with('[') {
        let all: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
        return all.into_iter().try_for_each(|value| add(value, calls, depth + 1));
    }
    let Written { name, arguments: given, function } = serde_json::from_str(value.get()).ok()?;
    if let (None, Some(function)) = (&name, function) {
        return add(function, calls, depth + 1);
    }
    let arguments = match given {
        None => "{}".to_owned(),
        // Some models write the object as a text.
        Some(given) => {
            arguments(&serde_json::from_str(given.get()).unwrap_or_else(|_| given.get().to_owned()))?
        }
    };
    calls.push(ToolCall { name: name?, arguments });
    Some(())
}

/// `NAME[CALL_ID]ID[ARGS]{..}`, where the middle may be missing.
fn named(text: &str) -> Option<ToolCall> {
    let (head, object) = text.split_at(text.find('{')?);
    let name = head.split('[').next()?.trim();
    (!name.is_empty()).then_some(())?;
    Some(ToolCall { name: name.to_owned(), arguments: arguments(object)? })
}

fn separated(text: &str) -> Option<ToolCall> {
    let text = text.split("<｜tool▁call▁end｜>").next()?;
    let (head, rest) = text.split_once("<｜tool▁sep｜>")?;
    let (name, object) = match rest.split_once("```json") {
        Some((name, fenced)) => (name, fenced.split("```").next()?),
        None => (head, rest),
    };
    Some(ToolCall { name: name.trim().to_owned(), arguments: arguments(object)? })
}

fn functions(text: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let function = |text: &str| {
        let (name, rest) = text.split_once('>')?;
        let mut given = Map::new();
        for parameter in rest.split("</function>").next()?.split("<parameter=").skip(1) {
            let (key, value) = parameter.split_once('>')?;
            let value = value.split("</parameter>").next()?;
            given.insert(key.trim().to_owned(), typed(name.trim(), key.trim(), value, tools));
        }
        Some(ToolCall { name: name.trim().to_owned(), arguments: Value::Object(given).to_string() })
    };
    text.split("<function=").skip(1).map(function).collect()
}

fn pairs(text: &str, tools: &[Value]) -> Option<Vec<ToolCall>> {
    let mut parts = text.split("<arg_key>");
    let name = parts.next()?.trim();
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    let mut given = Map::new();
    for pair in parts {
        let (key, rest) = pair.split_once("</arg_key>")?;
        let value = rest.split_once("<arg_value>")?.1.split("</arg_value>").next()?;
        given.insert(key.trim().to_owned(), typed(name, key.trim(), value, tools));
    }
    let call = ToolCall { name: name.to_owned(), arguments: Value::Object(given).to_string() };
    is_name.then(|| vec![call])
}

/// A value that is written without quotes: text, unless the tool wants something else.
fn typed(function: &str, key: &str, value: &str, tools: &[Value]) -> Value {
    let value = value.strip_prefix('\n').unwrap_or(value);
    let value = value.strip_suffix('\n').unwrap_or(value);
    let own =
        tools.iter().map(|tool| tool.get("function").unwrap_or(tool)).find(|own| own["name"] == function);
    let schema = own.map(|own| &own["parameters"]["properties"][key]);
    let wants_text = schema.is_none_or(|schema| schema.get("type").is_none_or(|kind| kind == "string"));
    match serde_json::from_str(value.trim()) {
        Ok(other) if !wants_text => other,
        _ => Value::String(value.to_owned()),
    }
}

/// Calls in the syntax of Python.
fn python(text: &str) -> Option<Vec<ToolCall>> {
    let mut reader = Python { rest: text };
    reader.take('[')?;
    let mut calls = Vec::new();
    while !reader.is_at(']') {
        let name = reader.name()?;
        reader.take('(')?;
        let mut given = Map::new();
        while !reader.is_at(')') {
            let key = reader.name()?;
            reader.take('=')?;
            given.insert(key, reader.value(0)?);
            reader.comma(')')?;
        }
        reader.take(')')?;
        reader.comma(']')?;
        calls.push(ToolCall { name, arguments: Value::Object(given).to_string() });
    }
    reader.take(']')?;
    reader.rest.trim().is_empty().then_some(calls)
}

/// Reads literals of Python.
struct Python<'a> {
    rest: &'a str,
}

impl Python<'_> {
    /// Most levels of lists and dictionaries.
    const DEPTH: usize = 64;

    fn is_at(&mut self, wanted: char) -> bool {
        self.rest = self.rest.trim_start();
        self.rest.starts_with(wanted)
    }

    fn take(&mut self, wanted: char) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(wanted)?;
        Some(())
    }

    /// A comma, unless `end` follows.
    fn comma(&mut self, end: char) -> Option<()> {
        if self.is_at(end) { Some(()) } else { self.take(',') }
    }

    fn name(&mut self) -> Option<String> {
        self.rest = self.rest.trim_start();
        let end = self.rest.find(|c: char| !c.is_alphanumeric() && !"_.-".contains(c))?;
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > Self::DEPTH {
            return None;
        }
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            quote @ ('"' | '\'') => self.text(quote).map(Value::String),
            '[' => self.list('[', ']', depth),
            '(' => self.list('(', ')', depth),
            '{' => {
                self.take('{')?;
                let mut map = Map::new();
                while !self.is_at('}') {
                    let Value::String(key) = self.value(depth + 1)? else { return None };
                    self.take(':')?;
                    map.insert(key, self.value(depth + 1)?);
                    self.comma('}')?;
                }
                self.take('}')?;
                Some(Value::Object(map))
            }
            _ => {
                let end = self.rest.find(|c: char| !c.is_alphanumeric() && !"_.+-".contains(c))?;
                let (word, rest) = self.rest.split_at(end);
                self.rest = rest;
                match word {
                    "True" | "true" => Some(Value::Bool(true)),
                    "False" | "false" => Some(Value::Bool(false)),
                    "None" | "null" => Some(Value::Null),
                    number => serde_json::from_str(number).ok().filter(Value::is_number),
                }
            }
        }
    }

    fn list(&mut self, open: char, close: char, depth: usize) -> Option<Value> {
        self.take(open)?;
        let mut list = Vec::new();
        while !self.is_at(close) {
            list.push(self.value(depth + 1)?);
            self.comma(close)?;
        }
        self.take(close)?;
        Some(Value::Array(list))
    }

    fn text(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => text.push(match chars.next()?.1 {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    other => other,
                }),
                c if c == quote => {
                    self.rest = &self.rest[at + c.len_utf8()..];
                    return Some(text);
                }
                c => text.push(c),
            }
        }
        None
    }
}
