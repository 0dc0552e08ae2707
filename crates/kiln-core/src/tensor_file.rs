//! A safetensors file: its header, and the bytes of its tensors.
//!
//! Tensors are read, not mapped. When a mapped file is truncated, accessing a missing page kills the process;
//! a failed read is an error. Reading costs nothing extra: every tensor is copied once either way, into the
//! buffer that becomes the tensor.

use std::{
    collections::HashMap,
    fs::{File, TryLockError},
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::{Error, Result, files};

/// Largest size of a header in bytes, as in the safetensors crate.
const LONGEST_HEADER: u64 = 100_000_000;

/// Number of bytes before the header, which hold its length.
const LENGTH: u64 = 8;

/// An open safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    metadata: Metadata,
    /// Offset of the data in the file.
    data: u64,
}

impl TensorFile {
    /// Opens a file, reads its header, and checks it: offsets are in order without gaps, sizes follow from
    /// shapes, and the data are as long as the file says.
    ///
    /// # Errors
    /// [`Error::File`] if the file is missing, not a regular file, locked by a writer, or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let (mut file, len) = files::open(path)?;
        // Works if the system has locks and the writer uses them. Some file systems have none.
        if let Err(TryLockError::WouldBlock) = file.try_lock_shared() {
            return Err(wrong("is locked by another process that writes it; try again".to_owned()));
        }
        let damaged = |why: &str| wrong(format!("is not a whole safetensors file ({why})"));
        let mut length = [0; LENGTH as usize];
        let begins = len.min(LENGTH) as usize;
        file.read_exact(&mut length[..begins]).map_err(|e| wrong(e.to_string()))?;
        if files::is_lfs_pointer(&beginning(&mut file, &length[..begins])) {
            return Err(wrong(files::LFS.to_owned()));
        }
        if len < LENGTH {
            return Err(damaged("it has no header"));
        }
        let header = u64::from_le_bytes(length);
        if header > LONGEST_HEADER || header > len - LENGTH {
            return Err(damaged("its header is longer than the file or than any header"));
        }
        let mut text = vec![0; header as usize];
        file.seek(SeekFrom::Start(LENGTH))
            .and_then(|_| file.read_exact(&mut text))
            .map_err(|e| wrong(e.to_string()))?;
        let metadata: Metadata = serde_json::from_slice(&text).map_err(|e| damaged(&e.to_string()))?;
        let data = LENGTH + header;
        if metadata.data_len() as u64 != len - data {
            return Err(damaged("it is shorter or longer than its header says"));
        }
        Ok(Self { path: path.to_owned(), file: Mutex::new(file), metadata, data })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tensors by name; offsets count from the beginning of the data.
    pub fn tensors(&self) -> HashMap<String, &TensorInfo> {
        self.metadata.tensors()
    }

    /// Returns the header entry of the tensor `name`, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Returns the strings stored beside the tensors (`__metadata__`).
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.metadata.metadata().as_ref()
    }

    /// Fills `bytes` from `offset`, which counts from the beginning of the data.
    ///
    /// # Errors
    /// [`Error::File`] if the file became shorter since it was opened, or cannot be read.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let at = SeekFrom::Start(self.data.saturating_add(offset));
        file.seek(at).and_then(|_| file.read_exact(bytes)).map_err(|e| {
            let why = match e.kind() {
                std::io::ErrorKind::UnexpectedEof => "became shorter while it was read".to_owned(),
                _ => e.to_string(),
            };
            Error::File { path: self.path.clone(), why }
        })
    }

    /// Reads the bytes of a tensor of this file.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn read_tensor(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let Range { start, end } = info.data_offsets.0..info.data_offsets.1;
        let mut bytes = vec![0; end.saturating_sub(start)];
        self.read(start as u64, &mut bytes)?;
        Ok(bytes)
    }
}

/// Returns the first bytes of a file, of which `read` were read already.
fn beginning(file: &mut File, read: &[u8]) -> Vec<u8> {
    let mut beginning = read.to_vec();
    // If no more can be read, the bytes read so far are enough.
    _ = file.take(64).read_to_end(&mut beginning);
    beginning
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use safetensors::{Dtype, tensor::TensorView};

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
    fn a_file_that_is_being_written_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let writer = File::options().write(true).open(&path).unwrap();
        writer.lock().unwrap();
        assert!(TensorFile::open(&path).unwrap_err().to_string().contains("is locked"));
        writer.unlock().unwrap();
        assert!(TensorFile::open(&path).is_ok());
    }

    #[test]
    fn a_header_may_not_ask_for_more_than_there_is() {
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
