//! Errors for paths that Kiln cannot load: another format, or another kind of folder.

use std::{fs, path::Path};

use kiln_core::Error;

/// Advice on what to load instead, for error messages.
const WANTED: &str = "give a Hugging Face folder with config.json and safetensors weights, or a GGUF file";

/// The error for `folder`, which has no config.json.
pub(crate) fn no_config(folder: &Path) -> Error {
    let error = |why: String| Error::File { path: folder.to_owned(), why };
    if folder.is_file() {
        return error(match folder.extension().and_then(|name| name.to_str()) {
            Some("safetensors") => "is a file of weights; give the folder it is in".to_owned(),
            _ => format!("is a file; {WANTED}"),
        });
    }
    let Ok(entries) = fs::read_dir(folder) else {
        let is_gguf = folder.extension().is_some_and(|name| name.eq_ignore_ascii_case("gguf"));
        let kind = if is_gguf { "file" } else { "folder" };
        return error(format!("there is no such {kind}; {WANTED}"));
    };
    let names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let has = |found: fn(&str) -> bool| names.iter().any(|name| found(name));
    error(if has(|name| name.ends_with(".gguf")) {
        "holds GGUF files; give the name of one of them".to_owned()
    } else if has(|name| name == "adapter_config.json") {
        "holds an adapter (adapter_config.json), not a model; merge it into its base model first".to_owned()
    } else if has(|name| name == "params.json") {
        format!("holds a model in its makers' own format (params.json); {WANTED}")
    } else {
        format!("has no config.json; {WANTED}")
    })
}

/// The error for a `folder` without readable weights.
pub(super) fn no_weights(folder: &Path) -> Error {
    let pickled =
        ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists());
    let why = match pickled {
        true => "its weights are a pytorch_model.bin, which is not read; save them as safetensors",
        false => "there is no model.safetensors; weights are read from safetensors files",
    };
    Error::File { path: folder.to_owned(), why: why.to_owned() }
}
