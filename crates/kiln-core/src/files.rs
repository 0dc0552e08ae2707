//! Opening, reading and writing files. Everything that Kiln reads or writes by name goes through here.
//!
//! Names come from users and from downloaded folders, so a name may be anything: a device that never ends, a pipe that
//! blocks, a folder, a link. Only regular files are read or replaced.

use std::{
    fs::{self, File, Metadata, TryLockError},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
};

use tempfile::{Builder, NamedTempFile};

use crate::{Error, Result};

/// Bytes of the longest file of a model folder that is read whole: its tokenizer, its templates.
pub const LONGEST_TEXT: u64 = 256 << 20;

/// Bytes of the longest text that a user gives: a prompt, a template, a conversation. Turning text into tokens takes up to
/// two hundred times as much memory.
pub const LONGEST_INPUT: u64 = 16 << 20;

/// What a file starts with that Git LFS put in place of a large file it did not download.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Opens a regular file for reading, and returns its length.
///
/// # Errors
/// [`Error::File`] where it cannot be opened, or is a folder, device or pipe.
pub fn open(path: &Path) -> Result<(File, u64)> {
    try_open(path)?.ok_or_else(|| error(path, "there is no such file"))
}

/// Opens a regular file for reading, and returns its length; `None` if there is no such file.
///
/// # Errors
/// [`Error::File`] where it cannot be opened, or is a folder, device or pipe.
pub fn try_open(path: &Path) -> Result<Option<(File, u64)>> {
    // Asked before it is opened: opening a pipe waits for a writer.
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(path, reason(&e))),
    };
    regular(path, &metadata)?;
    let file = File::open(path).map_err(|e| error(path, reason(&e)))?;
    Ok(Some((file, metadata.len())))
}

/// Opens a regular file of any length, whose parts are read in any order.
///
/// # Errors
/// Those of [`open`], and a Git LFS pointer.
pub fn open_to_seek(path: &Path) -> Result<File> {
    let (mut file, _) = open(path)?;
    let mut beginning = Vec::new();
    let read = (&mut file).take(LFS_POINTER.len() as u64).read_to_end(&mut beginning);
    read.and_then(|_| file.rewind()).map_err(|e| error(path, reason(&e)))?;
    match is_lfs_pointer(&beginning) {
        true => Err(error(path, LFS)),
        false => Ok(file),
    }
}

/// Copies a stream into a temporary file, for readers that read it in any order. The file has no name, and is gone when it is
/// closed.
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
/// [`Error::File`] where it cannot be read, is no regular file, or is longer.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    try_read(path, most)?.ok_or_else(|| error(path, "there is no such file"))
}

/// Reads a regular file of at most `most` bytes; `None` if there is no such file.
///
/// # Errors
/// [`Error::File`] where it cannot be read, is no regular file, or is longer.
pub fn try_read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let Some((file, len)) = try_open(path)? else { return Ok(None) };
    let mut bytes = Vec::with_capacity(len.min(most) as usize);
    // The length may be a lie, as it is in /proc, or grow.
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| error(path, reason(&e)))?;
    if bytes.len() as u64 > most {
        return Err(error(path, format!("is longer than the {most} bytes that are read of such a file")));
    }
    if bytes.starts_with(LFS_POINTER) {
        return Err(error(path, LFS));
    }
    Ok(Some(bytes))
}

/// What is said of a Git LFS pointer.
pub(crate) const LFS: &str = "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder";

/// Whether a file of this beginning is a Git LFS pointer.
pub(crate) fn is_lfs_pointer(beginning: &[u8]) -> bool {
    beginning.starts_with(LFS_POINTER)
}

/// Reads a regular UTF-8 file of at most [`LONGEST_TEXT`] bytes.
///
/// # Errors
/// Those of [`read`], and a file that is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    text(path, read(path, LONGEST_TEXT)?)
}

/// Reads a regular UTF-8 file of at most [`LONGEST_TEXT`] bytes; `None` if there is no such file.
///
/// # Errors
/// Those of [`read`], and a file that is not UTF-8.
pub fn try_read_text(path: &Path) -> Result<Option<String>> {
    try_read(path, LONGEST_TEXT)?.map(|bytes| text(path, bytes)).transpose()
}

/// Reads text from what a user named: a file, or a pipe such as a shell's `<(command)`. A single newline at the end is
/// left out, as editors and `echo` write one.
///
/// # Errors
/// [`Error::File`] where it cannot be read, is not UTF-8, or is longer than [`LONGEST_INPUT`].
pub fn read_input(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => error(path, "there is no such file"),
        _ => error(path, reason(&e)),
    })?;
    input(file).map_err(|why| error(path, why))
}

/// Reads text from a stream to its end. A single newline at the end is left out.
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
    String::from_utf8(bytes).map_err(|_| error(path, "is not UTF-8 text"))
}

/// A file that is written beside its target and takes its place when it is complete.
///
/// Until [`finish`](Self::finish) the target is as it was, whatever happens. A link is followed, the mode of a file that
/// is replaced is kept, and the temporary name is unique, so that two processes may write the same target.
#[derive(Debug)]
pub struct NewFile {
    target: PathBuf,
    file: NamedTempFile,
}

impl NewFile {
    /// Creates the temporary file in the folder of `path`.
    ///
    /// # Errors
    /// [`Error::File`] where the folder does not exist or cannot be written to, and where `path` is a folder, a device, a
    /// pipe or a read-only file.
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
                // As for any new file; temporary ones are private by default.
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

    /// Where the temporary file is, for libraries that write by name.
    pub fn temporary(&self) -> &Path {
        self.file.path()
    }

    /// What went wrong while it was written to.
    pub fn failed(path: &Path, e: &io::Error) -> Error {
        error(path, format!("cannot be written: {}", reason(e)))
    }

    /// Puts the file in the place of its target, once all of it is on the disk.
    ///
    /// # Errors
    /// [`Error::File`]; then the target is as it was.
    pub fn finish(self) -> Result<()> {
        let Self { target, file } = self;
        let cannot = |e: io::Error| error(&target, format!("cannot be written: {}", reason(&e)));
        file.as_file().sync_all().map_err(cannot)?;
        file.persist(&target).map_err(|e| cannot(e.error))?;
        // The new name is durable once its folder is. Not every file system can do that, and the file is in place.
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

/// Writes a whole file, or leaves what was there.
///
/// # Errors
/// [`Error::File`]; see [`NewFile`].
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut new = NewFile::create(path)?;
    new.file.write_all(bytes).map_err(|e| error(path, format!("cannot be written: {}", reason(&e))))?;
    new.finish()
}

/// A small file that one process has at a time, for a note that outlives it: the system lets go of it when the process ends, however that happens, and the note stays.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    file: File,
}

impl Held {
    /// Makes the file where there is none. `None` where another process has it.
    ///
    /// # Errors
    /// [`Error::File`] where it cannot be opened, is no regular file, or is on a file system that cannot lock it.
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

    /// The note of whoever had it last, of at most `most` bytes.
    ///
    /// # Errors
    /// [`Error::File`] where it cannot be read, is longer, or is not UTF-8.
    pub fn read(&mut self, most: u64) -> Result<String> {
        let mut bytes = Vec::new();
        let read = self.file.rewind().and_then(|()| (&mut self.file).take(most + 1).read_to_end(&mut bytes));
        read.map_err(|e| error(&self.path, reason(&e)))?;
        if bytes.len() as u64 > most {
            return Err(error(&self.path, format!("is longer than the {most} bytes of such a file")));
        }
        text(&self.path, bytes)
    }

    /// Replaces the note. It is on the disk when this returns.
    ///
    /// # Errors
    /// [`Error::File`] where it cannot be written.
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

/// Whether a file could be written to `path`, asked before the work whose result it is to hold.
///
/// # Errors
/// Those of [`NewFile::create`].
pub fn check_writable(path: &Path) -> Result<()> {
    NewFile::create(path).map(drop)
}

/// The file that `path` names in the end, which need not exist.
fn target(path: &Path) -> Result<PathBuf> {
    /// Links that systems follow at most.
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

/// What went wrong, without the number of the error.
fn reason(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        io::ErrorKind::IsADirectory => "is a folder, not a file".to_owned(),
        io::ErrorKind::StorageFull => "the disk is full".to_owned(),
        _ => e.to_string(),
    }
}

fn error(path: &Path, why: impl Into<String>) -> Error {
    Error::File { path: path.to_owned(), why: why.into() }
}

#[cfg(test)]
mod tests;
