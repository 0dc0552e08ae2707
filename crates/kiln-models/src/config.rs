//! `config.json`, read with care: it comes from a stranger.

use std::path::{Path, PathBuf};

use kiln_core::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A config is a page of text; more than this is not one.
const LARGEST_CONFIG: u64 = 16 << 20;

/// Numbers that every decoder has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    /// Longest sequence the model was made for.
    pub positions: usize,
    /// Whether the head's matrix is the embedding's.
    pub tied: bool,
}

/// The JSON of a `config.json`, with its path for messages.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    path: PathBuf,
    json: Value,
}

impl ConfigFile {
    /// Reads `config.json` in `folder`.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let json = read_json(&path)?.ok_or_else(|| Error::File {
            path: path.clone(),
            why: "there is no such file; give a Hugging Face model folder".to_owned(),
        })?;
        Ok(Self { path, json })
    }

    /// A config that was never a file.
    pub fn from_json(json: Value) -> Self {
        Self { path: PathBuf::from("config.json"), json }
    }

    pub fn model_type(&self) -> Result<String> {
        match self.json.get("model_type").and_then(Value::as_str) {
            Some(name) => Ok(name.to_owned()),
            None => Err(self.error("`model_type` is missing")),
        }
    }

    /// The value of `key`; JSON's null counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// The fields that `T` names. What is null is left out, so that defaults apply to it.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        let mut json = self.json.clone();
        if let Value::Object(fields) = &mut json {
            fields.retain(|_, value| !value.is_null());
        }
        // Says which field it was, which serde alone does not.
        serde_path_to_error::deserialize(json).map_err(|e| match e.path().iter().next() {
            Some(_) => self.error(&format!("`{}`: {}", e.path(), e.inner())),
            None => self.error(&e.inner().to_string()),
        })
    }

    pub(crate) fn error(&self, why: &str) -> Error {
        Error::File { path: self.path.clone(), why: why.to_owned() }
    }

    /// Says whether `value` of field `name` lies in `1..=largest`.
    pub(crate) fn check(&self, name: &str, value: usize, largest: usize) -> Result<()> {
        if value == 0 || value > largest {
            return Err(self.error(&format!("`{name}` is {value}, must be between 1 and {largest}")));
        }
        Ok(())
    }
}

/// The JSON in `path`; `None` if there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    let error = |why: String| Error::File { path: path.to_owned(), why };
    let len = match std::fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e.to_string())),
    };
    if len > LARGEST_CONFIG {
        return Err(error(format!(
            "{len} bytes is too long for a config; at most {LARGEST_CONFIG} are read"
        )));
    }
    let text = std::fs::read(path).map_err(|e| error(e.to_string()))?;
    serde_json::from_slice(&text).map(Some).map_err(|e| error(format!("is not valid JSON: {e}")))
}
