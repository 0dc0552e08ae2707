//! The files of a repository or folder that a model consists of.

use kiln::{
    Error,
    hub::{Choice, Spec, TEXTS, choose, shards},
};
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::thrown;

/// Reads the name of a model on the hub, `ORG/NAME[:FILE or QUANT][@REVISION]`: its `repo` and `revision`, as
/// JSON.
///
/// # Errors
/// An `Error` for a text that is none.
#[wasm_bindgen(js_name = readSpec)]
pub fn read_spec(text: &str) -> Result<String, JsValue> {
    let spec = parsed(text)?;
    Ok(json!({ "repo": spec.repo(), "revision": spec.revision().unwrap_or("main") }).to_string())
}

/// Chooses among all files of a repository: `files`, and whether an index names the weights, as JSON.
///
/// # Errors
/// An `Error` if no file matches, or too many.
#[wasm_bindgen(js_name = chooseFiles)]
pub fn choose_files(spec: &str, files: Vec<String>) -> Result<String, JsValue> {
    let (files, indexed) = match choose(&parsed(spec)?, &files).map_err(wrong)? {
        Choice::Folder { texts, indexed } => (texts, Some(indexed)),
        Choice::Gguf(parts) => (parts, None),
    };
    Ok(json!({ "files": files, "indexed": indexed }).to_string())
}

/// The files that a folder may have beside its weights.
#[wasm_bindgen(js_name = textFiles)]
pub fn text_files() -> Vec<String> {
    TEXTS.iter().map(|name| (*name).to_owned()).collect()
}

/// The weight files that an index names.
///
/// # Errors
/// An `Error` if the index is damaged.
#[wasm_bindgen(js_name = shardsOf)]
pub fn shards_of(index: &[u8]) -> Result<Vec<String>, JsValue> {
    let named = shards(index)
        .map_err(|why| thrown(&Error::File { path: "model.safetensors.index.json".into(), why }))?;
    Ok(named.into_iter().collect())
}

fn parsed(spec: &str) -> Result<Spec, JsValue> {
    spec.parse().map_err(wrong)
}

fn wrong(error: kiln::hub::Error) -> JsValue {
    let thrown = js_sys::Error::new(&error.to_string());
    thrown.set_name("ModelError");
    thrown.into()
}
