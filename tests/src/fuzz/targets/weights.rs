//! `model.safetensors`, and `model.safetensors.index.json`.

use std::{fs, path::Path};

use super::{copied, cpu, model_folder, used};
use crate::fuzz::{Run, Target, mutate::Format, put};

pub(in crate::fuzz) const TARGET: Target =
    Target { name: "safetensors", format: Format::Tensors, seeds, prepare };

/// Two shards of one model.
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

fn seeds() -> Vec<Vec<u8>> {
    // The first has as many tensors as other models; the others are small enough for many runs.
    let weights = ["llama", "llama_tied", "qwen2"]
        .map(|name| fs::read(model_folder(name).join("model.safetensors")).unwrap());
    let index = serde_json::json!({"metadata": {"total_size": 120_000}, "weight_map": halves().map});
    weights.into_iter().chain([index.to_string().into_bytes()]).collect()
}

struct Halves {
    map: serde_json::Map<String, serde_json::Value>,
    files: [Vec<u8>; 2],
}

fn halves() -> Halves {
    let whole = fs::read(model_folder("llama").join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
    let mut tensors = file.tensors();
    tensors.sort_by(|one, two| one.0.cmp(&two.0));
    let second = tensors.split_off(tensors.len() / 2);
    let of = |tensors: &[(String, _)], shard: &str| {
        tensors.iter().map(|(name, _)| (name.clone(), shard.into())).collect::<Vec<_>>()
    };
    let map = [of(&tensors, SHARDS[0]), of(&second, SHARDS[1])].concat().into_iter().collect();
    Halves { map, files: [tensors, second].map(|half| safetensors::serialize(half, None).unwrap()) }
}

fn prepare(folder: &Path) -> Run {
    let whole = copied("llama", folder, "whole");
    let halved = copied("llama", folder, "halved");
    for (shard, bytes) in SHARDS.iter().zip(halves().files) {
        fs::write(halved.join(shard), bytes).unwrap();
    }
    let device = cpu();
    Box::new(move |input| match input.starts_with(b"{") {
        true => {
            put(&halved.join("model.safetensors.index.json"), input);
            used(&halved, &device)
        }
        false => {
            put(&whole.join("model.safetensors"), input);
            used(&whole, &device)
        }
    })
}
