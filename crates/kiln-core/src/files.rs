//! Opening, reading and writing files. Everything that Kiln reads or writes by name goes through here.
//!
//! Names come from users and from downloaded folders, so a name may be anything: a device that never ends, a
//! pipe that blocks, a folder, a link. Only regular files are read or replaced.
#![allow(clippy::disallowed_methods, reason = "the one module that opens files")]

use std::{
    fs::{self, File, Metadata, TryLockError},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use tempfile::{Builder, NamedTempFile};

pub use crate::source::LONGEST_TEXT;
use crate::{
    Error, Result,
    source::{Answer, LFS, LFS_POINTER, NOT_TEXT, Source, SourceFile, too_long},
};

/// Size limit in bytes for text from a user: a prompt, a template, a conversation. Tokenizing takes up to two
/// hundred times as much memory.
pub const LONGEST_INPUT: u64 = 16 << 20;

/// Opens a regular file for reading, and returns its length.
///
/// # Errors
/// [`Error::File`] if it cannot be opened, or is a folder, device or pipe.
pub fn open(path: &Path) -> Result<(File, u64)> {
    try_open(path)?.ok_or_else(|| error(path, "there is no such file"))
}

/// Opens a regular file for reading, and returns its length; `None` if there is no such file.
///
/// # Errors
/// [`Error::File`] if it cannot be opened, or is a folder, device or pipe.
pub fn try_open(path: &Path) -> Result<Option<(File, u64)>> {
    // Checked before opening: opening a pipe waits for a writer.
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(path, reason(&e))),
    };
    regular(path, &metadata)?;
    let file = File::open(path).map_err(|e| error(path, reason(&e)))?;
    Ok(Some((file, metadata.len())))
}

/// Opens a regular file of any length for random access.
///
/// # Errors
/// The errors of [`open`], and [`Error::File`] for a Git LFS pointer.
pub fn open_to_seek(path: &Path) -> Result<File> {
    let (mut file, _) = open(path)?;
    let mut beginning = Vec::new();
    let read = (&mut file).take(LFS_POINTER.len() as u64).read_to_end(&mut beginning);
    read.and_then(|_| file.rewind()).map_err(|e| error(path, reason(&e)))?;
    match beginning.starts_with(LFS_POINTER) {
        true => Err(error(path, LFS)),
        false => Ok(file),
    }
}

/// A folder as a source.
#[derive(Clone, Debug)]
pub struct FolderSource(PathBuf);

impl FolderSource {
    /// The folder `path`; the current one if it is empty.
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }
}

impl Source for FolderSource {
    fn path(&self, name: &str) -> PathBuf {
        if name.is_empty() { self.0.clone() } else { self.0.join(name) }
    }

    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>> {
        let file = RegularFile::open(&self.path(name));
        Answer::Now(file.map(|file| Some(Arc::new(file?) as Arc<dyn SourceFile>)))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}

/// A regular file that is read in any order. As long as it is open, a writer that uses locks waits.
#[derive(Debug)]
pub(crate) struct RegularFile {
    path: PathBuf,
    file: Mutex<File>,
    size: u64,
}

impl RegularFile {
    /// Opens a file; `None` if there is no such file.
    ///
    /// # Errors
    /// The errors of [`try_open`], and [`Error::File`] if a writer has locked it.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>> {
        let Some((file, size)) = try_open(path)? else { return Ok(None) };
        // Works if the system has locks and the writer uses them. Some file systems have none.
        if let Err(TryLockError::WouldBlock) = file.try_lock_shared() {
            return Err(error(path, "is locked by another process that writes it; try again"));
        }
        Ok(Some(Self { path: path.to_owned(), file: Mutex::new(file), size }))
    }
}

impl SourceFile for RegularFile {
    fn size(&self) -> u64 {
        self.size
    }

    fn read<'a>(&'a self, at: u64, bytes: &'a mut [u8]) -> Answer<'a, Result<()>> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes));
        Answer::Now(read.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => error(&self.path, "became shorter while it was read"),
            _ => error(&self.path, reason(&e)),
        }))
    }
}

/// Copies a stream into a temporary file, for readers that need random access. The file has no name, and is
/// deleted when it is closed.
///
/// # Errors
/// A sentence without its subject.
pub fn spool(mut stream: impl Read) -> Result<File, String> {
    let cannot = |e: io::Error| format!("cannot be copied to a temporary file: {}", reason(&e));
    let mut file = tempfile::tempfile().map_err(cannot)?;
    io::copy(&mut stream, &mut file).map_err(cannot)?;
    file.rewind().map_err(cannot)?;
    Ok(file)
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// [`Error::File`] if it cannot be read, is not a regular file, or is longer.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    try_read(path, most)?.ok_or_else(|| error(path, "there is no such file"))
}

/// Reads a regular file of at most `most` bytes; `None` if there is no such file.
///
/// # Errors
/// [`Error::File`] if it cannot be read, is not a regular file, or is longer.
pub fn try_read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let Some((file, len)) = try_open(path)? else { return Ok(None) };
    let mut bytes = Vec::with_capacity(len.min(most) as usize);
    // The reported length may be wrong, as in /proc, or the file may grow.
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| error(path, reason(&e)))?;
    if bytes.len() as u64 > most {
        return Err(error(path, too_long(most)));
    }
    if bytes.starts_with(LFS_POINTER) {
        return Err(error(path, LFS));
    }
    Ok(Some(bytes))
}

/// Reads a regular UTF-8 file of at most [`LONGEST_TEXT`] bytes.
///
/// # Errors
/// The errors of [`read`], and [`Error::File`] if the file is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    text(path, read(path, LONGEST_TEXT)?)
}

/// Reads a regular UTF-8 file of at most [`LONGEST_TEXT`] bytes; `None` if there is no such file.
///
/// # Errors
/// The errors of [`read`], and [`Error::File`] if the file is not UTF-8.
pub fn try_read_text(path: &Path) -> Result<Option<String>> {
    try_read(path, LONGEST_TEXT)?.map(|bytes| text(path, bytes)).transpose()
}

/// Reads text from a path given by a user: a file, or a pipe such as a shell's `<(command)`. A single newline
/// at the end is removed, because editors and `echo` write one.
///
/// # Errors
/// [`Error::File`] if it cannot be read, is not UTF-8, or is longer than [`LONGEST_INPUT`].
pub fn read_input(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => error(path, "there is no such file"),
        _ => error(path, reason(&e)),
    })?;
    input(file).map_err(|why| error(path, why))
}

/// Reads text from a stream to its end. A single newline at the end is removed.
///
/// # Errors
/// A sentence without its subject.
pub fn input(stream: impl Read) -> Result<String, String> {
    let mut bytes = Vec::new();
    stream.take(LONGEST_INPUT + 1).read_to_end(&mut bytes).map_err(|e| reason(&e))?;
    if bytes.len() as u64 > LONGEST_INPUT {
        return Err(format!("is longer than the {LONGEST_INPUT} bytes that are read of a text"));
    }
    let mut text = String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".to_owned())?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

fn text(path: &Path, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| error(path, NOT_TEXT))
}

/// A file that is written beside its target and replaces it when it is complete.
///
/// Until [`finish`](Self::finish) the target is unchanged, whatever happens. A link is followed, the mode of
/// a file that is replaced is kept, and the temporary name is unique, so that two processes may write the
/// same target.
#[derive(Debug)]
pub struct NewFile {
    target: PathBuf,
    file: NamedTempFile,
}

impl NewFile {
    /// Creates the temporary file in the folder of `path`.
    ///
    /// # Errors
    /// [`Error::File`] if the folder does not exist or cannot be written to, or if `path` is a folder, a
    /// device, a pipe or a read-only file.
    pub fn create(path: &Path) -> Result<Self> {
        let target = target(path)?;
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let mut builder = Builder::new();
        builder.prefix(".kiln-").suffix(".part");
        let mode = match fs::metadata(&target) {
            Ok(metadata) => {
                regular(path, &metadata)?;
                if metadata.permissions().readonly() {
                    return Err(error(path, "is read-only; give another name, or make it writable"));
                }
                Some(metadata.permissions())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // The mode of any new file; temporary files are private by default.
                #[cfg(unix)]
                builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
                None
            }
            Err(e) => return Err(error(path, reason(&e))),
        };
        let cannot = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => {
                error(path, format!("there is no folder {} to write it to", folder.display()))
            }
            _ => error(path, format!("cannot be written: {}", reason(&e))),
        };
        let file = builder.tempfile_in(folder).map_err(cannot)?;
        if let Some(mode) = mode {
            file.as_file().set_permissions(mode).map_err(cannot)?;
        }
        Ok(Self { target, file })
    }

    /// Path of the temporary file, for libraries that write by name.
    pub fn temporary(&self) -> &Path {
        self.file.path()
    }

    /// Creates the error for a failed write to `path`.
    pub fn failed(path: &Path, e: &io::Error) -> Error {
        error(path, format!("cannot be written: {}", reason(e)))
    }

    /// Replaces the target with this file, once all of it is on the disk.
    ///
    /// # Errors
    /// [`Error::File`]; then the target is unchanged.
    pub fn finish(self) -> Result<()> {
        let Self { target, file } = self;
        let cannot = |e: io::Error| error(&target, format!("cannot be written: {}", reason(&e)));
        file.as_file().sync_all().map_err(cannot)?;
        file.persist(&target).map_err(|e| cannot(e.error))?;
        // The new name is durable once its folder is synced. Not every file system supports that, and the
        // file is in place anyway.
        #[cfg(unix)]
        if let Some(folder) = target.parent() {
            _ = File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
                .and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

/// Writes to the temporary file.
impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes a whole file, or leaves the existing one unchanged.
///
/// # Errors
/// [`Error::File`]; see [`NewFile`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut new = NewFile::create(path)?;
    new.file.write_all(bytes).map_err(|e| error(path, format!("cannot be written: {}", reason(&e))))?;
    new.finish()
}

/// A small locked file with a note that outlives the process that holds it. One process holds it at a time;
/// the system releases the lock when the process ends, however that happens, and the note stays.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    file: File,
}

impl Held {
    /// Locks the file, and creates it if it does not exist. `None` if another process holds it.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be opened, is not a regular file, or is on a file system that cannot lock
    /// it.
    pub fn take(path: &Path) -> Result<Option<Self>> {
        if let Ok(metadata) = fs::metadata(path) {
            regular(path, &metadata)?;
        }
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| error(path, reason(&e)))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { path: path.to_owned(), file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(error(path, format!("cannot be locked: {}", reason(&e)))),
        }
    }

    /// Reads the note that the last holder left, of at most `most` bytes.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, is longer, or is not UTF-8.
    pub fn read(&mut self, most: u64) -> Result<String> {
        let mut bytes = Vec::new();
        let read = self.file.rewind().and_then(|()| (&mut self.file).take(most + 1).read_to_end(&mut bytes));
        read.map_err(|e| error(&self.path, reason(&e)))?;
        if bytes.len() as u64 > most {
            return Err(error(&self.path, format!("is longer than the {most} bytes of such a file")));
        }
        text(&self.path, bytes)
    }

    /// Replaces the note, and returns once it is on the disk.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be written.
    pub fn write(&mut self, note: &str) -> Result<()> {
        let written = self.file.set_len(0).and_then(|()| self.file.rewind());
        let written = written.and_then(|()| self.file.write_all(note.as_bytes()));
        let written = written.and_then(|()| self.file.sync_data());
        written.map_err(|e| Self::failed(&self.path, &e))
    }

    fn failed(path: &Path, e: &io::Error) -> Error {
        error(path, format!("cannot be written: {}", reason(e)))
    }
}

impl Drop for Held {
    /// Releases the lock. A program that another thread is starting has a copy of the open file for a moment,
    /// and to close this one would not release it.
    fn drop(&mut self) {
        let _ = self.file.unlock();
    }
}

/// Checks that a file can be written to `path`, before the work whose result it is to hold.
///
/// # Errors
/// The errors of [`NewFile::create`].
pub fn check_writable(path: &Path) -> Result<()> {
    NewFile::create(path).map(drop)
}

/// Resolves the file that `path` names after all links; it need not exist.
fn target(path: &Path) -> Result<PathBuf> {
    /// Largest number of links that systems follow.
    const LINKS: usize = 40;

    let mut target = path.to_owned();
    for _ in 0..LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(error(path, "is a link that leads to itself"))
}

fn regular(path: &Path, metadata: &Metadata) -> Result<()> {
    match metadata.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(error(path, "is a folder, not a file")),
        _ => Err(error(path, "is a device or a pipe, not a regular file")),
    }
}

/// The reason of an I/O error, without its number.
fn reason(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::IsADirectory => "is a folder, not a file".to_owned(),
        io::ErrorKind::StorageFull => "the disk is full".to_owned(),
        io::ErrorKind::Unsupported => "this system has no files; give what is in the file instead".to_owned(),
        _ => e.to_string(),
    }
}

fn error(path: &Path, why: impl Into<String>) -> Error {
    Error::File { path: path.to_owned(), why: why.into() }
}

#[cfg(test)]
mod tests;
