//! The fuzz targets: one file for each kind of input.

pub(super) mod audio;
pub(super) mod cache;
pub(super) mod chat;
pub(super) mod config;
pub(super) mod generation;
pub(super) mod gguf;
pub(super) mod quantized;
pub(super) mod tokenizer;
pub(super) mod weights;
pub(super) mod words;

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiln::{
    GenerationConfig, Model, ModelBuilder, TokenId,
    device::{self, DeviceName, Opened},
    expert::{Ask, Batch, Inspection, Logits, ModelCache, read_back},
};

use crate::support::{fixtures_of, float32};

/// Memory limit in bytes of a model and its caches: far below the limit of a process.
const MEMORY: u64 = 1 << 30;

/// Tokens in the vocabulary of the recorded models, more than their windows hold.
const PROMPT: [TokenId; 20] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 96, 79, 32, 38, 46, 26, 43, 38, 32];

/// Opens the CPU without probing GPUs, whose drivers take more address space than a process has here.
fn cpu() -> Opened {
    device::open(DeviceName::Cpu).unwrap()
}

fn limited<'a>(folder: &Path, device: &Opened) -> ModelBuilder<'a> {
    float32(Model::builder(folder), device).memory(MEMORY)
}

fn model_folder(name: &str) -> PathBuf {
    fixtures_of(name).join("models").join(name)
}

/// Copies the files of a recorded model to a folder `name`.
fn copied(model: &str, folder: &Path, name: &str) -> PathBuf {
    let to = folder.join(name);
    fs::create_dir_all(&to).unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(model_folder(model).join(file), to.join(file)).unwrap();
    }
    to
}

/// Inspects a folder, loads it and generates two tokens, as far as possible. Returns whether it was loaded.
fn used(folder: &Path, device: &Opened) -> bool {
    let Ok(inspection) = Inspection::of(folder) else { return false };
    let ask = Ask::new(inspection.sizes.positions).rows(3).memory(MEMORY);
    inspection.caches(None, &ask);
    let Ok(model) = limited(folder, device).load() else { return false };
    let prompt: Vec<TokenId> =
        PROMPT.iter().copied().filter(|&id| (id as usize) < model.sizes().vocab).collect();
    let wanted = GenerationConfig::new().max_new_tokens(2);
    if let Ok(generation) = model.generate(prompt).config(wanted).steps() {
        generation.take_while(Result::is_ok).for_each(drop);
    }
    true
}

/// Feeds one token to each row and reads the logits.
fn fed(model: &Model, cache: &mut ModelCache, token: TokenId, left_pad: &[usize]) -> kiln::Result<()> {
    let mut batch = Batch::from_rows(&vec![vec![token]; left_pad.len()], model.device())?;
    batch.left_pad = left_pad.to_vec();
    read_back::read(model.causal().forward(&batch, Logits::Last, cache)?).map(drop)
}
