//! The pooling of embeddings in the metadata of a GGUF file, converted to the files of a folder of
//! sentence-transformers.

use serde_json::{Value, json};

use super::Metadata;
use crate::Error;

/// Name of the file of [`pooling_config`], within the folder.
pub const POOLING_CONFIG: &str = "1_Pooling/config.json";

/// Returns the `modules.json`; `None` if the file names no pooling. Vectors are normalized, which no file
/// says, as llama.cpp does by default.
///
/// # Errors
/// An unknown pooling.
pub fn modules(metadata: &Metadata) -> Result<Option<Value>, Error> {
    let path = POOLING_CONFIG.split('/').next();
    Ok(pooling(metadata)?.map(|_| {
        json!([
            { "path": "", "type": "sentence_transformers.models.Transformer" },
            { "path": path, "type": "sentence_transformers.models.Pooling" },
            { "path": "2_Normalize", "type": "sentence_transformers.models.Normalize" },
        ])
    }))
}

/// Returns the config of the pooling; `None` if the file names none.
///
/// # Errors
/// An unknown pooling.
pub fn pooling_config(metadata: &Metadata) -> Result<Option<Value>, Error> {
    Ok(pooling(metadata)?.map(|name| json!({ "pooling_mode": name })))
}

/// Reads `pooling_type` (`llama_pooling_type`).
fn pooling(metadata: &Metadata) -> Result<Option<&'static str>, Error> {
    let Some(architecture) = metadata.text("general.architecture")? else { return Ok(None) };
    let key = format!("{architecture}.pooling_type");
    match metadata.number(&key)? {
        None => Ok(None),
        // Not specified, or none.
        Some(-1.0 | 0.0) => Ok(None),
        Some(1.0) => Ok(Some("mean")),
        Some(2.0) => Ok(Some("cls")),
        Some(3.0) => Ok(Some("lasttoken")),
        Some(4.0) => {
            let why = "is 4: the model ranks pairs of texts, which is not supported".to_owned();
            Err(Error::Metadata { key, why })
        }
        Some(other) => Err(Error::Metadata { key, why: format!("is {other}, must be between 0 and 3") }),
    }
}
