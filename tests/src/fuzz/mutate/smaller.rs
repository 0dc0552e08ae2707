//! Reduction of a failing input, to find the smallest that still fails.

use serde_json::{Value, json};

use super::tensors;

/// Returns inputs that each lack a part of this one, those with the largest part removed first.
pub(crate) fn than(input: &[u8]) -> Vec<Vec<u8>> {
    if let Ok(value) = serde_json::from_slice::<Value>(input) {
        return of_value(&value).iter().map(|value| value.to_string().into_bytes()).collect();
    }
    if let Some((header, data)) = tensors::parts(input) {
        let headers = of_value(&Value::Object(header));
        return headers.iter().map(|header| tensors::joined(&header.to_string(), data)).collect();
    }
    let mut all = Vec::new();
    let mut len = input.len() / 2;
    while len > 0 && all.len() < 512 {
        let starts = (0..input.len()).step_by(len);
        all.extend(starts.map(|at| [&input[..at], &input[(at + len).min(input.len())..]].concat()));
        len /= 2;
    }
    all
}

fn of_value(value: &Value) -> Vec<Value> {
    let mut all = Vec::new();
    match value {
        Value::Object(map) => {
            for key in map.keys() {
                let mut less = map.clone();
                less.remove(key);
                all.push(Value::Object(less));
            }
            for (key, within) in map {
                all.extend(of_value(within).into_iter().map(|less| {
                    let mut map = map.clone();
                    map.insert(key.clone(), less);
                    Value::Object(map)
                }));
            }
        }
        Value::Array(list) => {
            if list.len() > 3 {
                all.extend([&list[..list.len() / 2], &list[list.len() / 2..]].map(|half| json!(half)));
            }
            for at in 0..list.len() {
                let mut less = list.clone();
                less.remove(at);
                all.push(Value::Array(less));
            }
            for (at, within) in list.iter().enumerate() {
                all.extend(of_value(within).into_iter().map(|less| {
                    let mut list = list.clone();
                    list[at] = less;
                    Value::Array(list)
                }));
            }
        }
        Value::String(text) if text.len() > 1 => {
            if let Ok(within @ Value::Object(_)) = serde_json::from_str(text) {
                return of_value(&within).into_iter().map(|less| json!(less.to_string())).collect();
            }
            let half = text.chars().count() / 2;
            all.push(json!(text.chars().take(half).collect::<String>()));
            all.push(json!(text.chars().skip(half).collect::<String>()));
        }
        _ => {}
    }
    all
}
