//! The files of a model by their names, wherever they are: in a folder, in the cache of the hub, in memory.
//!
//! A read is an [`Answer`], because a source may be far away. Folders and memory answer at once.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
};

use crate::{Error, Result, read_back};

/// Size limit in bytes for files of a model that are read whole: tokenizer and templates.
pub const LONGEST_TEXT: u64 = 256 << 20;

/// First bytes of the file that Git LFS puts in place of a large file that it did not download.
pub(crate) const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Error text for a Git LFS pointer.
pub(crate) const LFS: &str = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder";

/// An answer of a source.
pub enum Answer<'a, T> {
    /// The answer is known.
    Now(T),
    /// The answer comes later.
    Later(Pin<Box<dyn Future<Output = T> + 'a>>),
}

impl<T> fmt::Debug for Answer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Now(_) => "Answer::Now",
            Self::Later(_) => "Answer::Later",
        })
    }
}

impl<T> Answer<'_, Result<T>> {
    /// Waits for the answer.
    ///
    /// # Errors
    /// The error of the answer, and the errors of [`read_back::wait`]: a browser has to fetch the files
    /// before the model is loaded.
    pub fn wait(self) -> Result<T> {
        match self {
            Self::Now(answer) => answer,
            Self::Later(answer) => read_back::wait(answer),
        }
    }
}

/// Files by their names.
pub trait Source: fmt::Debug + Send + Sync {
    /// The path of the file `name` for messages; of the source itself for an empty name.
    fn path(&self, name: &str) -> PathBuf;

    /// Opens the file `name`; `None` if there is no such file. A `/` in a name stands for a folder.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be opened.
    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>>;

    /// The names of all files in `folder`; in the source itself if it is empty.
    fn names(&self, folder: &str) -> Vec<String>;
}

/// An open file of a [`Source`].
pub trait SourceFile: fmt::Debug + Send + Sync {
    /// The size in bytes.
    fn size(&self) -> u64;

    /// Fills `bytes` from offset `at`.
    ///
    /// # Errors
    /// [`Error::File`] if there are not as many bytes, or they cannot be read.
    fn read<'a>(&'a self, at: u64, bytes: &'a mut [u8]) -> Answer<'a, Result<()>>;
}

/// Reads a file of at most `most` bytes; `None` if there is no such file.
///
/// # Errors
/// [`Error::File`] if it cannot be read, is longer, or is a Git LFS pointer.
pub fn read(source: &dyn Source, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = source.open(name).wait()? else { return Ok(None) };
    if file.size() > most {
        return Err(error(source.path(name), too_long(most)));
    }
    let mut bytes = vec![0; file.size() as usize];
    file.read(0, &mut bytes).wait()?;
    match bytes.starts_with(LFS_POINTER) {
        true => Err(error(source.path(name), LFS)),
        false => Ok(Some(bytes)),
    }
}

/// Reads a UTF-8 file of at most [`LONGEST_TEXT`] bytes; `None` if there is no such file.
///
/// # Errors
/// The errors of [`read`], and [`Error::File`] if the file is not UTF-8.
pub fn read_text(source: &dyn Source, name: &str) -> Result<Option<String>> {
    let Some(bytes) = read(source, name, LONGEST_TEXT)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|_| error(source.path(name), NOT_TEXT))
}

/// Error text for a file that is no text.
pub(crate) const NOT_TEXT: &str = "is not UTF-8 text";

/// Error text for a file of more than `most` bytes.
pub(crate) fn too_long(most: u64) -> String {
    format!("is longer than the {most} bytes that are read of such a file")
}

fn error(path: PathBuf, why: impl Into<String>) -> Error {
    Error::File { path, why: why.into() }
}

/// Files in memory.
#[derive(Clone, Default)]
pub struct MemorySource(BTreeMap<String, Arc<Contents>>);

type Contents = dyn AsRef<[u8]> + Send + Sync;

impl fmt::Debug for MemorySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemorySource").field(&self.0.keys()).finish()
    }
}

impl MemorySource {
    /// Takes the bytes of each file; of two files of one name, the last.
    pub fn new<N: Into<String>, B: AsRef<[u8]> + Send + Sync + 'static>(
        files: impl IntoIterator<Item = (N, B)>,
    ) -> Self {
        let file = |(name, bytes): (N, B)| (name.into(), Arc::new(bytes) as Arc<Contents>);
        Self(files.into_iter().map(file).collect())
    }
}

impl Source for MemorySource {
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(if name.is_empty() { "memory" } else { name })
    }

    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>> {
        let file = self.0.get(name).map(|bytes| {
            let file = MemoryFile { path: self.path(name), bytes: bytes.clone() };
            Arc::new(file) as Arc<dyn SourceFile>
        });
        Answer::Now(Ok(file))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let within = |name: &String| match folder {
            "" => Some(name.clone()),
            folder => Some(name.strip_prefix(folder)?.strip_prefix('/')?.to_owned()),
        };
        self.0.keys().filter_map(within).filter(|name| !name.contains('/')).collect()
    }
}

struct MemoryFile {
    path: PathBuf,
    bytes: Arc<Contents>,
}

impl fmt::Debug for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryFile").field(&self.path).finish()
    }
}

impl SourceFile for MemoryFile {
    fn size(&self) -> u64 {
        (*self.bytes).as_ref().len() as u64
    }

    fn read<'a>(&'a self, at: u64, bytes: &'a mut [u8]) -> Answer<'a, Result<()>> {
        let rest = usize::try_from(at).ok().and_then(|at| (*self.bytes).as_ref().get(at..));
        Answer::Now(match rest.and_then(|rest| rest.get(..bytes.len())) {
            Some(found) => {
                bytes.copy_from_slice(found);
                Ok(())
            }
            None => Err(error(self.path.clone(), format!("ends before byte {at} and {} more", bytes.len()))),
        })
    }
}

/// A place in a file, for readers that go through it.
#[derive(Debug)]
pub struct Cursor<'a> {
    file: &'a dyn SourceFile,
    at: u64,
}

impl<'a> Cursor<'a> {
    /// Begins at the first byte.
    pub fn new(file: &'a dyn SourceFile) -> Self {
        Self { file, at: 0 }
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let len = self.file.size().saturating_sub(self.at).min(bytes.len() as u64) as usize;
        let read = self.file.read(self.at, &mut bytes[..len]).wait();
        read.map_err(|e| io::Error::other(e.to_string()))?;
        self.at += len as u64;
        Ok(len)
    }
}

impl Seek for Cursor<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.file.size().checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Whether `name` is that of a file in the folder itself, so that a file that names others cannot name one
/// elsewhere.
pub fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|plain| plain == name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn memory() -> MemorySource {
        MemorySource::new([("a", b"12345".to_vec()), ("b/c", b"678".to_vec()), ("b/d/e", Vec::new())])
    }

    #[test]
    fn files_in_memory_are_listed_and_read_by_folder() {
        let memory = memory();
        assert_eq!(memory.names(""), ["a"]);
        assert_eq!(memory.names("b"), ["c"]);
        assert_eq!(read_text(&memory, "b/c"), Ok(Some("678".to_owned())));
        assert_eq!(read(&memory, "c", 9), Ok(None));
        assert!(read(&memory, "a", 4).unwrap_err().to_string().contains("a: is longer than the 4 bytes"));
    }

    #[test]
    fn a_range_beyond_the_end_is_an_error() {
        let file = memory().open("a").wait().unwrap().unwrap();
        let mut two = [0; 2];
        file.read(3, &mut two).wait().unwrap();
        assert_eq!(&two, b"45");
        for at in [4, 6, u64::MAX] {
            assert!(file.read(at, &mut two).wait().unwrap_err().to_string().contains("a: ends before"));
        }
        let mut cursor = Cursor::new(&*file);
        assert_eq!(cursor.seek(SeekFrom::End(-1)).unwrap(), 4);
        assert_eq!(cursor.read(&mut two).unwrap(), 1);
        assert_eq!(cursor.read(&mut two).unwrap(), 0);
        assert!(cursor.seek(SeekFrom::Current(-9)).is_err());
    }

    #[test]
    fn waiting_for_a_later_answer_returns_it() {
        let later = async {
            crate::read_back::yield_now().await;
            Ok(3)
        };
        assert_eq!(Answer::Later(Box::pin(later)).wait(), Ok(3));
    }
}
