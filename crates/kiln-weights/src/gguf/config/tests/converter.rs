//! Output of llama.cpp's converter for models of all architectures, as recorded by `tools/gguf_cases.py`.

use std::{collections::BTreeSet, fs};

use serde_json::{Map, Value as Json};

use super::*;
use crate::gguf::names::{Heads, source};

#[derive(Debug)]
struct Case {
    /// The `config.json` that was given to the converter.
    config: Json,
    metadata: Metadata,
    tensors: Few,
    /// Shapes of the tensors of the checkpoint.
    checkpoint: Map<String, Json>,
}

fn cases() -> Vec<Case> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/gguf/cases.json");
    let cases: Vec<Json> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    cases.iter().map(Case::new).collect()
}

impl Case {
    fn new(json: &Json) -> Self {
        let entries = json["metadata"].as_array().unwrap().iter();
        let entries = entries.map(|entry| (entry[0].as_str().unwrap(), stored(&entry[1], &entry[2])));
        let numbers = |name: &str| match &json["factors"][name] {
            Json::Null => Vec::new(),
            factors => factors.as_array().unwrap().iter().map(|n| n.as_f64().unwrap() as f32).collect(),
        };
        let tensors = json["tensors"].as_object().unwrap().iter();
        let tensors = tensors.map(|(name, dimensions)| (name.clone(), (shape(dimensions), numbers(name))));
        Self {
            config: json["config"].clone(),
            metadata: entries.collect(),
            tensors: Few(tensors.collect()),
            checkpoint: json["checkpoint"].as_object().unwrap().clone(),
        }
    }

    fn model_type(&self) -> &str {
        self.config["model_type"].as_str().unwrap()
    }
}

fn shape(json: &Json) -> Vec<usize> {
    json.as_array().unwrap().iter().map(|size| size.as_u64().unwrap() as usize).collect()
}

/// Parses a value with the names of its types in the Python package `gguf`.
fn stored(types: &Json, value: &Json) -> Stored {
    match (types[0].as_str().unwrap(), value) {
        ("UINT32", _) => Stored::U32(value.as_u64().unwrap() as u32),
        ("FLOAT32", _) => Stored::F32(value.as_f64().unwrap() as f32),
        ("BOOL", _) => Stored::Bool(value.as_bool().unwrap()),
        ("STRING", _) => Stored::String(value.as_str().unwrap().to_owned()),
        ("ARRAY", list) => {
            assert_eq!(types[1], "INT32");
            let list = list.as_array().unwrap().iter().map(|number| number.as_i64().unwrap() as i32);
            Stored::Array(Array::I32(list.collect()))
        }
        (other, _) => panic!("no model has a value of type {other}"),
    }
}

/// Whether two values are equal after rounding numbers to float32.
fn same(found: &Json, expected: &Json) -> bool {
    let single = |json: &Json| json.as_f64().map(|number| number as f32);
    let (all, known) = (found.as_array().into_iter().flatten(), expected.as_array().into_iter().flatten());
    match (found, expected) {
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && all.zip(known).all(|(a, b)| same(a, b)),
        (Json::Number(_), Json::Number(_)) => single(found) == single(expected),
        _ => found == expected,
    }
}

#[test]
fn configs_equal_the_converted_originals() {
    for mut case in cases() {
        let name = case.model_type().to_owned();
        let found = config_json(&case.metadata, &mut case.tensors).unwrap();
        let expected = &case.config;
        // Transformers 5 has separate rotary positions, and Gemma 3 has them per kind of block.
        let ropes = &expected["rope_parameters"];
        let rope = ropes.get("full_attention").unwrap_or(ropes);
        for (key, value) in found.as_object().unwrap() {
            let expected = match &**key {
                "rope_theta" | "partial_rotary_factor" => &rope[key],
                "rope_local_base_freq" => &ropes["sliding_attention"]["rope_theta"],
                "rope_scaling" => {
                    for (key, value) in value.as_object().unwrap() {
                        // The converter computes this value; Phi-3's config has only the lengths that it
                        // derives from.
                        if key == "attention_factor" {
                            let stretch = 16384_f64 / 4096.0;
                            let computed = (1.0 + stretch.ln() / 4096_f64.ln()).sqrt();
                            assert!(same(value, &computed.into()), "{name}: {value}");
                            continue;
                        }
                        assert!(same(value, &rope[key]), "{name}: {key} is {value}");
                    }
                    continue;
                }
                // Sizes that follow from others, and alternative names.
                "head_dim" if expected.get(key).is_none() => &Json::from(16),
                "hidden_activation" if expected.get(key).is_none() => &expected["hidden_act"],
                "num_experts" if expected.get(key).is_none() => &expected["num_local_experts"],
                key => expected.get(key).unwrap_or_else(|| panic!("{name}: {key} is not in the original")),
            };
            assert!(same(value, expected), "{name}: {key} is {value}, was {expected}");
        }
        let stretched = rope.get("rope_type").is_some_and(|kind| kind != "default");
        assert_eq!(found.get("rope_scaling").is_some(), stretched, "{name}");
        assert_eq!(found["model_type"], name);
    }
}

#[test]
fn every_tensor_is_found_and_none_is_left_over() {
    for case in cases() {
        let name = case.model_type();
        let size = |key: &str| case.config[key].as_u64().unwrap_or(0) as usize;
        let heads = Heads { heads: size("num_attention_heads"), kv_heads: size("num_key_value_heads") };
        let mut used: BTreeSet<_> = FACTORS.map(str::to_owned).into();
        for (tensor, dimensions) in &case.checkpoint {
            let dimensions = shape(dimensions);
            let found = source(name, tensor, heads).unwrap_or_else(|| panic!("{name}: {tensor} has no name"));
            let stored =
                case.tensors.shape(&found.name).unwrap_or_else(|| panic!("{name}: no {}", found.name));
            let (rows, columns) = (dimensions[0], dimensions[1..].iter().product::<usize>());
            let all: usize = stored.iter().product();
            match found.expert {
                None => assert_eq!(all, rows * columns, "{name}: {tensor}"),
                Some(_) => {
                    assert_eq!(stored[1..], [rows, columns], "{name}: {tensor}");
                    assert!(found.rows(rows).unwrap().end * columns <= all, "{name}: {tensor}");
                }
            }
            used.insert(found.name);
        }
        let left: Vec<_> = case.tensors.0.keys().filter(|tensor| !used.contains(*tensor)).collect();
        assert!(left.is_empty(), "{name}: {left:?}");
    }
}

#[test]
fn every_architecture_has_a_recorded_case() {
    let cases = cases();
    for (architecture, _) in ARCHITECTURES {
        let is_it = |case: &Case| case.metadata.text("general.architecture").unwrap() == Some(architecture);
        assert!(cases.iter().any(is_it), "{architecture}");
    }
}
