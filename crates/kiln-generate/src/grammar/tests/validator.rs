//! A JSON Schema validator for the tests, written without llguidance. Panics on unknown keywords.

use serde_json::{Map, Value};
use tokenizers::utils::SysRegex;

type Fields = Map<String, Value>;

/// Keywords that do not constrain a value, or are read with others.
const SILENT: [&str; 18] = [
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "x-order",
    "x-guidance",
    "contentMediaType",
    "contentEncoding",
    // Read with `items` and `additionalProperties`.
    "prefixItems",
    "additionalItems",
    "patternProperties",
];

/// Whether `value` is valid. `root`: the whole schema, for references.
pub(super) fn valid(schema: &Value, root: &Value, value: &Value) -> bool {
    match schema {
        Value::Bool(all) => *all,
        Value::Object(fields) => {
            let own = fields.iter().all(|(keyword, said)| keeps(keyword, said, fields, root, value));
            own && keeps_items(fields, root, value) && keeps_properties(fields, root, value)
        }
        other => panic!("{other} is no schema"),
    }
}

fn keeps(keyword: &str, said: &Value, fields: &Fields, root: &Value, value: &Value) -> bool {
    let number = |holds: &dyn Fn(f64, f64) -> bool| match (value.as_f64(), said.as_f64()) {
        (Some(value), Some(said)) => holds(value, said),
        // Draft 4 has `true` for exclusive bounds, which are tested with their bounds.
        _ => true,
    };
    let counted = |count: Option<usize>, holds: &dyn Fn(usize, usize) -> bool| {
        count.is_none_or(|count| holds(count, said.as_u64().unwrap() as usize))
    };
    let text = value.as_str();
    let characters = text.map(|text| text.chars().count());
    let items = value.as_array().map(Vec::len);
    let properties = value.as_object().map(Map::len);
    let several = || said.as_array().unwrap().iter().filter(|schema| valid(schema, root, value)).count();
    let exclusive = |name: &str| fields.get(name) == Some(&Value::Bool(true));
    match keyword {
        "type" => match said {
            Value::Array(types) => types.iter().any(|said| is_a(said, value)),
            said => is_a(said, value),
        },
        "const" => equal(value, said),
        "enum" => said.as_array().unwrap().iter().any(|said| equal(value, said)),
        "minimum" => number(&|value, said| value > said || (value == said && !exclusive("exclusiveMinimum"))),
        "maximum" => number(&|value, said| value < said || (value == said && !exclusive("exclusiveMaximum"))),
        "exclusiveMinimum" => number(&|value, said| value > said),
        "exclusiveMaximum" => number(&|value, said| value < said),
        // Larger numbers are not exact.
        "multipleOf" => number(&|value, said| {
            let quotient = value / said;
            value.abs() > 2f64.powi(50)
                || (quotient - quotient.round()).abs() < 1e-9 * quotient.abs().max(1.0)
        }),
        "minLength" => counted(characters, &|count, said| count >= said),
        "maxLength" => counted(characters, &|count, said| count <= said),
        "pattern" => text.is_none_or(|text| found(said.as_str().unwrap(), text)),
        "format" => text.is_none_or(|text| formatted(said.as_str().unwrap(), text)),
        "minItems" => counted(items, &|count, said| count >= said),
        "maxItems" => counted(items, &|count, said| count <= said),
        "minProperties" => counted(properties, &|count, said| count >= said),
        "maxProperties" => counted(properties, &|count, said| count <= said),
        "required" => value.as_object().is_none_or(|object| {
            said.as_array().unwrap().iter().all(|name| object.contains_key(name.as_str().unwrap()))
        }),
        "allOf" => several() == said.as_array().unwrap().len(),
        "anyOf" => several() > 0,
        "oneOf" => several() == 1,
        "$ref" => valid(referred(said.as_str().unwrap(), root), root, value),
        "items" | "properties" | "additionalProperties" => true,
        silent => {
            assert!(SILENT.contains(&silent), "the validator does not know {silent}");
            true
        }
    }
}

fn keeps_items(fields: &Fields, root: &Value, value: &Value) -> bool {
    let Some(list) = value.as_array() else { return true };
    let (first, rest) = match fields.get("items") {
        Some(Value::Array(first)) => (Some(first), fields.get("additionalItems")),
        items => (fields.get("prefixItems").and_then(Value::as_array), items),
    };
    let first = first.map_or(&[][..], Vec::as_slice);
    list.iter()
        .enumerate()
        .all(|(at, item)| first.get(at).or(rest).is_none_or(|schema| valid(schema, root, item)))
}

fn keeps_properties(fields: &Fields, root: &Value, value: &Value) -> bool {
    let Some(object) = value.as_object() else { return true };
    let all = |name| fields.get(name).and_then(Value::as_object).into_iter().flatten();
    object.iter().all(|(name, value)| {
        let own = all("properties").filter(|(own, _)| *own == name);
        let matching = all("patternProperties").filter(|(pattern, _)| found(pattern, name));
        let mut schemas: Vec<&Value> = own.chain(matching).map(|(_, schema)| schema).collect();
        if schemas.is_empty() {
            schemas.extend(fields.get("additionalProperties"));
        }
        schemas.into_iter().all(|schema| valid(schema, root, value))
    })
}

fn is_a(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        kind => panic!("{kind} is no type"),
    }
}

/// Whether two values are equal, where `1` equals `1.0`.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| equal(a, b)))
        }
        (a, b) => a == b,
    }
}

fn referred<'a>(reference: &str, root: &'a Value) -> &'a Value {
    fn named<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
        let has =
            |keyword, end| value.get(keyword).and_then(Value::as_str).is_some_and(|said| said.ends_with(end));
        if has("$anchor", name) || has("$id", &format!("/{name}")) {
            return Some(value);
        }
        value.as_object()?.values().find_map(|value| named(value, name))
    }
    let found = match reference.strip_prefix('#') {
        Some(pointer) if pointer.is_empty() || pointer.starts_with('/') => root.pointer(pointer),
        Some(anchor) => named(root, anchor),
        None => named(root, reference),
    };
    found.unwrap_or_else(|| panic!("{reference} leads nowhere"))
}

/// Whether the pattern is found in the text. Classes are those of ECMAScript, which are ASCII only.
fn found(pattern: &str, text: &str) -> bool {
    let ascii = [(r"\d", "[0-9]"), (r"\D", "[^0-9]"), (r"\w", "[0-9a-zA-Z_]")];
    let pattern =
        ascii.iter().fold(pattern.to_owned(), |pattern, (class, ascii)| pattern.replace(class, ascii));
    SysRegex::new(&pattern).unwrap().find_iter(text).next().is_some()
}

/// Whether the text has this format. Like llguidance, accepts 29 February and a leap second at any time.
fn formatted(format: &str, text: &str) -> bool {
    let time =
        "([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)([.][0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
    match format {
        "date" => {
            let days =
                |month| [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].get(month - 1).copied().unwrap_or(0);
            let part =
                |from: usize, to: usize| text.get(from..to).and_then(|part| part.parse::<usize>().ok());
            let dated = found("^[0-9]{4}-[0-9]{2}-[0-9]{2}$", text);
            dated && part(5, 7).zip(part(8, 10)).is_some_and(|(month, day)| (1..=days(month)).contains(&day))
        }
        "time" => found(&format!("^{time}$"), text),
        "date-time" => match text.split_once(['T', 't']) {
            Some((date, time)) => formatted("date", date) && formatted("time", time),
            None => false,
        },
        "duration" => found(
            "^P(?!$)([0-9]+W|([0-9]+Y)?([0-9]+M)?([0-9]+D)?(T(?=[0-9])([0-9]+H)?([0-9]+M)?([0-9]+S)?)?)$",
            text,
        ),
        "email" => found("^[^@ ]+@[^@ ]+$", text),
        "hostname" => {
            text.split('.').all(|label| found("^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$", label))
        }
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        "uuid" => found("^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", text),
        "uri" => found("^[a-zA-Z][a-zA-Z0-9+.-]*:[^ ]*$", text),
        format => panic!("the validator does not know {format}"),
    }
}
