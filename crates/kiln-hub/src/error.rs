//! Errors, each displayed as one sentence.

use std::{
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use thiserror::Error as ThisError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a model cannot be obtained from the hub or its cache.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The text is not the name of a model on the hub.
    #[error("`{spec}` {why}")]
    Spec { spec: String, why: String },
    /// An environment variable has an invalid value.
    #[error("{name} {why}")]
    Setting { name: &'static str, why: String },
    /// The repository does not exist, or it is private.
    #[error("{host} has no model {repo}{near}; if it is private, set HF_TOKEN to a token that may read it")]
    NoRepository { host: String, repo: String, near: String },
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision `{revision}`; name a branch, a tag or a commit")]
    NoRevision { repo: String, revision: String },
    /// The repository has no file that matches the request, or too many.
    #[error("{repo} {why}")]
    Choice { repo: String, why: String },
    /// The licence of the model must be accepted first.
    #[error("{repo} is gated: accept its licence at {url}, and set HF_TOKEN to a token of that account")]
    Gated { repo: String, url: String },
    /// The token was rejected.
    #[error("{host} does not accept the token; set HF_TOKEN to one of {host}/settings/tokens, or unset it")]
    Token { host: String },
    /// The server cannot be reached.
    #[error("{host} cannot be reached: {why}; only what is in the cache already can be used")]
    Unreachable { host: String, why: String },
    /// The server is overloaded or temporarily broken.
    #[error("{host} answers {status}; try again later")]
    Busy { host: String, status: u16 },
    /// A response is malformed.
    #[error("the answer of {host} for {what} {why}")]
    Answer { host: String, what: String, why: String },
    /// A file must be downloaded, but offline mode forbids it.
    #[error(
        "`{file}` of {repo} is not in the cache {cache}, and HF_HUB_OFFLINE is set; unset it to download it"
    )]
    Offline { repo: String, file: String, cache: String },
    /// The model must be downloaded, but offline mode forbids it.
    #[error("{spec} is not in the cache {cache}, and HF_HUB_OFFLINE is set; unset it to download the model")]
    OfflineModel { spec: String, cache: String },
    /// The connection was cut too often.
    #[error("{file} was cut at {read} of {size} bytes: {why}; run the command again to go on from there")]
    Cut { file: String, read: u64, size: u64, why: String },
    /// The received content does not match the hub's hash.
    #[error("{file} does not have the SHA-256 that the hub gives, and was removed; run the command again")]
    Checksum { file: String },
    /// The disk is full.
    #[error("the disk of {} is full; use `kiln remove`, or set HF_HOME to another disk", .path.display())]
    DiskFull { path: PathBuf },
    /// A file of the cache cannot be read or written.
    #[error("{}: {why}", .path.display())]
    File { path: PathBuf, why: String },
    /// The model is not in the cache.
    #[error("{spec} is not in the cache {cache}; `kiln list` shows what is")]
    NotStored { spec: String, cache: String },
}

impl Error {
    pub(crate) fn file(path: &Path, error: &io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::DiskFull { path },
            ErrorKind::NotFound => Self::File { path, why: "there is no such file".to_owned() },
            ErrorKind::ReadOnlyFilesystem => {
                Self::File { path, why: "the file system is read-only".to_owned() }
            }
            ErrorKind::PermissionDenied => Self::File { path, why: "permission denied".to_owned() },
            _ => Self::File { path, why: error.to_string() },
        }
    }

    /// Whether the same request may succeed a moment later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Busy { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_has_its_own_error_message() {
        let message = |kind: ErrorKind| Error::file(Path::new("/cache/x"), &kind.into()).to_string();
        let full = "the disk of /cache/x is full; use `kiln remove`, or set HF_HOME to another disk";
        assert_eq!(message(ErrorKind::StorageFull), full);
        assert_eq!(message(ErrorKind::QuotaExceeded), full);
        assert_eq!(message(ErrorKind::PermissionDenied), "/cache/x: permission denied");
    }
}
