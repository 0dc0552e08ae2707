//! Requests to the hub and validation of its responses.
//!
//! Redirects are followed here rather than by ureq: each target is checked before the token is sent to it.

use std::{
    fs::File,
    io::{self, Read},
    time::Duration,
};

use serde_json::Value;
use ureq::{
    Agent, Body,
    http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header},
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
};

use crate::{Error, Hub, Result, Spec, names};

/// Maximum number of redirects per request; stops redirect loops.
const MOST_REDIRECTS: usize = 10;

/// Size limit in bytes of a JSON response.
const LONGEST_JSON: u64 = 32 << 20;

/// Size limit in bytes of a certificate file.
const LONGEST_CERTIFICATES: u64 = 16 << 20;

/// Size limit in bytes of a file: twenty times what the hub accepts. A larger size must be wrong.
const LARGEST_FILE: u64 = 1 << 40;

/// How long a server may stay silent.
const SILENCE: Duration = Duration::from_secs(30);

/// How long a JSON response may take.
const JSON_TIME: Duration = Duration::from_secs(120);

/// A connection to a hub.
#[derive(Debug)]
pub(crate) struct Client<'a> {
    hub: &'a Hub,
    agent: Agent,
}

/// The files of a repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<String>,
}

/// The hub's metadata of a file, requested before it is downloaded.
#[derive(Debug)]
pub(crate) struct FileFacts {
    /// Name of the blob. For a large file it is the SHA-256, in hexadecimal digits.
    pub(crate) etag: String,
    pub(crate) size: u64,
}

impl<'a> Client<'a> {
    /// Creates a client for `hub`.
    ///
    /// # Errors
    /// [`Error::Setting`] for certificates that cannot be read.
    pub(crate) fn new(hub: &'a Hub) -> Result<Self> {
        let mut tls = TlsConfig::builder();
        if let Some(path) = &hub.certificates {
            let mut pem = Vec::new();
            let read =
                File::open(path).and_then(|file| file.take(LONGEST_CERTIFICATES).read_to_end(&mut pem));
            read.map_err(|e| {
                let why = format!("names {}, which cannot be read: {e}", path.display());
                Error::Setting { name: "SSL_CERT_FILE", why }
            })?;
            let certificate = |item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            };
            let certificates: Vec<Certificate<'static>> = parse_pem(&pem).filter_map(certificate).collect();
            if certificates.is_empty() {
                let why = format!("names {}, which holds no certificates in PEM", path.display());
                return Err(Error::Setting { name: "SSL_CERT_FILE", why });
            }
            tls = tls.root_certs(RootCerts::new_with_certs(&certificates));
        }
        let config = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_resolve(Some(SILENCE))
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .timeout_per_write(Some(SILENCE))
            .tls_config(tls.build());
        Ok(Self { hub, agent: config.build().new_agent() })
    }

    /// Returns the commit that a revision points to, and its files.
    pub(crate) fn listing(&self, spec: &Spec) -> Result<Listing> {
        let (repo, revision) = (spec.repo(), spec.revision_or_main());
        let url = format!("{}/api/models/{repo}/revision/{}", self.hub.endpoint, names::encode(revision));
        let response = self.send(&Method::GET, &url, None, false)?;
        let response = self.accepted(response, spec, None)?;
        let what = format!("the files of {repo}");
        let json = self.json(response, &what)?;
        let commit = json.get("sha").and_then(Value::as_str).filter(|commit| names::is_commit(commit));
        let commit = commit.ok_or_else(|| self.nonsense(&what, "names no commit"))?.to_ascii_lowercase();
        if names::is_commit(revision) && !revision.eq_ignore_ascii_case(&commit) {
            return Err(self.nonsense(&what, &format!("is of commit {commit}, and {revision} was asked for")));
        }
        let siblings = json.get("siblings").and_then(Value::as_array);
        let siblings = siblings.ok_or_else(|| self.nonsense(&what, "has no list of files"))?;
        let name = |sibling: &Value| sibling.get("rfilename").and_then(Value::as_str).map(str::to_owned);
        Ok(Listing { commit, files: siblings.iter().filter_map(name).collect() })
    }

    /// Returns the name of a file's blob, and its size.
    pub(crate) fn facts(&self, spec: &Spec, commit: &str, file: &str) -> Result<FileFacts> {
        let url = self.file_url(spec.repo(), commit, file);
        let response = self.send(&Method::HEAD, &url, None, true)?;
        let response = self.accepted(response, spec, Some(file))?;
        let headers = response.headers();
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
        let etag = text("x-linked-etag").or_else(|| text("etag")).unwrap_or_default();
        let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
        // The ETag becomes a file name.
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if !(1..=128).contains(&etag.len()) || !etag.bytes().all(plain) {
            return Err(
                self.nonsense(file, &format!("has the ETag `{etag}`, which no blob can be named after"))
            );
        }
        let size = text("x-linked-size").or_else(|| text("content-length")).unwrap_or_default();
        match size.parse::<u64>() {
            Ok(bytes) if bytes <= LARGEST_FILE => Ok(FileFacts { etag: etag.to_owned(), size: bytes }),
            _ => Err(self.nonsense(file, &format!("says that it has `{size}` bytes, which no file has"))),
        }
    }

    /// Requests the bytes of a file, starting at `from`.
    pub(crate) fn bytes(&self, spec: &Spec, commit: &str, file: &str, from: u64) -> Result<Response<Body>> {
        let url = self.file_url(spec.repo(), commit, file);
        let response = self.send(&Method::GET, &url, (from > 0).then_some(from), false)?;
        match response.status() {
            // There is nothing left to resume from.
            StatusCode::RANGE_NOT_SATISFIABLE => Ok(response),
            _ => self.accepted(response, spec, Some(file)),
        }
    }

    fn file_url(&self, repo: &str, commit: &str, file: &str) -> String {
        let file: Vec<String> = file.split('/').map(names::encode).collect();
        format!("{}/{repo}/resolve/{commit}/{}", self.hub.endpoint, file.join("/"))
    }

    /// Sends a request and follows redirects. With `until_etag`, stops at the first response that describes
    /// the linked file.
    fn send(
        &self,
        method: &Method,
        url: &str,
        from: Option<u64>,
        until_etag: bool,
    ) -> Result<Response<Body>> {
        let nonsense = |why: &str| self.nonsense(url, why);
        let mut url: Uri = url.parse().map_err(|_| nonsense("has no address"))?;
        for _ in 0..=MOST_REDIRECTS {
            let mut request = Request::builder().method(method.clone()).uri(url.clone());
            if let Some(token) = self.hub.token.as_ref().filter(|_| self.is_hub(&url)) {
                request = request.header(header::AUTHORIZATION, token);
            }
            if let Some(from) = from {
                request = request.header(header::RANGE, format!("bytes={from}-"));
            }
            let request = request.body(()).map_err(|_| nonsense("has no address"))?;
            let response = self.agent.run(request).map_err(|e| self.unreachable(&url, &e))?;
            let says = |name| response.headers().contains_key(name);
            let done = until_etag && says("x-linked-etag") && says("x-linked-size");
            if !response.status().is_redirection() || done {
                return Ok(response);
            }
            url =
                next(&url, response.headers()).ok_or_else(|| nonsense("leads to an address that is none"))?;
        }
        Err(nonsense("leads from one address to the next, and never to the file"))
    }

    /// Whether a URL belongs to the hub itself. The token is sent to no other server.
    fn is_hub(&self, url: &Uri) -> bool {
        let hub = self.hub.endpoint.parse::<Uri>();
        hub.is_ok_and(|hub| origin(&hub).is_some() && origin(&hub) == origin(url))
    }

    /// Returns the response if its status is a success or a redirection, and an error otherwise.
    fn accepted(&self, response: Response<Body>, spec: &Spec, file: Option<&str>) -> Result<Response<Body>> {
        let status = response.status();
        if status.is_success() || status.is_redirection() {
            return Ok(response);
        }
        let (hub, repo) = (self.hub, spec.repo().to_owned());
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok());
        let what = file.map_or_else(|| format!("the files of {repo}"), str::to_owned);
        Err(match (code.unwrap_or_default(), status.as_u16()) {
            ("GatedRepo", _) | (_, 403) => Error::Gated { url: format!("{}/{repo}", hub.endpoint), repo },
            ("RevisionNotFound", _) => {
                Error::NoRevision { repo, revision: spec.revision_or_main().to_owned() }
            }
            ("EntryNotFound", _) if file.is_some() => {
                Error::Choice { repo, why: format!("has no file `{what}`") }
            }
            // The hub does not reveal what exists to anonymous users: it answers 401 for repositories that
            // are private or do not exist.
            (_, 401) if hub.token.is_some() && code != Some("RepoNotFound") => {
                Error::Token { host: hub.endpoint.clone() }
            }
            ("RepoNotFound", _) | (_, 401) => self.no_repository(&repo),
            (_, 404) if file.is_some() => Error::Choice { repo, why: format!("has no file `{what}`") },
            (_, 404) => self.no_repository(&repo),
            (_, status @ (408 | 429 | 500..)) => Error::Busy { host: hub.host(), status },
            (_, status) => self.nonsense(&what, &format!("is an error ({status})")),
        })
    }

    /// Returns the error for a missing repository, with the most similar name of the same organization.
    fn no_repository(&self, repo: &str) -> Error {
        let near = || {
            let org = repo.split('/').next()?;
            let url = format!("{}/api/models?author={}&limit=1000", self.hub.endpoint, names::encode(org));
            let response = self.send(&Method::GET, &url, None, false).ok()?;
            let json =
                if response.status().is_success() { self.json(response, org).ok()? } else { return None };
            let models = json.as_array()?.iter().filter_map(|model| model.get("id")?.as_str());
            names::nearest(repo, models).map(|near| format!("; the nearest is {near}"))
        };
        Error::NoRepository { host: self.hub.host(), repo: repo.to_owned(), near: near().unwrap_or_default() }
    }

    /// Reads a JSON response in bounded time and memory.
    fn json(&self, response: Response<Body>, what: &str) -> Result<Value> {
        let begun = std::time::Instant::now();
        let mut reader = response.into_body().into_with_config().limit(u64::MAX).reader();
        let (mut json, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let read = reader.read(&mut buffer).map_err(|e| self.cut(&e))?;
            json.extend_from_slice(buffer.get(..read).unwrap_or_default());
            if read == 0 {
                break;
            }
            if json.len() as u64 > LONGEST_JSON || begun.elapsed() > JSON_TIME {
                return Err(self.nonsense(what, "does not end"));
            }
        }
        serde_json::from_slice(&json).map_err(|e| self.nonsense(what, &format!("is not JSON: {e}")))
    }

    pub(crate) fn nonsense(&self, what: &str, why: &str) -> Error {
        Error::Answer { host: self.hub.host(), what: what.to_owned(), why: why.to_owned() }
    }

    pub(crate) fn cut(&self, error: &io::Error) -> Error {
        Error::Unreachable { host: self.hub.host(), why: reason(error) }
    }

    fn unreachable(&self, url: &Uri, error: &ureq::Error) -> Error {
        let host = url.host().map_or_else(|| self.hub.host(), str::to_owned);
        let why = match error {
            ureq::Error::HostNotFound => "its name is not known; check the network connection".to_owned(),
            ureq::Error::ConnectionFailed => "it does not accept connections".to_owned(),
            ureq::Error::Timeout(_) => "it does not answer".to_owned(),
            ureq::Error::Io(e) => reason(e),
            ureq::Error::Rustls(e) => {
                format!("its certificate is not accepted ({e}); SSL_CERT_FILE names other certificates")
            }
            e @ ureq::Error::Protocol(_) => format!("it does not speak HTTP ({e})"),
            e => e.to_string(),
        };
        Error::Unreachable { host, why }
    }
}

/// Describes why a connection failed.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "the connection is refused".to_owned(),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => "nothing arrives any more".to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::UnexpectedEof => {
            "the connection was cut".to_owned()
        }
        // The standard library has no error kind for this.
        _ if error.to_string().contains("lookup address information") => {
            "its name is not known; check the network connection".to_owned()
        }
        _ => error.to_string(),
    }
}

/// Returns the URL that a redirect leads to (RFC 9110, section 10.2.2).
fn next(url: &Uri, headers: &HeaderMap) -> Option<Uri> {
    let location = headers.get(header::LOCATION)?.to_str().ok()?;
    let (scheme, authority) = (url.scheme_str()?, url.authority()?);
    let absolute = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
        _ => location.to_owned(),
    };
    // The fragment after `#` is for browsers.
    let absolute = absolute.split('#').next()?;
    let next: Uri = absolute.parse().ok()?;
    let encrypted = scheme == "https";
    match next.scheme_str()? {
        "https" => Some(next),
        "http" if !encrypted => Some(next),
        _ => None,
    }
}

/// Returns the scheme, host and port of a URL.
fn origin(url: &Uri) -> Option<(&str, String, u16)> {
    let scheme = url.scheme_str()?;
    let port = url.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, url.host()?.to_ascii_lowercase(), port))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn leads(from: &str, location: &str) -> Option<String> {
        let mut headers = HeaderMap::new();
        headers.insert(header::LOCATION, location.parse().unwrap());
        next(&from.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn redirects_resolve_to_addresses_that_are_not_less_secure() {
        let from = "https://hub:8/a/b?c";
        assert_eq!(leads(from, "/x?y#z").unwrap(), "https://hub:8/x?y");
        assert_eq!(leads(from, "//cdn/x").unwrap(), "https://cdn/x");
        assert_eq!(leads(from, "https://cdn/x").unwrap(), "https://cdn/x");
        assert_eq!(leads("http://hub/", "http://cdn/x").unwrap(), "http://cdn/x");
        for location in ["http://hub:8/x", "file:///etc/passwd", "x", "", "ftp://x/", "https://"] {
            assert_eq!(leads(from, location), None, "{location}");
        }
    }

    #[test]
    fn only_addresses_of_the_hub_get_the_token() {
        let hub = Hub::new("https://hub.example/path", "x").unwrap();
        let client = Client::new(&hub).unwrap();
        let is_hub = |url: &str| client.is_hub(&url.parse().unwrap());
        assert!(is_hub("https://hub.example/other") && is_hub("https://HUB.example:443/"));
        for url in [
            "http://hub.example/",
            "https://hub.example:444/",
            "https://hub.example.evil/",
            "https://hub.example@evil/",
            "https://cdn.hub.example/",
            "/path",
        ] {
            assert!(!is_hub(url), "{url}");
        }
    }
}
