//! Filters and tests in which minijinja differs from Jinja, and transformers' `tojson`.

use minijinja::{
    Environment, Error, Value,
    formatting::FormatStyle,
    value::{Kwargs, Rest, ValueKind},
};

use super::{
    meter::{LONGEST, is_namespace, too_much, wrong},
    methods::{capitalized, joined, padded, replaced, stripped, titled},
    operators::{dict_method, formatted, sum},
    python::{self, JsonStyle},
};

type Made<T> = Result<T, Error>;

/// Maximum number of items in a list that a filter creates.
const MOST: usize = 1 << 20;

pub(super) fn add(env: &mut Environment<'_>) {
    // These filters are not in Jinja: a template that uses them fails in transformers.
    for name in ["lines", "split", "zip", "chain", "bool", "pprint"] {
        env.remove_filter(name);
    }
    for name in ["startingwith", "endingwith", "safe"] {
        env.remove_test(name);
    }
    env.add_filter("tojson", to_json);
    env.add_filter("string", |value: Value| python::text(&value).map(|text| Value::from(text.into_owned())));
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("join", join);
    env.add_filter("replace", |text: Value, old: Value, new: Value, count: Option<i64>| {
        replaced(&python::text(&text)?, &python::text(&old)?, &python::text(&new)?, count)
    });
    env.add_filter("trim", |text: Value, chars: Option<&str>| {
        Ok::<_, Error>(stripped(&python::text(&text)?, true, true, chars).to_owned())
    });
    env.add_filter("title", |text: Value| {
        let breaks = |c: char| c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<');
        Ok::<_, Error>(titled(&python::text(&text)?, breaks))
    });
    env.add_filter("capitalize", |text: Value| Ok::<_, Error>(capitalized(&python::text(&text)?)));
    env.add_filter("center", |text: Value, width: Option<usize>| {
        padded(&python::text(&text)?, "center", width.unwrap_or(80), ' ')
    });
    env.add_filter("wordcount", |text: Value| {
        let words = |text: &str| {
            text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty()).count()
        };
        Ok::<_, Error>(words(&python::text(&text)?))
    });
    env.add_filter("format", |pattern: &str, args: Rest<Value>| {
        formatted(FormatStyle::Printf, pattern, &args)
    });
    env.add_filter("indent", indent);
    env.add_filter("default", default);
    env.add_filter("d", default);
    env.add_filter("int", int);
    env.add_filter("float", float);
    env.add_filter("last", last);
    // Looks up an attribute, never an item.
    env.add_filter("attr", |value: Value, name: &str| match is_namespace(&value) {
        true => value.get_attr(name),
        false => Ok(dict_method(&value, name).unwrap_or_default()),
    });
    env.add_test("iterable", |value: Value| match value.kind() {
        ValueKind::None | ValueKind::Undefined => value.is_undefined(),
        _ => value.try_iter().is_ok(),
    });
    env.add_filter("batch", batch);
    env.add_filter("slice", columns);
    env.add_filter("sum", total);
    env.add_test("sequence", |value: Value| {
        value.is_undefined() || value.as_str().is_some() || (value.len().is_some() && !is_namespace(&value))
    });
    env.add_test("mapping", |value: Value| value.kind() == ValueKind::Map && !is_namespace(&value));
    env.add_test("callable", |value: Value| {
        value.kind() == ValueKind::Plain
            && value.as_object().is_some_and(|object| !object.type_name().contains("Value"))
    });
}

/// transformers' own filter: nothing is escaped for HTML, and the output is that of Python's `json.dumps`.
fn to_json(value: Value, args: Rest<Value>, kwargs: Kwargs) -> Made<Value> {
    let mut given = args.iter().cloned();
    let mut option = |name: &str| -> Made<Option<Value>> {
        Ok(given.next().or(kwargs.get::<Option<Value>>(name)?).filter(|value| !value.is_none()))
    };
    let ensure_ascii = option("ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match option("indent")? {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (_, Some(width @ ..=1000)) => " ".repeat(width),
            _ => return Err(wrong("tojson: the indent must be a text, or a number from 0 to 1000")),
        }),
    };
    let separators = match option("separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(given) => {
            let texts: Vec<String> =
                given.try_iter()?.filter_map(|s| s.as_str().map(str::to_owned)).collect();
            let [items, keys]: [String; 2] =
                texts.try_into().map_err(|_| wrong("tojson: the separators must be two texts"))?;
            (items, keys)
        }
    };
    let sort_keys = option("sort_keys")?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;
    python::json(&value, &JsonStyle { ensure_ascii, sort_keys, indent, separators }).map(Value::from)
}

fn length(value: Value) -> Made<usize> {
    match value.is_undefined() {
        true => Ok(0),
        false => value.len().ok_or_else(|| wrong(format!("a value of type {} has no length", value.kind()))),
    }
}

fn join(items: Value, separator: Option<Value>, kwargs: Kwargs) -> Made<Value> {
    let separator = separator.or(kwargs.get("d")?).unwrap_or_else(|| Value::from(""));
    let attribute: Option<Value> = kwargs.get("attribute")?;
    kwargs.assert_all_used()?;
    let separator = python::text(&separator)?;
    match (items.is_undefined(), attribute) {
        (true, _) => Ok(Value::from("")),
        (_, None) => joined(&separator, items.try_iter()?),
        (_, Some(attribute)) => {
            let of = |item: Value| item.get_item(&attribute);
            let values: Vec<Value> = items.try_iter()?.map(of).collect::<Made<_>>()?;
            joined(&separator, values.into_iter())
        }
    }
}

fn indent(
    text: Value,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Made<Value> {
    let width = width.or(kwargs.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(kwargs.get("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = match (width.as_str(), width.as_usize()) {
        (Some(text), _) => text.to_owned(),
        (_, Some(width @ ..=1000)) => " ".repeat(width),
        _ => return Err(wrong("indent: the width must be a text, or a number from 0 to 1000")),
    };
    let text = python::text(&text)?;
    if text.matches('\n').count().saturating_mul(indent.len()) > LONGEST {
        return Err(too_much());
    }
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

fn default(value: Value, other: Option<Value>, boolean: Option<bool>, kwargs: Kwargs) -> Made<Value> {
    let other = other.or(kwargs.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let boolean = boolean.or(kwargs.get("boolean")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    Ok(if value.is_undefined() || (boolean && !value.is_true()) { other } else { value })
}

/// Converts to an integer; `default` if the value cannot be read as a number.
fn int(value: Value, default: Option<Value>, base: Option<u32>) -> Made<Value> {
    let default = || default.clone().unwrap_or_else(|| Value::from(0));
    if let Some(text) = value.as_str() {
        let text = text.trim();
        let whole = i64::from_str_radix(text, base.filter(|base| (2..=36).contains(base)).unwrap_or(10)).ok();
        let cut = || text.parse::<f64>().ok().filter(|x| x.is_finite()).map(|x| x as i64);
        return Ok(whole.or_else(cut).map_or_else(default, Value::from));
    }
    match value.kind() {
        ValueKind::Bool => Ok(Value::from(i64::from(value.is_true()))),
        ValueKind::Number if value.is_integer() => Ok(value),
        ValueKind::Number => Ok(Value::from(f64::try_from(value)? as i64)),
        _ => Ok(default()),
    }
}

/// Converts to a float; `default` if the value cannot be read as a number.
fn float(value: Value, default: Option<Value>) -> Made<Value> {
    let read = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value).ok(),
    };
    Ok(read.map_or_else(|| default.unwrap_or_else(|| Value::from(0.0)), Value::from))
}

fn last(value: Value) -> Made<Value> {
    match value.as_str() {
        Some(text) => Ok(text.chars().next_back().map_or(Value::UNDEFINED, Value::from)),
        None if value.is_undefined() => Ok(Value::UNDEFINED),
        None => Ok(value.try_iter()?.last().unwrap_or(Value::UNDEFINED)),
    }
}

/// Splits into lists of `count` items; the last one is filled up with `fill`, if that is given.
fn batch(value: Value, count: usize, fill: Option<Value>) -> Made<Value> {
    let items: Vec<Value> = value.try_iter()?.collect();
    if count == 0 || count > MOST {
        return Err(wrong(format!("batch: the number must be from 1 to {MOST}")));
    }
    let mut batches: Vec<Vec<Value>> = items.chunks(count).map(<[Value]>::to_vec).collect();
    if let (Some(last), Some(fill)) = (batches.last_mut(), fill.filter(|fill| !fill.is_none())) {
        last.resize(count, fill);
    }
    Ok(batches.into_iter().map(Value::from).collect())
}

/// Splits into `count` lists of lengths as equal as possible; the shorter ones are filled up with `fill`, if
/// that is given.
fn columns(value: Value, count: usize, fill: Option<Value>) -> Made<Value> {
    let items: Vec<Value> = value.try_iter()?.collect();
    if count == 0 || count > MOST {
        return Err(wrong(format!("slice: the number must be from 1 to {MOST}")));
    }
    let (least, longer) = (items.len() / count, items.len() % count);
    let mut items = items.into_iter();
    let columns = (0..count).map(|i| {
        let mut column: Vec<Value> = items.by_ref().take(least + usize::from(i < longer)).collect();
        if i >= longer && longer > 0 {
            column.extend(fill.clone().filter(|fill| !fill.is_none()));
        }
        Value::from(column)
    });
    Ok(columns.collect())
}

fn total(value: Value, attribute: Option<Value>, start: Option<Value>, kwargs: Kwargs) -> Made<Value> {
    let attribute = attribute.or(kwargs.get("attribute")?).filter(|attribute| !attribute.is_none());
    let start = start.or(kwargs.get("start")?).unwrap_or_else(|| Value::from(0));
    kwargs.assert_all_used()?;
    let of = |item: Value| attribute.as_ref().map_or(Ok(item.clone()), |attribute| item.get_item(attribute));
    let mut items = value.try_iter()?.map(of);
    if start.kind() != ValueKind::Seq {
        return items.try_fold(start, |total, item| sum(total, item?));
    }
    let mut all: Vec<Value> = start.try_iter()?.collect();
    for list in items {
        all.extend(list?.try_iter()?.take(MOST));
        if all.len() > MOST {
            return Err(too_much());
        }
    }
    Ok(Value::from(all))
}
