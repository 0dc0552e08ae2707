//! Addresses of the hub and its cache, from the environment variables of `huggingface_hub`.

use std::{
    env::{self, VarError},
    fmt,
    fs::File,
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use ureq::http::{HeaderValue, Uri};

use crate::{Error, Result};

/// Size limit in bytes of a token file.
const LONGEST_TOKEN: u64 = 4096;

/// Message for a text that cannot be a token.
const NO_TOKEN: &str = "holds characters that no token has; copy the token again, or remove it";

/// A hub, its local cache, and an access token.
///
/// | variable | meaning |
/// |---|---|
/// | `HF_ENDPOINT` | address of the hub: `https://huggingface.co` |
/// | `HF_HUB_CACHE` | folder of the cache: by default `hub` in `HF_HOME` |
/// | `HF_HOME` | folder of the cache and the token: by default `~/.cache/huggingface` |
/// | `HF_TOKEN` | token for private and gated models: by default that in `HF_TOKEN_PATH`, or `token` in `HF_HOME` |
/// | `HF_HUB_OFFLINE` | 1: use only the cache |
/// | `SSL_CERT_FILE` | certificates to trust, in PEM, instead of Mozilla's |
///
/// Source: `constants.py` of `huggingface_hub`.
#[derive(Clone)]
pub struct Hub {
    pub(crate) endpoint: String,
    pub(crate) cache: PathBuf,
    pub(crate) token: Option<HeaderValue>,
    pub(crate) offline: bool,
    pub(crate) certificates: Option<PathBuf>,
    /// Pause before the first retry; each later pause is twice as long.
    pub(crate) pause: Duration,
}

impl Hub {
    /// Creates a hub from the environment variables.
    ///
    /// # Errors
    /// [`Error::Setting`] for a variable with an invalid value; [`Error::File`] for a token that cannot be
    /// read.
    pub fn from_env() -> Result<Self> {
        let home = match path("HF_HOME")? {
            Some(home) => home,
            None => match (path("XDG_CACHE_HOME")?, env::home_dir()) {
                (Some(cache), _) => cache.join("huggingface"),
                (None, Some(home)) => home.join(".cache/huggingface"),
                (None, None) => {
                    let why =
                        "is not set, and there is no home folder; set it to a folder for models".to_owned();
                    return Err(Error::Setting { name: "HF_HOME", why });
                }
            },
        };
        let cache = path("HF_HUB_CACHE")?.unwrap_or_else(|| home.join("hub"));
        let endpoint = text("HF_ENDPOINT")?.unwrap_or_else(|| "https://huggingface.co".to_owned());
        let mut hub = Self::new(endpoint, cache)?;
        if let Some(token) = text("HF_TOKEN")? {
            hub = hub.token(&token)?;
        } else {
            let path = path("HF_TOKEN_PATH")?.unwrap_or_else(|| home.join("token"));
            if let Some(token) = read_token(&path)? {
                hub = hub.token(&token).map_err(|_| Error::File { path, why: NO_TOKEN.to_owned() })?;
            }
        }
        let offline = text("HF_HUB_OFFLINE")?.unwrap_or_default().to_ascii_lowercase();
        hub.offline = ["1", "on", "yes", "true"].contains(&offline.as_str());
        hub.certificates = path("SSL_CERT_FILE")?;
        Ok(hub)
    }

    /// Creates a hub with an address, such as `https://huggingface.co`, and a cache folder.
    ///
    /// # Errors
    /// [`Error::Setting`] for an invalid address.
    pub fn new(endpoint: impl Into<String>, cache: impl Into<PathBuf>) -> Result<Self> {
        let endpoint = endpoint.into().trim_end_matches('/').to_owned();
        let uri: Option<Uri> = endpoint.parse().ok();
        let known = uri.as_ref().is_some_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
        if !known || uri.is_none_or(|uri| uri.host().is_none_or(str::is_empty) || uri.query().is_some()) {
            let why = format!("is `{endpoint}`, which is no address; write it as https://huggingface.co");
            return Err(Error::Setting { name: "HF_ENDPOINT", why });
        }
        let pause = Duration::from_secs(1);
        Ok(Self { endpoint, cache: cache.into(), token: None, offline: false, certificates: None, pause })
    }

    /// Sets the token for private and gated models. It is sent only to this hub, never to a server that the
    /// hub redirects to.
    ///
    /// A program that logs everything should exclude the target `ureq_proto::util`, which logs every byte
    /// that is sent.
    ///
    /// # Errors
    /// [`Error::Setting`] for a text that cannot be a token.
    pub fn token(mut self, token: &str) -> Result<Self> {
        let visible = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        let header = HeaderValue::try_from(format!("Bearer {token}")).ok().filter(|_| visible);
        let mut header =
            header.ok_or_else(|| Error::Setting { name: "HF_TOKEN", why: NO_TOKEN.to_owned() })?;
        header.set_sensitive(true);
        self.token = Some(header);
        Ok(self)
    }

    /// Sets whether only the cache is used.
    #[must_use]
    pub fn offline(mut self, offline: bool) -> Self {
        self.offline = offline;
        self
    }

    /// Sets the pause before a download resumes for the first time after the connection was cut; one second
    /// by default. Each further pause is twice as long.
    #[must_use]
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }

    /// Returns the folder of the cache.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// Returns the hub's name for messages.
    pub(crate) fn host(&self) -> String {
        self.endpoint.split_once("://").map_or(self.endpoint.as_str(), |(_, host)| host).to_owned()
    }
}

impl fmt::Debug for Hub {
    /// Formats the hub without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// Reads an environment variable; `None` if it is unset or empty.
fn text(name: &'static str) -> Result<Option<String>> {
    match env::var(name) {
        Ok(text) => Ok(Some(text.trim().to_owned()).filter(|text| !text.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Error::Setting { name, why: "is not UTF-8 text".to_owned() }),
    }
}

fn path(name: &'static str) -> Result<Option<PathBuf>> {
    let Some(path) = env::var_os(name).filter(|path| !path.is_empty()) else { return Ok(None) };
    let path = PathBuf::from(path);
    let home = path.strip_prefix("~").ok().map(Path::to_owned);
    match (home, env::home_dir()) {
        (Some(rest), Some(home)) => Ok(Some(home.join(rest))),
        _ => std::path::absolute(&path).map(Some).map_err(|e| Error::file(&path, &e)),
    }
}

/// Reads the token from a file; `None` if the file does not exist.
fn read_token(path: &Path) -> Result<Option<String>> {
    let mut token = String::new();
    let read = File::open(path).and_then(|file| file.take(LONGEST_TOKEN).read_to_string(&mut token));
    match read {
        Ok(_) => Ok(Some(token.trim().to_owned()).filter(|token| !token.is_empty())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::file(path, &e)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_must_be_an_http_address() {
        assert_eq!(Hub::new("http://localhost:80/hf/", "x").unwrap().endpoint, "http://localhost:80/hf");
        for endpoint in
            ["", "huggingface.co", "ftp://x", "https://", "https://a b", "file:///etc", "https://x?y"]
        {
            assert!(Hub::new(endpoint, "x").is_err(), "{endpoint}");
        }
    }

    #[test]
    fn a_token_is_never_printed() {
        let hub = Hub::new("https://x", "y").unwrap().token("hf_secret").unwrap();
        assert!(!format!("{hub:?} {:?}", hub.token).contains("secret"));
        for token in ["", "a b", "a\nb: c", "é"] {
            assert!(hub.clone().token(token).is_err(), "{token}");
        }
    }
}
