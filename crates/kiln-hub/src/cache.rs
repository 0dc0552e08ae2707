//! The cache folder of one repository, in the layout of `huggingface_hub`:
//!
//! ```text
//! models--ORG--NAME/blobs/ETAG                 what a file holds; ETAG.incomplete while it is downloaded
//! models--ORG--NAME/snapshots/COMMIT/FILE      a link to a blob
//! models--ORG--NAME/refs/REVISION              the commit that a branch or tag was
//! .locks/models--ORG--NAME/ETAG.lock           locked by the process that downloads the blob
//! ```
//!
//! Source: "Understand caching" in the guides of `huggingface_hub`.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{Error, Result, names};

/// Deepest level of nested folders in a snapshot that is searched.
const DEEPEST: usize = 8;

/// The cache folder of a repository, whether it exists or not.
#[derive(Debug)]
pub(crate) struct RepoCache {
    cache: PathBuf,
    folder: String,
}

impl RepoCache {
    /// Creates the cache folder of `repo`: `ORG/NAME`, as in a [`Spec`](crate::Spec).
    pub(crate) fn new(cache: &Path, repo: &str) -> Self {
        Self { cache: cache.to_owned(), folder: format!("models--{}", repo.replace('/', "--")) }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.cache.join(&self.folder)
    }

    pub(crate) fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(&self.folder)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.root().join("blobs").join(etag)
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root().join("snapshots").join(commit)
    }

    pub(crate) fn refs(&self) -> PathBuf {
        self.root().join("refs")
    }

    /// Returns the commit that a revision pointed to when the hub was last asked.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if names::is_commit(revision) {
            return Some(revision.to_owned());
        }
        commit_in(&self.refs().join(revision))
    }

    /// Records the commit that a revision points to.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if names::is_commit(revision) || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        replace(&self.refs().join(revision), |new| fs::write(new, commit))
    }

    /// Returns the complete files of a snapshot, by their names in the repository.
    pub(crate) fn files(&self, commit: &str) -> Vec<String> {
        let mut files = Vec::new();
        walk(&self.snapshot(commit), "", DEEPEST, &mut |name, path| {
            if fs::metadata(path).is_ok_and(|metadata| metadata.is_file()) {
                files.push(name);
            }
        });
        files.sort();
        files
    }

    /// Links a blob into a snapshot under the name of a file.
    pub(crate) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<()> {
        let ups = "../".repeat(name.matches('/').count() + 2);
        let blob = self.blob(etag);
        replace(&self.snapshot(commit).join(name), |new| {
            // File systems without links get a copy.
            symlink(Path::new(&format!("{ups}blobs/{etag}")), new)
                .or_else(|_| fs::hard_link(&blob, new))
                .or_else(|_| fs::copy(&blob, new).map(drop))
        })
    }

    /// Waits until no other process writes this blob. The lock is released when the file is dropped or the
    /// process ends.
    ///
    /// Returns `None` if the file system has no locks, as some network file systems.
    pub(crate) fn lock(&self, etag: &str) -> Result<Option<File>> {
        let path = self.locks().join(format!("{etag}.lock"));
        create_parent(&path)?;
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|e| Error::file(&path, &e))?;
        let locked = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                let what = "another process downloads the same file; waiting for it";
                tracing::warn!(target: "kiln::hub", "{what}");
                file.lock().is_ok()
            }
            Err(TryLockError::Error(_)) => false,
        };
        Ok(locked.then_some(file))
    }
}

/// Reads the commit from a file of `refs`.
pub(crate) fn commit_in(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(64).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned()).filter(|text| names::is_commit(text))
}

/// Calls `found` for every entry below `folder` that is not a folder, with its path relative to `folder`.
/// Links are not followed.
pub(crate) fn walk(folder: &Path, prefix: &str, depth: usize, found: &mut dyn FnMut(String, &Path)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth > 0 => {
                walk(&entry.path(), &format!("{name}/"), depth - 1, found);
            }
            Ok(kind) if !kind.is_dir() => found(name, &entry.path()),
            _ => {}
        }
    }
}

/// Writes a file next to its final path and renames it, so that no reader sees a partial file and two writers
/// do not collide.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<()> {
    static MADE: AtomicU64 = AtomicU64::new(0);

    create_parent(path)?;
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let new = path.with_added_extension(format!("{}-{number}.new", std::process::id()));
    let made = make(&new).and_then(|()| fs::rename(&new, path));
    made.map_err(|e| {
        _ = fs::remove_file(&new);
        Error::file(path, &e)
    })
}

/// Creates the parent folder of a file.
pub(crate) fn create_parent(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    fs::create_dir_all(folder).map_err(|e| Error::file(folder, &e))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
