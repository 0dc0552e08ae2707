//! Errors for models that Kiln cannot load: another format, or another kind of folder.

use kiln_core::{Error, source::Source};

use super::model_files::is_called_gguf;

/// Advice on what to load instead, for error messages.
const WANTED: &str = "give a Hugging Face folder with config.json and safetensors weights, or a GGUF file";

/// The error for a `path` that is neither a folder nor a GGUF file.
pub(crate) fn no_model(path: &std::path::Path) -> Error {
    let extension = path.extension().and_then(|name| name.to_str()).unwrap_or_default();
    let why = match (path.is_file(), extension) {
        (true, "safetensors") => "is a file of weights; give the folder it is in".to_owned(),
        (true, _) => format!("is a file; {WANTED}"),
        (false, _) if extension.eq_ignore_ascii_case("gguf") => format!("there is no such file; {WANTED}"),
        (false, _) => format!("there is no such folder; {WANTED}"),
    };
    Error::File { path: path.to_owned(), why }
}

/// The error for a folder, or files in memory, without config.json.
pub(crate) fn no_config(source: &dyn Source) -> Error {
    let names = source.names("");
    let has = |found: fn(&str) -> bool| names.iter().any(|name| found(name));
    let why = if has(is_called_gguf) {
        "holds GGUF files; give the name of one of them".to_owned()
    } else if has(|name| name == "adapter_config.json") {
        "holds an adapter (adapter_config.json), not a model; name its base model, and the adapter with `--lora`".to_owned()
    } else if has(|name| name == "params.json") {
        format!("holds a model in its makers' own format (params.json); {WANTED}")
    } else {
        format!("has no config.json; {WANTED}")
    };
    Error::File { path: source.path(""), why }
}

/// The error for a folder without readable weights.
pub(super) fn no_weights(source: &dyn Source) -> Error {
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let why = match source.names("").iter().any(|name| pickled.contains(&&**name)) {
        true => "its weights are a pytorch_model.bin, which is not read; save them as safetensors",
        false => "there is no model.safetensors; weights are read from safetensors files",
    };
    Error::File { path: source.path(""), why: why.to_owned() }
}
