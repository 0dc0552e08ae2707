//! Conversion of a `config.json` to metadata.

use serde_json::{Map, Value as Json};

use super::architectures::{ARCHITECTURES, Architecture, MAMBA_POSITIONS};
use crate::{
    Error,
    gguf::{Metadata, Tensors, Value, config_json, shown},
};

/// The part of a GGUF file that describes a config.
#[derive(Clone, Debug)]
pub struct ConfigMetadata {
    /// `general.architecture`, and the keys of the architecture.
    pub metadata: Metadata,
    /// Vectors that belong to the config: the divisors of rotary frequencies.
    pub factors: Vec<(&'static str, Vec<f32>)>,
}

/// Converts `config`, the content of a `config.json`, to metadata.
///
/// # Errors
/// [`Error::Unconvertible`] for an unknown `model_type`, a field that is missing or has the wrong type, and
/// settings that GGUF cannot express.
pub fn config_metadata(config: &Json) -> Result<ConfigMetadata, Error> {
    let model_type = config.get("model_type").and_then(Json::as_str).unwrap_or_default();
    let found = ARCHITECTURES.iter().find(|one| one.model_type == model_type);
    let (Some(architecture), Some(fields)) = (found, config.as_object()) else {
        let known: Vec<_> = ARCHITECTURES.iter().map(|one| one.model_type).collect();
        let why = format!("its model_type is {}; known: {}", shown(model_type), known.join(", "));
        return Err(Error::Unconvertible(why));
    };
    let metadata = Metadata::from_iter([("general.architecture", text(architecture.name))]);
    let described = ConfigMetadata { metadata, factors: Vec::new() };
    let mut folder = Folder { fields, architecture, name: architecture.name, described };
    (architecture.describe)(&mut folder)?;
    Ok(folder.described)
}

/// Checks that a file with this metadata and these tensors is read as the model of `config`.
///
/// # Errors
/// [`Error::Unconvertible`] naming the field that the file cannot express, and the errors of [`config_json`].
pub fn check_config(config: &Json, metadata: &Metadata, tensors: &mut dyn Tensors) -> Result<(), Error> {
    let found = config_json(metadata, tensors)?;
    for (key, value) in found.as_object().into_iter().flatten() {
        let stated = config.get(key).filter(|stated| !stated.is_null());
        // One name may stand for two models, and stretched positions have several forms.
        let is_compared = match &**key {
            "model_type" | "rope_scaling" => false,
            // Files of models without positions all say the same.
            "max_position_embeddings" => *value != MAMBA_POSITIONS,
            _ => true,
        };
        if let Some(stated) = stated.filter(|stated| is_compared && !is_same(stated, value)) {
            return Err(Error::Unconvertible(format!(
                "`{key}` is {stated} in config.json, and a GGUF file of this model can only say {value}"
            )));
        }
    }
    Ok(())
}

/// Whether two values are equal after rounding numbers to float32, the type in files.
fn is_same(a: &Json, b: &Json) -> bool {
    match (a, b) {
        (Json::Number(a), Json::Number(b)) => a.as_f64().map(|a| a as f32) == b.as_f64().map(|b| b as f32),
        (Json::Array(a), Json::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
        _ => a == b,
    }
}

/// A `config.json` that is being converted to metadata.
pub(super) struct Folder<'a> {
    fields: &'a Map<String, Json>,
    pub(super) architecture: &'static Architecture,
    /// Value of `general.architecture`.
    name: &'static str,
    pub(super) described: ConfigMetadata,
}

impl Folder<'_> {
    /// Returns the value of a field; null counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn is_null(&self, key: &str) -> bool {
        self.fields.get(key).is_some_and(Json::is_null)
    }

    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a whole number", Json::as_u64)
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a number", Json::as_f64)
    }

    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Json::as_bool)
    }

    pub(super) fn needed(&self, key: &str) -> Result<u64, Error> {
        self.unsigned(key)?.ok_or_else(|| wrong(format!("`{key}` is missing in config.json")))
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl FnOnce(&Json) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(format!("`{key}` in config.json must be {wanted}")))
    }

    /// Sets a key of the architecture.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.described.metadata.insert(format!("{}.{key}", self.name), value);
    }

    /// Gives the file another architecture, before any key of it is set.
    pub(super) fn rename(&mut self, name: &'static str) {
        self.name = name;
        self.described.metadata.insert("general.architecture", text(name));
    }

    /// Sets a key to an integer.
    pub(super) fn count(&mut self, key: &str, number: u64) -> Result<(), Error> {
        let number =
            u32::try_from(number).map_err(|_| wrong(format!("`{key}` is {number}, which is too large")))?;
        self.set(key, Value::U32(number));
        Ok(())
    }

    pub(super) fn real(&mut self, key: &str, number: f64) {
        self.set(key, Value::F32(number as f32));
    }

    pub(super) fn head_dim(&self) -> Result<u64, Error> {
        if let Some(size) = self.unsigned("head_dim")?.or(self.architecture.defaults.head_dim) {
            return Ok(size);
        }
        let (hidden, heads) = (self.needed("hidden_size")?, self.needed("num_attention_heads")?);
        hidden.checked_div(heads).ok_or_else(|| wrong("`num_attention_heads` is 0 in config.json"))
    }

    /// Returns the number of key-value heads. Null stands for the number of attention heads, and an absent
    /// field for the default.
    pub(super) fn kv_heads(&self) -> Result<u64, Error> {
        let key = "num_key_value_heads";
        let default = self.architecture.defaults.kv_heads.filter(|_| !self.is_null(key));
        match self.unsigned(key)?.or(default) {
            Some(heads) => Ok(heads),
            None => self.needed("num_attention_heads"),
        }
    }

    pub(super) fn positions(&self) -> Result<u64, Error> {
        Ok(self.unsigned("max_position_embeddings")?.unwrap_or(self.architecture.defaults.positions))
    }

    /// Refuses activations that the architecture does not have in llama.cpp.
    pub(super) fn check_activation(&self, known: &[&str]) -> Result<(), Error> {
        for key in ["hidden_act", "hidden_activation"] {
            let name = self.get(key).and_then(Json::as_str);
            if let Some(name) = name.filter(|name| !known.contains(name)) {
                return Err(wrong(format!(
                    "`{key}` is {}; models of this type have {}",
                    shown(name),
                    known.join(" or ")
                )));
            }
        }
        Ok(())
    }
}

pub(super) fn wrong(why: impl Into<String>) -> Error {
    Error::Unconvertible(why.into())
}

pub(super) fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}
