//! A folder of fixtures.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kiln::{Error, Result};
use safetensors::{Dtype, SafeTensors};

use super::{Mismatch, case::Case};

#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Version of transformers that it was recorded with.
    pub(super) transformers: String,
    pub(super) cases: Vec<Case>,
    tensors: Vec<u8>,
}

#[derive(serde::Deserialize)]
struct Cases {
    #[serde(default)]
    transformers: String,
    cases: Vec<Case>,
}

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = path.join(name);
            fs::read(&path).map_err(|e| Error::File { path, why: e.to_string() })
        };
        let json = read("cases.json")?;
        let wrong = |why| Error::File { path: path.join("cases.json"), why };
        let Cases { transformers, cases } =
            serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))?;
        let tensors = read("tensors.safetensors")?;
        SafeTensors::deserialize(&tensors)
            .map_err(|e| Error::File { path: path.join("tensors.safetensors"), why: e.to_string() })?;
        Ok(Self { path: path.to_owned(), transformers, cases, tensors })
    }

    pub(super) fn model(&self, name: &str) -> PathBuf {
        self.path.join("models").join(name)
    }

    /// The recorded tensor `name`: its shape and numbers.
    pub(super) fn tensor(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Mismatch> {
        let tensors = SafeTensors::deserialize(&self.tensors).map_err(|e| Mismatch::new(e.to_string()))?;
        let view = tensors.tensor(name).map_err(|e| Mismatch::new(e.to_string()))?;
        if view.dtype() != Dtype::F32 {
            return Err(Mismatch::new(format!("`{name}` is recorded as {:?}, not F32", view.dtype())));
        }
        let numbers =
            view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok((view.shape().to_vec(), numbers))
    }
}
