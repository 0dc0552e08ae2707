//! A GGUF file used as a model folder: its metadata replaces the folder's small files.
//!
//! A model that `llama-gguf-split` cut into parts is opened by the name of any part.

use std::{
    io::BufReader,
    path::{Path, PathBuf},
    sync::Arc,
};

use kiln_core::{
    Error, Result,
    source::{Cursor, Source, SourceFile},
};
use kiln_weights::gguf::{self, Gguf, Metadata, TensorInfo};
use serde_json::Value;

/// Upper limit for the length of a tensor that belongs to the config.
const LONGEST_VECTOR: usize = 1 << 16;

/// Upper limit for the number of parts.
const MOST_PARTS: usize = 1 << 10;

/// The open files of a GGUF model, one per part. No tensor data has been read.
#[derive(Debug)]
pub(crate) struct GgufFiles {
    /// Path of the part that the user named.
    path: PathBuf,
    parts: Vec<PartFile>,
}

#[derive(Debug)]
pub(super) struct PartFile {
    pub(super) path: PathBuf,
    file: Arc<dyn SourceFile>,
    header: Gguf,
}

impl PartFile {
    fn open(source: &dyn Source, name: &str) -> Result<Self> {
        let path = source.path(name);
        let file = source.open(name).wait()?.ok_or_else(|| wrong(&path, "there is no such file"))?;
        let mut reader = BufReader::new(Cursor::new(&*file));
        let header = Gguf::read(&mut reader, file.size()).map_err(|e| wrong(&path, e))?;
        Ok(Self { path, file, header })
    }

    pub(super) fn tensors(&self) -> &[TensorInfo] {
        self.header.tensors()
    }

    /// Fills `bytes` from offset `at` of the file.
    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read(at, bytes).wait()
    }
}

impl GgufFiles {
    /// Opens the file `name` and, if it is one part of a model, the other parts beside it.
    ///
    /// # Errors
    /// [`Error::File`] for a part that is missing, damaged, or contradicts another one.
    pub(crate) fn open(source: &dyn Source, name: &str) -> Result<Self> {
        let named = PartFile::open(source, name)?;
        let path = named.path.clone();
        let split = named.header.parts().map_err(|e| wrong(&path, e))?.filter(|split| split.count > 1);
        let Some(split) = split else { return Ok(Self { path, parts: vec![named] }) };
        let names = gguf::part_names(name).filter(|names| names.len() as u64 == split.count);
        let names = names.filter(|names| names.len() <= MOST_PARTS).ok_or_else(|| {
            let why = format!(
                "is part {} of {}, and is not called so; parts are called NAME-00001-of-{:05}.gguf",
                split.part + 1,
                split.count,
                split.count
            );
            wrong(&path, why)
        })?;
        let parts: Vec<PartFile> =
            names.iter().map(|name| PartFile::open(source, name)).collect::<Result<_>>()?;
        for (number, part) in (0..).zip(&parts) {
            match part.header.parts().map_err(|e| wrong(&part.path, e))? {
                Some(found) if found.part == number && found.count == split.count => {}
                _ => {
                    let why = format!("is not part {} of {}, as its name says", number + 1, split.count);
                    return Err(wrong(&part.path, why));
                }
            }
        }
        let tensors: usize = parts.iter().map(|part| part.tensors().len()).sum();
        if tensors as u64 != split.tensors {
            let why =
                format!("belongs to a model of {} tensors, and its parts have {tensors}", split.tensors);
            return Err(wrong(&path, why));
        }
        Ok(Self { path, parts })
    }

    pub(super) fn parts(&self) -> &[PartFile] {
        &self.parts
    }

    /// Returns the text that a folder would have in `file`; `None` for a file that has no counterpart in
    /// GGUF.
    ///
    /// # Errors
    /// [`Error::File`] for metadata that is missing, unknown or contradicts itself.
    pub(crate) fn text(&self, file: &str) -> Result<Option<String>> {
        let metadata = self.metadata();
        let model = metadata.get("tokenizer.ggml.model");
        let has_tokens = model.is_some_and(|model| !matches!(model.as_str(), Some("none" | "no_vocab")));
        let json = match file {
            "modules.json" => gguf::modules(metadata),
            gguf::POOLING_CONFIG => gguf::pooling_config(metadata),
            // All others are about tokens.
            _ if !has_tokens => return Ok(None),
            "tokenizer.json" => gguf::tokenizer_json(metadata).map(Some),
            "tokenizer_config.json" => gguf::tokenizer_config(metadata).map(Some),
            "generation_config.json" => gguf::generation_config(metadata).map(Some),
            _ => return Ok(None),
        };
        Ok(json.map_err(|e| wrong(&self.path, e))?.map(|json| json.to_string()))
    }

    /// Returns the config of the model, as in a `config.json`.
    pub(crate) fn config(&self) -> Result<Value> {
        let mut tensors = Tensors(self);
        gguf::config_json(self.metadata(), &mut tensors).map_err(|e| wrong(&self.path, e))
    }

    /// The metadata of the model, which is in the first part.
    pub(super) fn metadata(&self) -> &Metadata {
        self.parts[0].header.metadata()
    }
}

/// The tensors, for the questions that a config has about them.
struct Tensors<'a>(&'a GgufFiles);

impl Tensors<'_> {
    fn find(&self, name: &str) -> Option<(&PartFile, &TensorInfo)> {
        self.0.parts.iter().find_map(|part| Some((part, part.header.tensor(name)?)))
    }
}

impl gguf::Tensors for Tensors<'_> {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.find(name).map(|(_, tensor)| tensor.shape.clone())
    }

    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, kiln_weights::Error> {
        let io = |why: String| kiln_weights::Error::Io(std::io::Error::other(why));
        let (part, tensor) = self.find(name).ok_or_else(|| io(format!("there is no tensor `{name}`")))?;
        let len: usize = tensor.shape.iter().product();
        if len > LONGEST_VECTOR {
            let why = format!("the tensor `{name}` has {len} numbers, more than in any model");
            return Err(kiln_weights::Error::Damaged(why));
        }
        // The header was checked: the file has that many bytes.
        let mut bytes = vec![0; (tensor.range.end - tensor.range.start) as usize];
        part.read(tensor.range.start, &mut bytes).map_err(|e| io(e.to_string()))?;
        let mut numbers = vec![0.0; len];
        tensor.format.unpack(&bytes, &mut numbers)?;
        Ok(numbers)
    }
}

fn wrong(path: &Path, why: impl ToString) -> Error {
    Error::File { path: path.to_owned(), why: why.to_string() }
}
