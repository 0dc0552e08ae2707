//! Mutations of JSON: of its values, keys and nesting, and of JSON or base64 inside its strings.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};

use super::{Random, bytes};

/// Limits of number types, and invalid numbers: written verbatim.
const NUMBERS: [&str; 34] = [
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "255",
    "256",
    "1000",
    "65536",
    "0.5",
    "0.1",
    "-0.5",
    "1e-40",
    "1e-320",
    "1e30",
    "1e38",
    "1e39",
    "1e308",
    "-1e308",
    "1e400",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "NaN",
];

const STRINGS: [&str; 48] = [
    "",
    "a",
    "b",
    "ab",
    " ",
    "\0",
    "\n",
    "\x1b[31m",
    "\u{202e}",
    "é",
    "e\u{301}",
    "漢字",
    "🙂",
    "▁",
    "##",
    "</w>",
    "Ġ",
    "Ġa",
    "NaN",
    "inf",
    "-1",
    "1e999",
    "0",
    "null",
    "true",
    "None",
    "..",
    "../../../etc/passwd",
    "/dev/zero",
    "(?=a)",
    "a*",
    "^",
    "$",
    "\\b",
    "(a|a)*b",
    "((((a*)*)*)*)*b",
    "\\p{L}+",
    "(?:a{0,99}){0,99}",
    "a{0}",
    "[",
    "\\",
    "(?<n>a)\\k<n>",
    "Sequence",
    "default",
    "yarn",
    "float16",
    "<unk>",
    "dynamic",
];

/// Marks the ends of a text that is written without quotes: numbers that JSON does not have, or that no float
/// can represent.
const RAW: char = '\u{E000}';
/// Follows a copy of an existing key, and is followed by a number. Both are removed when the value is
/// written, so that the key occurs twice.
const AGAIN: char = '\u{E001}';

/// Values of all seeds, with their keys.
#[derive(Debug, Default)]
pub(super) struct Values {
    keys: Vec<String>,
    values: Vec<(Option<String>, Value)>,
}

impl Values {
    pub(super) fn of(seeds: impl Iterator<Item = Value>) -> Self {
        let mut all = Self::default();
        seeds.for_each(|seed| all.add(None, &seed));
        all.keys.sort_unstable();
        all.keys.dedup();
        all
    }

    fn add(&mut self, key: Option<&str>, value: &Value) {
        // The beginning of a long list or vocabulary is sufficient.
        const MOST: usize = 64;

        self.values.push((key.map(str::to_owned), value.clone()));
        match value {
            Value::Array(list) => list.iter().take(MOST).for_each(|value| self.add(None, value)),
            Value::Object(map) => {
                for (key, value) in map.iter().take(MOST) {
                    self.keys.push(key.clone());
                    self.add(Some(key), value);
                }
            }
            Value::String(text) => {
                if let Some(within) = within(text) {
                    self.add(None, &within);
                }
            }
            _ => {}
        }
    }

    fn value(&self, random: &mut Random) -> Value {
        self.values.get(random.below(self.values.len())).map_or(Value::Null, |(_, value)| value.clone())
    }

    /// Returns a value that occurs under `key` in a seed.
    fn of_key(&self, key: &str, random: &mut Random) -> Option<Value> {
        let start = random.below(self.values.len());
        let mut from = self.values[start..].iter().chain(&self.values[..start]);
        from.find(|(at, _)| at.as_deref() == Some(key)).map(|(_, value)| value.clone())
    }

    fn key(&self, random: &mut Random) -> String {
        self.keys.get(random.below(self.keys.len())).cloned().unwrap_or_default()
    }
}

/// Parses the object or list that a string contains.
fn within(text: &str) -> Option<Value> {
    let object = text.starts_with(['{', '[']).then(|| serde_json::from_str(text).ok()).flatten();
    object.filter(|value: &Value| value.is_object() || value.is_array())
}

pub(super) fn mutated(seed: &[u8], values: &Values, random: &mut Random) -> Vec<u8> {
    match serde_json::from_slice(seed) {
        Ok(mut value) => {
            mutate(&mut value, values, random);
            written(&value).into_bytes()
        }
        Err(_) => bytes::mutated(seed, &[], random),
    }
}

/// Writes a value as text, and applies the marks [`RAW`] and [`AGAIN`].
pub(super) fn written(value: &Value) -> String {
    let text = value.to_string().replace(&format!("\"{RAW}"), "").replace(&format!("{RAW}\""), "");
    let mut out = String::with_capacity(text.len());
    let mut rest = &text[..];
    while let Some((before, behind)) = rest.split_once(AGAIN) {
        out.push_str(before);
        rest = behind.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    out.push_str(rest);
    out
}

pub(super) fn mutate(value: &mut Value, values: &Values, random: &mut Random) {
    for _ in 0..random.rounds() {
        once(place(value, random), values, random);
    }
}

/// Picks a place in a value. Shallow places are as likely as all places below them together, so that a
/// vocabulary does not dominate.
fn place<'a>(value: &'a mut Value, random: &mut Random) -> &'a mut Value {
    let len = match &*value {
        Value::Array(list) => list.len(),
        Value::Object(map) => map.len(),
        _ => 0,
    };
    if len == 0 || random.one_in(5) {
        return value;
    }
    let at = random.below(len);
    match value {
        Value::Array(list) => place(&mut list[at], random),
        Value::Object(map) => place(map.values_mut().nth(at).unwrap(), random),
        _ => value,
    }
}

fn once(value: &mut Value, values: &Values, random: &mut Random) {
    match value {
        Value::Object(map) if !random.one_in(8) => object(map, values, random),
        Value::Array(list) if !random.one_in(8) => array(list, values, random),
        Value::String(text) if !random.one_in(4) => string(text, values, random),
        Value::Number(number) if random.one_in(3) => *value = near(number, random),
        Value::Bool(yes) if random.one_in(2) => *value = json!(!*yes),
        _ => *value = replaced(value.take(), values, random),
    }
}

/// Returns another value, or this one nested in others.
fn replaced(value: Value, values: &Values, random: &mut Random) -> Value {
    match random.below(12) {
        0..=2 => number(random),
        3 | 4 => json!(random.pick(&STRINGS)),
        5 => Value::Null,
        6 => json!(random.one_in(2)),
        7 => [json!([]), json!({})][random.below(2)].clone(),
        8 => nested(value, random),
        9 => json!(value.to_string()),
        _ => values.value(random),
    }
}

fn number(random: &mut Random) -> Value {
    let text = NUMBERS[random.below(NUMBERS.len())];
    serde_json::from_str(text).unwrap_or_else(|_| json!(format!("{RAW}{text}{RAW}")))
}

fn near(number: &serde_json::Number, random: &mut Random) -> Value {
    match (number.as_i64(), random.below(6)) {
        (Some(n), 0) => json!(n.wrapping_add(1)),
        (Some(n), 1) => json!(n.wrapping_sub(1)),
        (Some(n), 2) => json!(n.wrapping_mul(2)),
        (Some(n), 3) => json!(n / 2),
        (Some(n), 4) => json!(n.wrapping_neg()),
        (_, 5) => json!(number.to_string()),
        _ => json!(number.as_f64().unwrap_or(0.0) * 1.5),
    }
}

fn nested(mut value: Value, random: &mut Random) -> Value {
    // The limit of serde_json is 128.
    for _ in 0..[1, 1, 2, 9, 60, 127, 200][random.below(7)] {
        value = if random.one_in(2) { json!([value]) } else { json!({"a": value}) };
    }
    value
}

fn object(map: &mut Map<String, Value>, values: &Values, random: &mut Random) {
    let at = random.below(map.len());
    let key = map.keys().nth(at).cloned().unwrap_or_default();
    match random.below(9) {
        0 => drop(map.remove(&key)),
        1 => {
            if let Some(value) = map.remove(&key) {
                map.insert(values.key(random), value);
            }
        }
        2 => {
            let copy = map.get(&key).cloned().unwrap_or_default();
            map.insert(values.key(random), copy);
        }
        // Duplicates a key, with values that may differ.
        3 => {
            let again = values.of_key(&key, random).unwrap_or_else(|| values.value(random));
            map.insert(format!("{key}{AGAIN}{}", map.len()), again);
        }
        4 => {
            let other = map.keys().nth(random.below(map.len())).cloned().unwrap_or_default();
            if let (Some(one), Some(two)) = (map.get(&key).cloned(), map.get(&other).cloned()) {
                map.insert(key, two);
                map.insert(other, one);
            }
        }
        // A value that other seeds have under this name, or under another one.
        5 | 6 => drop(values.of_key(&key, random).map(|value| map.insert(key, value))),
        7 => {
            let key = values.key(random);
            let value = values.of_key(&key, random).unwrap_or(Value::Null);
            map.insert(key, value);
        }
        _ => drop(map.insert(random.pick(&STRINGS).to_owned(), values.value(random))),
    }
}

fn array(list: &mut Vec<Value>, values: &Values, random: &mut Random) {
    let at = random.below(list.len());
    match random.below(7) {
        0 if !list.is_empty() => drop(list.remove(at)),
        1 if !list.is_empty() => list.insert(random.below(list.len()), list[at].clone()),
        2 if !list.is_empty() => {
            let other = random.below(list.len());
            list.swap(at, other);
        }
        3 => list.truncate(at),
        // Repeats an element many times.
        4 if !list.is_empty() => {
            let copies = [3, 30, 100][random.below(3)];
            list.extend(vec![list[at].clone(); copies]);
        }
        5 => list.push(number(random)),
        _ => list.push(values.value(random)),
    }
}

fn string(text: &mut String, values: &Values, random: &mut Random) {
    if let Some(mut value) = within(text) {
        mutate(&mut value, values, random);
        *text = written(&value);
        return;
    }
    let blob = (text.len() >= 16).then(|| STANDARD.decode(&*text).ok()).flatten();
    if let Some(blob) = blob.filter(|_| !random.one_in(4)) {
        *text = STANDARD.encode(bytes::mutated(&blob, &[], random));
        return;
    }
    let chars: Vec<char> = text.chars().collect();
    let at = random.below(chars.len() + 1);
    let (before, behind) = chars.split_at(at);
    let (before, behind): (String, String) = (before.iter().collect(), behind.iter().collect());
    *text = match random.below(8) {
        0 => random.pick(&STRINGS).to_owned(),
        1 => match values.value(random) {
            Value::String(other) => other,
            other => other.to_string(),
        },
        2 => before,
        3 => behind,
        4 => format!("{before}{}{behind}", random.pick(&STRINGS)),
        5 => text.repeat(2),
        6 => text.repeat([10, 100, 1000][random.below(3)]).chars().take(20_000).collect(),
        _ => format!("{before}{}", behind.chars().skip(1).collect::<String>()),
    };
}
