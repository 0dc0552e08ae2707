//! A folder of fixtures.

use std::{path::PathBuf, sync::Arc};

use burn::tensor::{DType, TensorData};
use kiln::{
    Error, Result,
    expert::source::{self, Answer, Source, SourceFile},
};
use safetensors::{Dtype, SafeTensors};

use super::{Mismatch, case::Case};

#[derive(Debug)]
pub struct Folder {
    source: Arc<dyn Source>,
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
    pub(super) fn open(source: Arc<dyn Source>) -> Result<Self> {
        let wrong = |name: &str, why: String| Error::File { path: source.path(name), why };
        let read = |name: &str| {
            let read = source::read(&*source, name, LARGEST)?;
            read.ok_or_else(|| wrong(name, "there is no such file".to_owned()))
        };
        let json = read("cases.json")?;
        let parsed = serde_json::from_slice(&json);
        let Cases { transformers, cases } = parsed.map_err(|e| wrong("cases.json", e.to_string()))?;
        let tensors = read("tensors.safetensors")?;
        SafeTensors::deserialize(&tensors).map_err(|e| wrong("tensors.safetensors", e.to_string()))?;
        Ok(Self { source, transformers, cases, tensors })
    }

    pub(super) fn model(&self, name: &str) -> Arc<dyn Source> {
        self.within(format!("models/{name}"))
    }

    pub(super) fn adapter(&self, name: &str) -> Arc<dyn Source> {
        self.within(format!("adapters/{name}"))
    }

    fn within(&self, folder: String) -> Arc<dyn Source> {
        Arc::new(Within { source: self.source.clone(), folder })
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

/// A folder within a source.
#[derive(Debug)]
struct Within {
    source: Arc<dyn Source>,
    folder: String,
}

impl Within {
    fn name(&self, name: &str) -> String {
        if name.is_empty() { self.folder.clone() } else { format!("{}/{name}", self.folder) }
    }
}

impl Source for Within {
    fn path(&self, name: &str) -> PathBuf {
        self.source.path(&self.name(name))
    }

    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>> {
        self.source.open(&self.name(name))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        self.source.names(&self.name(folder))
    }
}
