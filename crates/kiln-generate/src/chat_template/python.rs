//! Python's formatting of values: `str`, `repr` and `json.dumps`.

use std::{borrow::Cow, fmt::Write};

use minijinja::{Value, value::ValueKind};

use super::meter::{LONGEST, is_namespace, too_much, wrong};

type Made<T> = Result<T, minijinja::Error>;

/// `str(value)`; empty for an undefined value, as in Jinja.
pub(super) fn text(value: &Value) -> Made<Cow<'_, str>> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let mut out = String::new();
    if !value.is_undefined() {
        write_repr(&mut out, value)?;
    }
    Ok(Cow::Owned(out))
}

fn write_repr(out: &mut String, value: &Value) -> Made<()> {
    if out.len() > LONGEST {
        return Err(too_much());
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Number if !value.is_integer() => out.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            write_list(out, value.try_iter()?, write_repr)?;
            if value.is_tuple() && value.len() == Some(1) {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            let (open, close) = if is_namespace(value) { ("<Namespace {", "}>") } else { ("{", "}") };
            out.push_str(open);
            write_list(out, pairs, |out, (key, value)| {
                write_repr(out, key)?;
                out.push_str(": ");
                write_repr(out, value)
            })?;
            out.push_str(close);
        }
        ValueKind::Invalid => return Err(wrong(value.to_string())),
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_list<T>(
    out: &mut String,
    items: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut String, &T) -> Made<()>,
) -> Made<()> {
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        write(out, &item)?;
    }
    Ok(())
}

/// `repr` of a string: quoted, with unprintable characters escaped.
fn write_quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c => {
                _ = match c as u32 {
                    n @ ..=0xff => write!(out, "\\x{n:02x}"),
                    n @ ..=0xffff => write!(out, "\\u{n:04x}"),
                    n => write!(out, "\\U{n:08x}"),
                }
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`: Rust escapes the same characters, except marks at the beginning of a text.
fn printable(c: char) -> bool {
    matches!(c, '\'' | '"' | '\\') || ['a', c].iter().collect::<String>().escape_debug().count() == 2
}

/// `repr` of a float: the shortest digits that read back as the same number.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(-4..16) | Err(_) => format!("{x:?}"),
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
    }
}

/// Escapes a text for HTML: the five characters that markupsafe escapes.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Options of `json.dumps`.
#[derive(Debug)]
pub(super) struct JsonStyle {
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
    /// Indentation per level; `None`: everything on one line.
    pub(super) indent: Option<String>,
    /// Separators between items, and between a key and its value.
    pub(super) separators: (String, String),
}

/// `json.dumps(value)`.
pub(super) fn json(value: &Value, style: &JsonStyle) -> Made<String> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, level: usize) -> Made<()> {
    if out.len() > LONGEST {
        return Err(too_much());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
        ValueKind::Number => out.push_str(&json_float(f64::try_from(value.clone())?)),
        ValueKind::String => write_json_text(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq => {
            write_json_items(out, ('[', ']'), value.try_iter()?, style, level, |out, item| {
                write_json(out, item, style, level + 1)
            })?;
        }
        ValueKind::Map if is_namespace(value) => return Err(wrong("tojson cannot write a namespace")),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten();
            let mut pairs: Vec<(Value, Value)> = pairs.collect();
            if style.sort_keys {
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
            }
            write_json_items(out, ('{', '}'), pairs.into_iter(), style, level, |out, (key, value)| {
                write_json_text(out, &json_key(key)?, style.ensure_ascii);
                out.push_str(&style.separators.1);
                write_json(out, value, style, level + 1)
            })?;
        }
        kind => return Err(wrong(format!("tojson cannot write a value of type {kind}"))),
    }
    Ok(())
}

fn write_json_items<T>(
    out: &mut String,
    (open, close): (char, char),
    items: impl Iterator<Item = T>,
    style: &JsonStyle,
    level: usize,
    mut write: impl FnMut(&mut String, &T) -> Made<()>,
) -> Made<()> {
    let new_line = |out: &mut String, level: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), level));
        }
    };
    out.push(open);
    let mut empty = true;
    for item in items {
        if !empty {
            out.push_str(&style.separators.0);
        }
        empty = false;
        new_line(out, level + 1);
        write(out, &item)?;
    }
    if !empty {
        new_line(out, level);
    }
    out.push(close);
    Ok(())
}

fn json_key(key: &Value) -> Made<Cow<'_, str>> {
    Ok(match key.kind() {
        ValueKind::String => Cow::Borrowed(key.as_str().unwrap_or_default()),
        ValueKind::None => Cow::Borrowed("null"),
        ValueKind::Bool => Cow::Borrowed(if key.is_true() { "true" } else { "false" }),
        ValueKind::Number if key.is_integer() => Cow::Owned(key.to_string()),
        ValueKind::Number => Cow::Owned(json_float(f64::try_from(key.clone())?)),
        kind => return Err(wrong(format!("tojson cannot write a key of type {kind}"))),
    })
}

fn json_float(x: f64) -> String {
    match x {
        x if x.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        x => float(x),
    }
}

fn write_json_text(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
