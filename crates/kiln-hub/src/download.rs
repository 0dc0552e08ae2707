//! Download of one blob: resumed, verified, then renamed.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    thread,
};

use sha2::{Digest, Sha256};
use ureq::{
    Body,
    http::{Response, StatusCode, header},
};

use crate::{
    Error, Hub, Result, Spec,
    cache::{RepoCache, create_parent},
    client::{Client, FileFacts},
};

/// Consecutive attempts without progress before a download is given up, with pauses of 1, 2, 4 and 8 seconds
/// between them.
const TRIES: u32 = 5;

/// Bytes that an attempt must receive to count as progress. With a lower limit, a server could keep the
/// client busy with single bytes.
const PROGRESS: u64 = 1 << 20;

/// File extension of an incomplete blob, as in `huggingface_hub`.
const INCOMPLETE: &str = "incomplete";

/// Size in bytes of the read buffer.
const BUFFER: usize = 256 << 10;

/// A file of a repository at a commit, and the hub's metadata of it.
pub(crate) struct Wanted<'a> {
    pub(crate) spec: &'a Spec,
    pub(crate) commit: &'a str,
    pub(crate) file: &'a str,
    pub(crate) facts: &'a FileFacts,
}

impl Wanted<'_> {
    /// Returns the SHA-256 that the file must have. Small files have none: their ETag is a Git hash.
    fn sha256(&self) -> Option<&str> {
        let etag = self.facts.etag.as_str();
        (etag.len() == 64 && etag.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(etag)
    }
}

/// Downloads the blob of a file unless the cache has it. `on_read` is called with the number of bytes
/// received so far.
///
/// # Errors
/// [`Error::Cut`] after the connection was cut too often: the received bytes are kept, and the next run
/// resumes from them. [`Error::Checksum`] if the content does not match the hub's hash. [`Error::DiskFull`],
/// [`Error::File`].
pub(crate) fn blob(
    hub: &Hub,
    client: &Client<'_>,
    cache: &RepoCache,
    wanted: &Wanted<'_>,
    on_read: &mut dyn FnMut(u64),
) -> Result<()> {
    let size = wanted.facts.size;
    let path = cache.blob(&wanted.facts.etag);
    create_parent(&path)?;
    let lock = cache.lock(&wanted.facts.etag)?;
    if fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == size) {
        on_read(size);
        return Ok(());
    }
    // Without a lock, each process writes a file of its own, which no later process resumes.
    let extension =
        lock.as_ref().map_or_else(|| format!("{}.incomplete", std::process::id()), |_| INCOMPLETE.to_owned());
    let mut partial = Partial::open(path.with_added_extension(extension), size)?;
    on_read(partial.len);
    // The high-water mark, so that a server that starts over does not count as progress.
    let mut most = partial.len;
    let mut tries = 0;
    while partial.len < size {
        let response = client.bytes(wanted.spec, wanted.commit, wanted.file, partial.len);
        let received = response.and_then(|response| partial.receive(response, client, wanted.file, on_read));
        let why = match received {
            Ok(()) if partial.len == size => break,
            Ok(()) => "the connection was cut".to_owned(),
            Err(Error::Unreachable { why, .. }) => why,
            Err(error @ Error::Busy { .. }) => error.to_string(),
            Err(error) => return Err(error),
        };
        tries = if partial.len >= most.saturating_add(PROGRESS) { 1 } else { tries + 1 };
        most = most.max(partial.len);
        if tries == TRIES {
            let file = wanted.file.to_owned();
            return Err(Error::Cut { file, read: partial.len, size, why });
        }
        let (file, read) = (wanted.file, partial.len);
        tracing::debug!(target: "kiln::hub", file, read, why, "the download goes on after a pause");
        thread::sleep(hub.pause.saturating_mul(1 << (tries - 1)));
    }
    partial.finish(wanted, &path)
}

/// A partially downloaded blob.
struct Partial {
    path: PathBuf,
    file: File,
    hash: Sha256,
    /// Number of bytes written and hashed.
    len: u64,
    /// Size in bytes of the whole blob.
    size: u64,
}

impl Partial {
    fn open(path: PathBuf, size: u64) -> Result<Self> {
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(|e| Error::file(&path, &e))?;
        let mut partial = Self { path, file, hash: Sha256::new(), len: 0, size };
        let mut buffer = vec![0; BUFFER];
        loop {
            let read = partial.file.read(&mut buffer).map_err(|e| Error::file(&partial.path, &e))?;
            if read == 0 {
                break;
            }
            partial.hash.update(buffer.get(..read).unwrap_or_default());
            partial.len += read as u64;
            if partial.len > size {
                partial.clear()?;
                break;
            }
        }
        Ok(partial)
    }

    /// Discards the received bytes and starts over.
    fn clear(&mut self) -> Result<()> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        cleared.map_err(|e| Error::file(&self.path, &e))?;
        self.hash = Sha256::new();
        self.len = 0;
        Ok(())
    }

    /// Appends the body of a response. A body that ends early is not an error here.
    fn receive(
        &mut self,
        response: Response<Body>,
        client: &Client<'_>,
        file: &str,
        on_read: &mut dyn FnMut(u64),
    ) -> Result<()> {
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range =
                    response.headers().get(header::CONTENT_RANGE).and_then(|range| range.to_str().ok());
                let from =
                    range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok());
                if from != Some(self.len) {
                    return Err(client.nonsense(file, "is another part than the one that was asked for"));
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE => return self.clear(),
            StatusCode::OK => self.clear()?,
            status => return Err(client.nonsense(file, &format!("has the status {status}"))),
        }
        let mut body = response.into_body().into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; BUFFER];
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(e) => return Err(client.cut(&e)),
            };
            let bytes = buffer.get(..read).unwrap_or_default();
            if self.len.saturating_add(read as u64) > self.size {
                self.clear()?;
                return Err(client.nonsense(file, &format!("is longer than the {} bytes it said", self.size)));
            }
            self.file.write_all(bytes).map_err(|e| Error::file(&self.path, &e))?;
            self.hash.update(bytes);
            self.len += read as u64;
            on_read(self.len);
        }
    }

    /// Verifies the whole blob and renames it to its final name.
    fn finish(self, wanted: &Wanted<'_>, blob: &Path) -> Result<()> {
        let Self { path, file, hash, .. } = self;
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if wanted.sha256().is_some_and(|sha256| !sha256.eq_ignore_ascii_case(&hash)) {
            drop(file);
            fs::remove_file(&path).map_err(|e| Error::file(&path, &e))?;
            return Err(Error::Checksum { file: wanted.file.to_owned() });
        }
        file.sync_all().map_err(|e| Error::file(&path, &e))?;
        drop(file);
        fs::rename(&path, blob).map_err(|e| Error::file(blob, &e))
    }
}
