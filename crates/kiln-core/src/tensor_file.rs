//! A safetensors file: its header, and the bytes of its tensors.
//!
//! Tensors are read, not mapped. When a mapped file is truncated, accessing a missing page kills the process;
//! a failed read is an error. Reading costs nothing extra: every tensor is copied once either way, into the
//! buffer that becomes the tensor.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use safetensors::Dtype;
use serde::Deserialize;

use crate::{
    Error, Result,
    source::{LFS, LFS_POINTER, SourceFile},
};

/// Largest size of a header in bytes, as in the safetensors crate.
const LONGEST_HEADER: u64 = 100_000_000;

/// Number of bytes before the header, which hold its length.
const LENGTH: u64 = 8;

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Arc<dyn SourceFile>,
    header: Header,
    /// Offset of the data in the file.
    data: u64,
}

/// The header of a file. The one of the safetensors crate counts bytes in `usize`, which ends at 4 GiB in a
/// browser.
#[derive(Debug, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__", default)]
    metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

/// The type, shape and place of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct TensorInfo {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// First byte, and the one after the last, from the beginning of the data.
    pub data_offsets: (u64, u64),
}

impl TensorInfo {
    /// Size in bytes that the type and the shape need; `None` if it is no whole number, or too large.
    fn size(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1_u64, |all, size| all.checked_mul(*size as u64))?;
        let bits = elements.checked_mul(self.dtype.bitsize() as u64)?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl Header {
    /// Returns the end of the data. Tensors follow each other without gaps, in any order of names.
    ///
    /// # Errors
    /// A sentence about a tensor whose size or place is impossible.
    fn end(&self) -> Result<u64, String> {
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_unstable_by_key(|(_, info)| info.data_offsets);
        let mut end = 0;
        for (name, info) in tensors {
            let (first, last) = info.data_offsets;
            if first != end || last < first {
                return Err(format!("`{name}` does not begin where the tensor before it ends"));
            }
            if info.size() != Some(last - first) {
                return Err(format!("`{name}` has other bytes than its shape and type need"));
            }
            end = last;
        }
        Ok(end)
    }
}

impl TensorFile {
    /// Opens the file `path`, and reads its header.
    ///
    /// # Errors
    /// [`Error::File`] if the file is missing, not a regular file, locked by a writer, or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = crate::files::RegularFile::open(path)?;
        let missing = || Error::File { path: path.to_owned(), why: "there is no such file".to_owned() };
        Self::new(path, Arc::new(file.ok_or_else(missing)?))
    }

    /// Reads the header of a file, and checks it: offsets are in order without gaps, sizes follow from
    /// shapes, and the data are as long as the file says. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, or is damaged.
    pub fn new(path: &Path, file: Arc<dyn SourceFile>) -> Result<Self> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let damaged = |why: &str| wrong(format!("is not a whole safetensors file ({why})"));
        let len = file.size();
        let mut beginning = vec![0; len.min(LENGTH.max(LFS_POINTER.len() as u64)) as usize];
        file.read(0, &mut beginning).wait()?;
        if beginning.starts_with(LFS_POINTER) {
            return Err(wrong(LFS.to_owned()));
        }
        let length = beginning.first_chunk().ok_or_else(|| damaged("it has no header"))?;
        let header = u64::from_le_bytes(*length);
        if header > LONGEST_HEADER || header > len - LENGTH {
            return Err(damaged("its header is longer than the file or than any header"));
        }
        let mut text = vec![0; header as usize];
        file.read(LENGTH, &mut text).wait()?;
        let data = LENGTH + header;
        let header: Header = serde_json::from_slice(&text).map_err(|e| damaged(&e.to_string()))?;
        if header.end().map_err(|why| damaged(&why))? != len - data {
            return Err(damaged("it is shorter or longer than its header says"));
        }
        Ok(Self { path: path.to_owned(), file, header, data })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors by name.
    pub fn tensors(&self) -> &HashMap<String, TensorInfo> {
        &self.header.tensors
    }

    /// Returns the header entry of the tensor `name`, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensors.get(name)
    }

    /// Returns the strings stored beside the tensors (`__metadata__`).
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.header.metadata.as_ref()
    }

    /// Fills `bytes` from `offset`, which counts from the beginning of the data.
    ///
    /// # Errors
    /// [`Error::File`] if the file became shorter since it was opened, or cannot be read.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.file.read(self.data.saturating_add(offset), bytes).wait()
    }

    /// Reads the bytes of a tensor of this file.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn read_tensor(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let (first, last) = info.data_offsets;
        let too_large = |_| Error::File {
            path: self.path.clone(),
            why: "has a tensor larger than this machine can address".to_owned(),
        };
        let mut bytes = vec![0; usize::try_from(last.saturating_sub(first)).map_err(too_large)?];
        self.read(first, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::fs::File;

    use safetensors::tensor::TensorView;

    use super::*;

    fn written(folder: &Path) -> PathBuf {
        let path = folder.join("file.safetensors");
        let data: Vec<u8> = (0..64).collect();
        let view = TensorView::new(Dtype::F32, vec![4, 4], &data).unwrap();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file([("x", view)], Some(metadata), &path).unwrap();
        path
    }

    #[test]
    fn a_file_that_becomes_shorter_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let file = TensorFile::open(&path).unwrap();
        let info = file.tensor("x").unwrap();
        assert_eq!((info.shape.clone(), info.dtype), (vec![4, 4], Dtype::F32));
        assert_eq!(file.read_tensor(info).unwrap(), (0..64).collect::<Vec<u8>>());
        assert_eq!(file.metadata().unwrap()["format"], "pt");
        let len = std::fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
        let why = file.read_tensor(info).unwrap_err().to_string();
        assert!(why.contains("became shorter"), "{why}");
        let why = TensorFile::open(&path).unwrap_err().to_string();
        assert!(why.contains("not a whole safetensors file"), "{why}");
    }

    #[test]
    fn a_file_that_is_locked_for_writing_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let writer = File::options().write(true).open(&path).unwrap();
        writer.lock().unwrap();
        assert!(TensorFile::open(&path).unwrap_err().to_string().contains("is locked"));
        writer.unlock().unwrap();
        assert!(TensorFile::open(&path).is_ok());
    }

    #[test]
    fn headers_that_do_not_fit_the_file_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for bytes in
            [&[][..], &[1, 2, 3], &u64::MAX.to_le_bytes(), &100u64.to_le_bytes(), b"\x02\0\0\0\0\0\0\0{}x"]
        {
            std::fs::write(&path, bytes).unwrap();
            assert!(TensorFile::open(&path).unwrap_err().to_string().contains("not a whole"), "{bytes:?}");
        }
    }
}
