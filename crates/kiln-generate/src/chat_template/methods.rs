//! The methods of Python's strings, lists and dicts. Methods that change a value in place are missing:
//! transformers' sandbox rejects them, too.

use minijinja::{
    Error, ErrorKind, State, Value,
    formatting::FormatStyle,
    value::{Kwargs, Rest, Tuple, ValueKind, from_args},
};

use super::{
    meter::{LONGEST, too_much, wrong},
    operators::formatted,
    python,
};

type Made<T> = Result<T, Error>;

pub(super) fn call(_: &mut State, value: &Value, method: &str, args: &[Value]) -> Made<Value> {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, method, args),
        (_, ValueKind::Map) => of_dict(value, method, args),
        (_, ValueKind::Seq) => of_list(value, method, args),
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

fn of_dict(dict: &Value, method: &str, args: &[Value]) -> Made<Value> {
    let Some(object) = dict.as_object() else { return Err(ErrorKind::UnknownMethod.into()) };
    let pairs = || object.try_iter_pairs().into_iter().flatten();
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        return Ok(object.get_value(key).or(default).unwrap_or_else(|| Value::from(())));
    }
    let made = match method {
        "items" => pairs().map(|(key, value)| Value::from(Tuple::from([key, value]))).collect(),
        "keys" => pairs().map(|(key, _)| key).collect(),
        "values" => pairs().map(|(_, value)| value).collect(),
        "copy" => dict.clone(),
        _ => return Err(ErrorKind::UnknownMethod.into()),
    };
    let () = from_args(args)?;
    Ok(made)
}

fn of_list(list: &Value, method: &str, args: &[Value]) -> Made<Value> {
    if !["count", "index"].contains(&method) {
        return Err(ErrorKind::UnknownMethod.into());
    }
    let (what,): (&Value,) = from_args(args)?;
    match method {
        "count" => Ok(Value::from(list.try_iter()?.filter(|item| item == what).count())),
        _ => match list.try_iter()?.position(|item| item == *what) {
            Some(at) => Ok(Value::from(at)),
            None => Err(wrong("index: the value is not in the list")),
        },
    }
}

/// Python's `str.isspace` for one character.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Whether Python's `str.splitlines` ends a line at this character.
fn ends_line(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn of_text(text: &str, method: &str, args: &[Value]) -> Made<Value> {
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Ok(Value::from(stripped(text, method != "rstrip", method != "lstrip", chars)))
        }
        "startswith" | "endswith" => {
            let (what,): (&Value,) = from_args(args)?;
            let fits = |part: &str| {
                if method == "startswith" { text.starts_with(part) } else { text.ends_with(part) }
            };
            match what.as_str() {
                Some(what) => Ok(Value::from(fits(what))),
                None => Ok(Value::from(what.try_iter()?.any(|what| what.as_str().is_some_and(fits)))),
            }
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let (what,): (&str,) = from_args(args)?;
            if method == "count" {
                return Ok(Value::from(text.matches(what).count()));
            }
            let at = if method.starts_with('r') { text.rfind(what) } else { text.find(what) };
            match at.and_then(|at| text.get(..at)) {
                Some(before) => Ok(Value::from(before.chars().count())),
                None if method.ends_with("find") => Ok(Value::from(-1)),
                None => Err(wrong(format!("{method}: substring not found"))),
            }
        }
        "replace" => {
            let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
            replaced(text, old, new, count)
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            joined(text, items.try_iter()?)
        }
        "split" | "rsplit" => {
            let (args, kwargs): (Rest<Value>, Kwargs) = from_args(args)?;
            let separator = args.first().cloned().or(kwargs.get("sep")?).filter(|sep| !sep.is_none());
            let most =
                args.get(1).cloned().or(kwargs.get("maxsplit")?).and_then(|n| n.as_i64()).unwrap_or(-1);
            kwargs.assert_all_used()?;
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let parts = match separator.as_ref().map(Value::as_str) {
                None => words(text, most, method == "rsplit"),
                Some(Some(separator)) if !separator.is_empty() => {
                    pieces(text, separator, most, method == "rsplit")
                }
                Some(_) => {
                    return Err(wrong(format!("{method}: the separator must be a text that is not empty")));
                }
            };
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            Ok(lines(text, keep.unwrap_or(false)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = match if method == "partition" {
                text.split_once(separator)
            } else {
                text.rsplit_once(separator)
            } {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from))))
        }
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(args)?;
            let rest =
                if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Ok(Value::from(rest.unwrap_or(text)))
        }
        "ljust" | "rjust" | "center" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            padded(text, method, width, fill.unwrap_or(' '))
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
            let zeros = padded(digits, "rjust", width.saturating_sub(sign.len()), '0')?;
            Ok(Value::from(format!("{sign}{zeros}")))
        }
        "format" => formatted(FormatStyle::StrFormat, text, args),
        _ => without_arguments(text, method, args),
    }
}

fn without_arguments(text: &str, method: &str, args: &[Value]) -> Made<Value> {
    let all = |test: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(test));
    let cased = |wanted: fn(char) -> bool, other: fn(char) -> bool| {
        Value::from(text.chars().any(wanted) && !text.chars().any(other))
    };
    let made = match method {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "casefold" => Value::from(text.to_uppercase().to_lowercase()),
        "swapcase" => text
            .chars()
            .map(|c| if c.is_uppercase() { lower(c) } else { c.to_uppercase().to_string() })
            .collect::<String>()
            .into(),
        "capitalize" => Value::from(capitalized(text)),
        "title" => Value::from(titled(text, |before| !before.is_alphabetic())),
        "isspace" => all(is_space),
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => Value::from(text.is_ascii()),
        "islower" => cased(char::is_lowercase, char::is_uppercase),
        "isupper" => cased(char::is_uppercase, char::is_lowercase),
        "istitle" => {
            let any = text.chars().any(char::is_alphabetic);
            Value::from(any && text == titled(text, |before| !before.is_alphabetic()))
        }
        _ => return Err(ErrorKind::UnknownMethod.into()),
    };
    let () = from_args(args)?;
    Ok(made)
}

fn lower(c: char) -> String {
    c.to_lowercase().to_string()
}

/// Capitalizes the first letter in title case, and puts the rest in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map_or_else(String::new, title_case);
    first + &chars.as_str().to_lowercase()
}

/// Converts to title case, which differs from upper case for the few letters that are two.
fn title_case(c: char) -> String {
    match c {
        'Ǆ'..='ǆ' => "ǅ".to_owned(),
        'Ǉ'..='ǉ' => "ǈ".to_owned(),
        'Ǌ'..='ǌ' => "ǋ".to_owned(),
        'Ǳ'..='ǳ' => "ǲ".to_owned(),
        c => {
            let upper = c.to_uppercase().to_string();
            let mut rest = upper.chars();
            match (rest.next(), rest.as_str()) {
                (Some(first), more) if !more.is_empty() => format!("{first}{}", more.to_lowercase()),
                _ => upper,
            }
        }
    }
}

/// Capitalizes every word; a word begins after a character for which `breaks` is true.
pub(super) fn titled(text: &str, breaks: impl Fn(char) -> bool) -> String {
    let mut before = None;
    let word = |c: char| match before.replace(c).is_none_or(&breaks) {
        true => title_case(c),
        false => lower(c),
    };
    text.chars().map(word).collect()
}

pub(super) fn stripped<'a>(text: &'a str, left: bool, right: bool, chars: Option<&str>) -> &'a str {
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(goes) } else { text };
    if right { text.trim_end_matches(goes) } else { text }
}

/// Replaces at most `count` occurrences; all if it is negative.
pub(super) fn replaced(text: &str, old: &str, new: &str, count: Option<i64>) -> Made<Value> {
    let count = usize::try_from(count.unwrap_or(-1)).unwrap_or(usize::MAX);
    let times = text.matches(old).count().min(count);
    if times.saturating_mul(new.len()) > LONGEST {
        return Err(too_much());
    }
    Ok(Value::from(text.replacen(old, new, count)))
}

pub(super) fn joined(separator: &str, items: impl Iterator<Item = Value>) -> Made<Value> {
    let mut out = String::new();
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(separator);
        }
        out.push_str(&python::text(&item)?);
        if out.len() > LONGEST {
            return Err(too_much());
        }
    }
    Ok(Value::from(out))
}

pub(super) fn padded(text: &str, how: &str, width: usize, fill: char) -> Made<Value> {
    if width.saturating_mul(fill.len_utf8()) > LONGEST {
        return Err(too_much());
    }
    let len = text.chars().count();
    let padding = width.saturating_sub(len);
    let left = match how {
        "ljust" => 0,
        "rjust" => padding,
        // If the padding is odd, Python puts the larger half to the left of a text of even length.
        _ => padding / 2 + (padding & width & 1),
    };
    let fill = |n: usize| std::iter::repeat_n(fill, n);
    Ok(Value::from(fill(left).chain(text.chars()).chain(fill(padding - left)).collect::<String>()))
}

/// `split` without a separator: splits at runs of white space, without empty parts.
fn words(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = stripped(text, true, true, None);
    while !rest.is_empty() {
        let at = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let split = at.filter(|_| out.len() < most).and_then(|at| {
            let space = rest.get(at..)?.chars().next()?;
            Some((rest.get(..at)?, rest.get(at + space.len_utf8()..)?))
        });
        let (word, others) = match split {
            Some((before, after)) if from_right => (after, before),
            Some(split) => split,
            None => (rest, ""),
        };
        out.push(word);
        rest = stripped(others, !from_right, from_right, None);
    }
    if from_right {
        out.reverse();
    }
    out
}

fn pieces<'a>(text: &'a str, separator: &str, most: usize, from_right: bool) -> Vec<&'a str> {
    let most = most.saturating_add(1);
    if !from_right {
        return text.splitn(most, separator).collect();
    }
    let mut out: Vec<&str> = text.rsplitn(most, separator).collect();
    out.reverse();
    out
}

fn lines(text: &str, keep_ends: bool) -> Value {
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends_line).unwrap_or(rest.len());
        let (line, tail) = rest.split_at(end);
        let after = match tail.strip_prefix("\r\n") {
            Some(after) => after,
            None => tail.chars().next().map_or("", |c| tail.get(c.len_utf8()..).unwrap_or("")),
        };
        let ended = rest.get(..rest.len() - after.len()).unwrap_or(rest);
        out.push(Value::from(if keep_ends { ended } else { line }));
        rest = after;
    }
    Value::from(out)
}
