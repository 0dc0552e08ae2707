//! Saved caches with a valid checksum and other errors.

use std::{collections::BTreeMap, fs, path::Path};

use kiln::{
    GenerationConfig, Model, Plan, Sequence, TokenId,
    expert::{Batch, SavedCache},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{PROMPT, cpu, fed, limited, model_folder};
use crate::{
    fuzz::{
        Run, Target,
        mutate::{
            Format,
            tensors::{joined, parts},
        },
        put,
    },
    support::forward,
};

pub(in crate::fuzz) const TARGET: Target =
    Target { name: "cache_file", format: Format::Tensors, seeds, prepare };

/// Recorded models; the second has layers with a window.
const MODELS: [&str; 2] = ["llama", "gemma2"];

fn loaded(name: &str) -> Model {
    limited(&model_folder(name), &cpu()).load().unwrap()
}

fn seeds() -> Vec<Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache");
    let mut seeds = Vec::new();
    for name in MODELS {
        let model = loaded(name);
        let needs = model.causal().needs();
        for plan in kiln::expert::cache_samples().map(|text| Plan::named(&text).unwrap()) {
            if plan.check(&needs).is_err() || !plan.remembers(&needs) {
                continue;
            }
            let (short, whole) = (PROMPT[..3].to_vec(), PROMPT.to_vec());
            for rows in [vec![&short], vec![&whole], vec![&whole, &whole], vec![&short, &whole, &whole]] {
                let rows: Vec<Vec<TokenId>> = rows.into_iter().cloned().collect();
                let mut cache = model.cache(&plan).unwrap();
                forward(&model, &Batch::ragged(&rows, 0, model.device()).unwrap(), &mut cache);
                model.save_cache(&path, &plan, &mut cache, &rows, &vec![0; rows.len()]).unwrap();
                seeds.push(named_for(name, &fs::read(&path).unwrap()));
            }
        }
    }
    seeds
}

/// Replaces the fingerprint in a file by the model's name, so that seeds do not depend on how fingerprints
/// are computed.
fn named_for(model: &str, file: &[u8]) -> Vec<u8> {
    let (mut header, data) = parts(file).unwrap();
    let metadata = &mut header["__metadata__"];
    let mut text: Value = serde_json::from_str(metadata["header"].as_str().unwrap()).unwrap();
    text["model"] = json!(model);
    metadata["header"] = json!(text.to_string());
    joined(&Value::Object(header).to_string(), data)
}

/// Replaces the model's name in a file by its fingerprint, and updates the checksum. Returns `None` if the
/// file has no place for them.
pub(in crate::fuzz) fn signed(file: &[u8], fingerprints: &BTreeMap<&str, String>) -> Option<Vec<u8>> {
    let (mut header, data) = parts(file)?;
    let text = header.get("__metadata__")?.get("header")?.as_str()?.to_owned();
    let mut within: Value = serde_json::from_str(&text).ok()?;
    // Left unchanged if it names another model.
    let text = match within.get("model").and_then(Value::as_str).and_then(|name| fingerprints.get(name)) {
        Some(fingerprint) => {
            within["model"] = json!(fingerprint);
            within.to_string()
        }
        None => text,
    };
    let mut hash = Sha256::new();
    hash.update(&text);
    for (layer, state) in within.get("layers")?.as_array()?.iter().enumerate() {
        for (slot, count) in state.get("slots")?.as_array()?.iter().enumerate() {
            for i in 0..count.as_u64()?.min(99) {
                let offsets =
                    header.get(&format!("{layer}.{slot}.{i}")).and_then(|info| info.get("data_offsets"));
                let offset = |at: usize| offsets?.get(at)?.as_u64().map(|offset| offset as usize);
                if let Some(bytes) = offset(0).zip(offset(1)).and_then(|(start, end)| data.get(start..end)) {
                    hash.update(bytes);
                }
            }
        }
    }
    let metadata = header.get_mut("__metadata__")?.as_object_mut()?;
    metadata.insert("header".to_owned(), json!(text));
    let sha256: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    metadata.insert("sha256".to_owned(), json!(sha256));
    Some(joined(&Value::Object(header).to_string(), data))
}

pub(in crate::fuzz) fn fingerprints() -> BTreeMap<&'static str, String> {
    MODELS.iter().map(|name| (*name, loaded(name).fingerprint().unwrap().to_owned())).collect()
}

fn prepare(folder: &Path) -> Run {
    let models = MODELS.map(loaded);
    let fingerprints = fingerprints();
    let plans: Vec<Plan> = kiln::expert::cache_samples().map(|text| Plan::named(&text).unwrap()).collect();
    let path = folder.join("cache.safetensors");
    Box::new(move |input| {
        put(&path, signed(input, &fingerprints).as_deref().unwrap_or(input));
        models.iter().fold(false, |any, model| {
            let needs = model.causal().needs();
            let own = model.plan_of_saved(&path).ok();
            let possible = own.iter().chain(&plans).filter(|plan| plan.check(&needs).is_ok());
            possible.fold(any, |any, plan| goes_on(model, plan, &path) | any)
        })
    })
}

/// Loads a cache and feeds it two tokens; then loads it again and generates from it.
fn goes_on(model: &Model, plan: &Plan, path: &Path) -> bool {
    let Ok(SavedCache { mut cache, left_pad, .. }) = model.load_cache(path, plan) else { return false };
    for token in [7, 8] {
        if fed(model, &mut cache, token, &left_pad).is_err() {
            break;
        }
    }
    let Ok(mut sequence) = Sequence::load(model, plan, path) else { return true };
    let rows: Vec<Vec<TokenId>> = sequence.tokens().iter().map(|row| [row, &[7, 8][..]].concat()).collect();
    let wanted = GenerationConfig::new().max_new_tokens(2);
    if let Ok(steps) = model.generate(rows).sequence(&mut sequence).config(wanted.clone()).steps() {
        steps.take_while(Result::is_ok).for_each(drop);
    }
    true
}
