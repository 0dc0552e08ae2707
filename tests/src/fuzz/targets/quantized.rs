//! `model.safetensors` with quantized matrices, in a folder for each method.

use std::path::Path;

use super::{copied, cpu, used};
use crate::{
    checkpoints::edit_config,
    fuzz::{Run, Target, mutate::Format, put},
    quantized_folders::small_files,
};

pub(in crate::fuzz) const TARGET: Target =
    Target { name: "quantized", format: Format::Tensors, seeds, prepare };

fn seeds() -> Vec<Vec<u8>> {
    small_files().into_iter().map(|(_, file)| file).collect()
}

fn prepare(folder: &Path) -> Run {
    let folders: Vec<_> = small_files()
        .into_iter()
        .enumerate()
        .map(|(number, (config, _))| {
            let folder = copied("llama", folder, &number.to_string());
            edit_config(&folder, |file| file["quantization_config"] = config);
            folder
        })
        .collect();
    let device = cpu();
    // Most inputs are refused immediately if the method differs.
    Box::new(move |input| {
        folders.iter().fold(false, |was_used, folder| {
            put(&folder.join("model.safetensors"), input);
            used(folder, &device) || was_used
        })
    })
}
