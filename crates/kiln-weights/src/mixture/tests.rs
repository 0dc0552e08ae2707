#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeMap, fs};

use serde_json::Value as Json;

use super::*;
use crate::gguf::{Array, Value};

/// A model and the formats that llama.cpp chooses for its tensors (`tools/mixture_cases.py`).
struct Case {
    metadata: Metadata,
    /// Shapes of tensors, ordered by name.
    tensors: BTreeMap<String, Vec<usize>>,
    /// Formats by the name of the mixture, then by the name of the tensor.
    formats: BTreeMap<String, BTreeMap<String, String>>,
}

impl Case {
    fn new(json: &Json) -> Self {
        let architecture = json["architecture"].as_str().unwrap();
        let numbers = json["numbers"].as_object().unwrap().iter();
        let mut metadata: Metadata = numbers
            .map(|(key, value)| {
                let value = match value.as_array() {
                    Some(_) => Value::Array(Array::I32(serde_json::from_value(value.clone()).unwrap())),
                    None => Value::U32(value.as_u64().unwrap() as u32),
                };
                (format!("{architecture}.{key}"), value)
            })
            .collect();
        metadata.insert("general.architecture", Value::String(architecture.to_owned()));
        let tensors: Vec<(String, Vec<usize>)> = (json["tensors"].as_object().unwrap().iter())
            .map(|(name, shape)| (name.clone(), serde_json::from_value(shape.clone()).unwrap()))
            .collect();
        // In the order of the file, which a JSON map does not keep.
        let names = json["order"].as_str().unwrap();
        let formats = json["formats"].as_object().unwrap().iter().map(|(mixture, formats)| {
            let formats = formats.as_str().unwrap().split(' ').map(str::to_owned);
            (mixture.clone(), names.split(' ').map(str::to_owned).zip(formats).collect())
        });
        Self { metadata, tensors: tensors.into_iter().collect(), formats: formats.collect() }
    }
}

#[test]
fn formats_are_those_of_llama_cpp() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/weights/mixtures.json");
    let cases: Vec<Json> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for case in cases.iter().map(Case::new) {
        let model = Outline::of(&case.metadata, case.tensors.keys().map(String::as_str)).unwrap();
        let known = Mixture::ALL.into_iter().filter(|mixture| mixture.file_type().is_some());
        assert_eq!(case.formats.len(), known.count());
        for (mixture, formats) in &case.formats {
            let mixture = Mixture::parse(mixture).unwrap();
            for (name, shape) in &case.tensors {
                let found = mixture.format_of(name, shape, &model).name();
                assert_eq!(found, formats[name], "{name} {shape:?} in {mixture} of {model:?}");
            }
        }
    }
}

#[test]
fn every_row_length_gets_a_format_of_whole_blocks() {
    let model = Outline {
        blocks: 4,
        attention: (0..4).collect(),
        experts: 0,
        queries_per_head: 1,
        tied: true,
        large: false,
    };
    for mixture in Mixture::ALL {
        for columns in [1, 31, 32, 96, 256, 288] {
            for name in ["token_embd.weight", "blk.0.attn_v.weight", "blk.3.ffn_down.weight"] {
                let format = mixture.format_of(name, &[7, columns], &model);
                assert!(columns.is_multiple_of(format.block()), "{columns} columns in {format}");
            }
        }
    }
}

#[test]
fn names_are_read_in_any_case_and_unknown_ones_are_errors() {
    for mixture in Mixture::ALL {
        assert_eq!(Mixture::parse(&mixture.name().to_uppercase()).unwrap(), mixture);
    }
    let error = Mixture::parse("q4_k").unwrap_err().to_string();
    assert!(error.contains("`q4_k`") && error.contains("q4_k_m"), "{error}");
}
