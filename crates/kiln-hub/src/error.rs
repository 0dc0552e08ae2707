//! What can go wrong, in one sentence each.

use std::{
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use thiserror::Error as ThisError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be had from the hub or its cache.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The text is no name of a model on the hub.
    #[error("`{spec}` {why}")]
    Spec { spec: String, why: String },
    /// An environment variable cannot be used.
    #[error("{name} {why}")]
    Setting { name: &'static str, why: String },
    /// There is no such repository, or it is private.
    #[error("{host} has no model {repo}{near}; if it is private, set HF_TOKEN to a token that may read it")]
    NoRepository { host: String, repo: String, near: String },
    /// The repository has no such branch, tag or commit.
    #[error("{repo} has no revision `{revision}`; name a branch, a tag or a commit")]
    NoRevision { repo: String, revision: String },
    /// The repository has nothing that was asked for.
    #[error("{repo} {why}")]
    Choice { repo: String, why: String },
    /// The licence of the model has to be accepted first.
    #[error("{repo} is gated: accept its licence at {url}, and set HF_TOKEN to a token of that account")]
    Gated { repo: String, url: String },
    /// The token is wrong.
    #[error("{host} does not accept the token; set HF_TOKEN to one of {host}/settings/tokens, or unset it")]
    Token { host: String },
    /// There is no connection.
    #[error("{host} cannot be reached: {why}; only what is in the cache already can be used")]
    Unreachable { host: String, why: String },
    /// The server is too busy, or broken for the moment.
    #[error("{host} answers {status}; try again later")]
    Busy { host: String, status: u16 },
    /// An answer makes no sense.
    #[error("the answer of {host} for {what} {why}")]
    Answer { host: String, what: String, why: String },
    /// A file would have to be downloaded, and may not be.
    #[error(
        "`{file}` of {repo} is not in the cache {cache}, and HF_HUB_OFFLINE is set; unset it to download it"
    )]
    Offline { repo: String, file: String, cache: String },
    /// The model would have to be downloaded, and may not be.
    #[error("{spec} is not in the cache {cache}, and HF_HUB_OFFLINE is set; unset it to download the model")]
    OfflineModel { spec: String, cache: String },
    /// The connection was cut too often.
    #[error("{file} was cut at {read} of {size} bytes: {why}; run the command again to go on from there")]
    Cut { file: String, read: u64, size: u64, why: String },
    /// What arrived is not what the hub has.
    #[error("{file} does not have the SHA-256 that the hub gives, and was removed; run the command again")]
    Checksum { file: String },
    /// There is no room for a file.
    #[error("the disk of {} is full; use `kiln remove`, or set HF_HOME to another disk", .path.display())]
    DiskFull { path: PathBuf },
    /// A file of the cache cannot be read or written.
    #[error("{}: {why}", .path.display())]
    File { path: PathBuf, why: String },
    /// The cache has no such model.
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
    fn a_full_disk_has_a_sentence_of_its_own() {
        let message = |kind: ErrorKind| Error::file(Path::new("/cache/x"), &kind.into()).to_string();
        let full = "the disk of /cache/x is full; use `kiln remove`, or set HF_HOME to another disk";
        assert_eq!(message(ErrorKind::StorageFull), full);
        assert_eq!(message(ErrorKind::QuotaExceeded), full);
        assert_eq!(message(ErrorKind::PermissionDenied), "/cache/x: permission denied");
    }
}
