//! A local test hub: its API, its files, and a second server that large files are redirected to.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use serde_json::json;
use sha2::{Digest, Sha256};

/// The commit that every revision of the repository points to.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Whether it reached the second server.
    pub(crate) cdn: bool,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) token: Option<String>,
    /// Position of the first requested byte.
    pub(crate) from: Option<usize>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Number of bytes sent before the connection is cut, although the full length was announced.
    pub(crate) cut: Option<usize>,
    /// Whether the connection stays open after the cut without sending anything.
    pub(crate) stall: bool,
    /// Whether the body repeats forever, without an announced length.
    pub(crate) endless: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    /// Replaces the value of a header.
    pub(crate) fn replace(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self.header(name, value)
    }

    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }
}

/// Changes the reply to some requests.
type Fault = Box<dyn Fn(&Request, Reply) -> Reply + Send + Sync>;

struct State {
    repo: String,
    files: BTreeMap<String, Vec<u8>>,
    cdn: String,
    fault: Fault,
    requests: Mutex<Vec<Request>>,
}

/// A hub with one repository. It runs until the process ends.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    state: Arc<State>,
}

impl Server {
    pub(crate) fn new(repo: &str, files: &[(&str, &[u8])]) -> Self {
        Self::with_faults(repo, files, |_, reply| reply)
    }

    pub(crate) fn with_faults(
        repo: &str,
        files: &[(&str, &[u8])],
        fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let address = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
        let (hub, cdn) = (listen(), listen());
        let endpoint = address(&hub);
        let state = Arc::new(State {
            repo: repo.to_owned(),
            files: files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect(),
            cdn: address(&cdn),
            fault: Box::new(fault),
            requests: Mutex::default(),
        });
        for (listener, is_cdn) in [(hub, false), (cdn, true)] {
            let state = Arc::clone(&state);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = Arc::clone(&state);
                    // Some tests disconnect in the middle of a reply.
                    thread::spawn(move || _ = state.serve(stream, is_cdn));
                }
            });
        }
        Self { endpoint, state }
    }

    /// Takes the requests received since the last call.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.requests.lock().unwrap())
    }
}

/// Returns the SHA-256 of bytes, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the hub stores this file in Git LFS.
fn is_large(name: &str) -> bool {
    name.ends_with(".safetensors") || name.ends_with(".gguf") || name.ends_with(".bin")
}

impl State {
    fn serve(&self, stream: TcpStream, cdn: bool) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let mut words = first.split(' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        let mut request = Request { cdn, method: word(), path: word(), token: None, from: None };
        for line in lines {
            let line = line?;
            match line.split_once(": ").map(|(name, value)| (name.to_ascii_lowercase(), value)) {
                Some((name, value)) if name == "authorization" => request.token = Some(value.to_owned()),
                Some((name, value)) if name == "range" => {
                    let from = value.strip_prefix("bytes=").and_then(|value| value.strip_suffix('-'));
                    request.from = Some(from.unwrap().parse().unwrap());
                }
                _ if line.is_empty() => break,
                _ => {}
            }
        }
        self.requests.lock().unwrap().push(request.clone());
        let reply = (self.fault)(&request, self.answer(&request));
        send(stream, &request, &reply)
    }

    fn answer(&self, request: &Request) -> Reply {
        if request.cdn {
            return match self.files.get(request.path.trim_start_matches('/')) {
                Some(bytes) => part(bytes, request.from),
                None => Reply::status(404),
            };
        }
        if request.path.starts_with("/api/models?author=") {
            return Reply::status(200).body(json!([{ "id": self.repo }, { "id": "other/one" }]).to_string());
        }
        if request.path.starts_with(&format!("/api/models/{}/revision/", self.repo)) {
            let siblings: Vec<_> = self.files.keys().map(|name| json!({ "rfilename": name })).collect();
            return Reply::status(200).body(json!({ "sha": COMMIT, "siblings": siblings }).to_string());
        }
        // Some files have a second address.
        let path = request.path.strip_prefix("/elsewhere").unwrap_or(&request.path);
        let name = path.strip_prefix(&format!("/{}/resolve/{COMMIT}/", self.repo));
        match name.and_then(|name| Some((name, self.files.get(name)?))) {
            Some((name, bytes)) if is_large(name) => Reply::status(302)
                .header("X-Repo-Commit", COMMIT)
                .header("X-Linked-Etag", format!("\"{}\"", sha256(bytes)))
                .header("X-Linked-Size", bytes.len())
                .header("Location", format!("{}/{name}", self.cdn)),
            Some((_, bytes)) => part(bytes, request.from)
                .header("X-Repo-Commit", COMMIT)
                // As long as a Git hash, and different for different bytes.
                .header("ETag", format!("W/\"{}\"", &sha256(bytes)[..40])),
            None if request.path.starts_with("/api/") => {
                Reply::status(401).header("X-Error-Code", "RepoNotFound")
            }
            None => Reply::status(404).header("X-Error-Code", "EntryNotFound"),
        }
    }
}

/// Replies with a file, starting at byte `from`.
fn part(bytes: &[u8], from: Option<usize>) -> Reply {
    match from {
        None => Reply::status(200).body(bytes),
        Some(from) if from < bytes.len() => {
            let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
            Reply::status(206).header("Content-Range", range).body(&bytes[from..])
        }
        Some(_) => Reply::status(416),
    }
}

fn send(mut stream: TcpStream, request: &Request, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Said\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let said = reply.headers.iter().any(|(name, _)| *name == "Content-Length");
    if !said && !reply.endless {
        head.push_str(&format!("Content-Length: {}\r\n", reply.body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    loop {
        stream.write_all(&reply.body[..reply.cut.unwrap_or(reply.body.len()).min(reply.body.len())])?;
        if reply.stall {
            thread::sleep(Duration::from_secs(60));
        }
        if !reply.endless {
            return Ok(());
        }
    }
}
