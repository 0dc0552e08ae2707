//! Output of llama.cpp's converter for models of all architectures, as recorded by `tools/gguf_cases.py`.

use std::{collections::BTreeSet, fs};

use serde_json::{Map, Value as Json};

use super::*;
use crate::gguf::names::{Heads, Undo, joined_experts, source};

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
            let list = list.as_array().unwrap().iter();
            match types[1].as_str().unwrap() {
                "INT32" => Stored::Array(Array::I32(list.map(|n| n.as_i64().unwrap() as i32).collect())),
                "BOOL" => Stored::Array(Array::Bool(list.map(|truth| truth.as_bool().unwrap()).collect())),
                other => panic!("no model has a list of type {other}"),
            }
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
                // Files of both are alike.
                "model_type" if name == "glm4_moe_lite" => &"deepseek_v3".into(),
                // Sizes that follow from others, and alternative names.
                "head_dim" if expected.get(key).is_none() => &Json::from(16),
                "n_inner" => &Json::from(256),
                "hidden_size" if name == "gpt2" => &expected["n_embd"],
                "num_hidden_layers" if name == "gpt2" => &expected["n_layer"],
                "num_attention_heads" if name == "gpt2" => &expected["n_head"],
                "max_position_embeddings" if name == "gpt2" => &expected["n_positions"],
                "hidden_activation" if expected.get(key).is_none() => &expected["hidden_act"],
                "num_experts" if expected.get(key).is_none() => &expected["num_local_experts"],
                "num_hidden_layers" if expected.get(key).is_none() => {
                    &expected["layers_block_type"].as_array().unwrap().len().into()
                }
                // The converter drops it.
                "max_position_embeddings" if *value == 1 << 20 => &value.clone(),
                // Fields that only GGUF files have.
                "absorbs_keys" | "linear_gates_apart" | "linear_heads_alternate" | "shared_mlp_apart" => {
                    &true.into()
                }
                // llama.cpp has no limit.
                "time_step_min" => &Json::from(0.0),
                key => expected.get(key).unwrap_or_else(|| panic!("{name}: {key} is not in the original")),
            };
            assert!(same(value, expected), "{name}: {key} is {value}, was {expected}");
        }
        let stretched = rope.get("rope_type").is_some_and(|kind| kind != "default");
        let found_rope = found.get("rope_scaling").or(found.get("rope_parameters"));
        assert_eq!(found_rope.is_some(), stretched, "{name}");
    }
}

/// Returns the tensors that a model requests where the checkpoint has `tensor`: the last expert of a stack,
/// whose matrices may be transposed, and single matrices.
fn requested(config: &Json, tensor: &str, shape: Vec<usize>) -> Vec<(String, Vec<usize>)> {
    let name = config["model_type"].as_str().unwrap();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    // Granite's own names.
    let tensor = &tensor
        .replace("moe.input_linear.weight", "moe.experts.gate_up_proj")
        .replace("moe.output_linear.weight", "moe.experts.down_proj")
        .replace("router.layer", "router")
        .replace("shared_mlp.input_linear", "block_sparse_moe.shared_mlp.gate_up_proj")
        .replace("shared_mlp.output_linear", "block_sparse_moe.shared_mlp.down_proj");
    if name == "bert" {
        // Files have no heads of encoders.
        if tensor.starts_with("pooler.") {
            return Vec::new();
        }
        let known = tensor
            .replace("attention.self.query", "attention.q_proj")
            .replace("attention.self.key", "attention.k_proj")
            .replace("attention.self.value", "attention.v_proj")
            .replace("attention.output.dense", "attention.o_proj")
            .replace("attention.output.LayerNorm", "attention_norm");
        return vec![(format!("bert.{known}"), shape)];
    }
    let halves = |whole: &str, parts: [&str; 2]| {
        let own = [&[shape[0] / 2], &shape[1..]].concat();
        parts.map(|part| (tensor.replace(whole, part), own.clone())).into()
    };
    if tensor.contains("shared_mlp.gate_up_proj") {
        return halves("gate_up_proj", ["gate_proj", "up_proj"]);
    }
    // Queries and gates.
    let is_gated = name.starts_with("qwen3_5") || name == "qwen3_next";
    if tensor.ends_with("self_attn.q_proj.weight") && is_gated {
        return halves("q_proj", ["q_proj", "q_gate"]);
    }
    if tensor.ends_with("in_proj_ba.weight") {
        return halves("in_proj_ba", ["in_proj_b", "in_proj_a"]);
    }
    if tensor.ends_with("in_proj_qkvz.weight") {
        let gates = size("linear_num_value_heads") * size("linear_value_head_dim");
        let parts = [("in_proj_qkv", shape[0] - gates), ("in_proj_z", gates)];
        return parts.map(|(part, rows)| (tensor.replace("in_proj_qkvz", part), vec![rows, shape[1]])).into();
    }
    if tensor.ends_with("kv_b_proj.weight") {
        let (heads, rank) = (size("num_attention_heads"), size("kv_lora_rank"));
        let keys = vec![heads * rank, size("qk_nope_head_dim")];
        let values = vec![heads * size("v_head_dim"), rank];
        let part = |part| tensor.replace("kv_b_proj", part);
        return vec![(part("k_b_proj_transposed"), keys), (part("v_b_proj"), values)];
    }
    let transposed = matches!(name, "gpt_oss" | "llama4_text");
    let is_stack = shape.len() == 3 || transposed;
    let Some((module, part)) = tensor.split_once(".experts.").filter(|_| is_stack) else {
        let tensor = tensor.replace("query_key_value", "q_proj").replace("embed_out", "lm_head");
        return vec![(tensor, shape)];
    };
    let (part, suffix) = match part.strip_suffix("_bias") {
        Some(part) => (part, "bias"),
        None => (part, "weight"),
    };
    let parts = if part == "gate_up_proj" { vec!["gate_proj", "up_proj"] } else { vec![part] };
    let mut own = shape[1..].to_vec();
    if transposed {
        own.reverse();
    }
    own[0] /= parts.len();
    let name = |part: &str| format!("{module}.experts.{}.{part}.{suffix}", shape[0] - 1);
    parts.into_iter().map(|part| (name(part), own.clone())).collect()
}

#[test]
fn every_tensor_is_found_and_none_is_left_over() {
    for case in cases() {
        let name = case.model_type();
        let size = |key: &str| case.config[key].as_u64().unwrap_or(0) as usize;
        let heads = Heads {
            heads: size("num_attention_heads"),
            kv_heads: size("num_key_value_heads"),
            state_heads: size("linear_num_key_heads"),
        };
        let mut used: BTreeSet<_> = FACTORS.map(str::to_owned).into();
        for (tensor, dimensions) in &case.checkpoint {
            for (tensor, dimensions) in requested(&case.config, tensor, shape(dimensions)) {
                let mut found =
                    source(name, &tensor, heads).unwrap_or_else(|| panic!("{name}: {tensor} has no name"));
                if name == "gpt_neox" {
                    found.name = found.name.replace("attn_q.", "attn_qkv.");
                }
                // Gates and values of all experts may be one tensor.
                if case.tensors.shape(&found.name).is_none()
                    && let Some((name, undo)) = joined_experts(&found.name)
                {
                    (found.name, found.undo) = (name, undo);
                }
                let stored =
                    case.tensors.shape(&found.name).unwrap_or_else(|| panic!("{name}: no {}", found.name));
                let (rows, columns) = (dimensions[0], dimensions[1..].iter().product::<usize>());
                let all: usize = stored.iter().product();
                match found.expert {
                    None if matches!(found.undo, Undo::Half { .. }) => assert_eq!(all, 2 * rows * columns),
                    None => assert_eq!(all, rows * columns, "{name}: {tensor}"),
                    Some(_) if matches!(found.undo, Undo::Half { .. }) => {
                        assert_eq!(stored[1..], [2 * rows, columns], "{name}: {tensor}");
                    }
                    Some(_) => {
                        assert_eq!(stored[1..], dimensions, "{name}: {tensor}");
                        assert!(found.rows(rows).unwrap().end * columns <= all, "{name}: {tensor}");
                    }
                }
                used.insert(found.name);
            }
        }
        let left: Vec<_> = case.tensors.0.keys().filter(|tensor| !used.contains(*tensor)).collect();
        assert!(left.is_empty(), "{name}: {left:?}");
    }
}

#[test]
fn every_architecture_has_a_recorded_case() {
    let cases = cases();
    let is_of_images = |name: &str| IMAGES.iter().any(|(images, _)| *images == name);
    for (architecture, _) in ARCHITECTURES.iter().filter(|(name, _)| !is_of_images(name)) {
        let is_it = |case: &Case| case.metadata.text("general.architecture").unwrap() == Some(architecture);
        assert!(cases.iter().any(is_it), "{architecture}");
    }
}

/// Architectures of text and images, whose files have the keys and tensors of these text models.
const IMAGES: [(&str, &str); 3] = [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe")];

#[test]
fn models_of_text_and_images_have_the_configs_of_their_text() {
    for (images, text) in IMAGES {
        let cases = cases();
        let is_it = |case: &&Case| case.metadata.text("general.architecture").unwrap() == Some(text);
        let case = cases.iter().find(is_it).unwrap();
        let mut metadata = Metadata::new();
        metadata.insert("general.architecture", Stored::String(images.to_owned()));
        let sections = Stored::Array(Array::I32(vec![8, 12, 12, 0]));
        metadata.insert(format!("{images}.rope.dimension_sections"), sections);
        for (key, value) in case.metadata.iter() {
            if let Some(key) = key.strip_prefix(&format!("{text}.")) {
                metadata.insert(format!("{images}.{key}"), value.clone());
            }
        }
        let config = |metadata: &Metadata| config_json(metadata, &mut Few(case.tensors.0.clone())).unwrap();
        assert_eq!(config(&metadata), config(&case.metadata), "{images}");
    }
}
