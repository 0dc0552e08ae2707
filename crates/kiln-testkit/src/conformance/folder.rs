//! A folder of fixtures.

use std::path::{Path, PathBuf};

use burn::tensor::{DType, TensorData};
use kiln::{Error, Result, expert::files};
use safetensors::{Dtype, SafeTensors};

use super::{Mismatch, case::Case};

#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Version of transformers that made the recording.
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

/// Size limit in bytes of a recording: a hundred times the largest one.
const LARGEST: u64 = 1 << 30;

impl Folder {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let read = |name: &str| files::read(&path.join(name), LARGEST);
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

    pub(super) fn adapter(&self, name: &str) -> PathBuf {
        self.path.join("adapters").join(name)
    }

    /// Whether transformers 4.47 made the recording.
    pub(super) fn is_4_47(&self) -> bool {
        self.transformers.starts_with("4.47")
    }

    /// Returns the recorded tensor `name`: its shape and numbers.
    pub(super) fn tensor(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Mismatch> {
        let tensors = SafeTensors::deserialize(&self.tensors).map_err(|e| Mismatch::new(e.to_string()))?;
        let view = tensors.tensor(name).map_err(|e| Mismatch::new(e.to_string()))?;
        let dtype = match view.dtype() {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::U8 => DType::U8,
            other => return Err(Mismatch::new(format!("`{name}` is recorded as {other:?}"))),
        };
        let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), dtype);
        Ok((view.shape().to_vec(), data.iter::<f32>().collect()))
    }
}
