//! Requests over HTTP: answers equal those of the model alone, and what is wrong is refused by name.

#![allow(clippy::unwrap_used, clippy::panic, clippy::disallowed_methods, reason = "a test")]

mod anthropic;
mod audio;
mod chat;
mod completions;
mod embeddings;
mod memory;
mod models;
mod ollama;
mod prefixes;
mod responses;
mod server;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use kiln::{DtypeChoice, Model, device::Opened};
use kiln_serve::{ServeOptions, ServedModel, Server};
use serde_json::{Value, json};

/// The demo model on each device to test.
static MODELS: LazyLock<Vec<Model>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let load = |(_, opened): &(String, Opened)| {
        Model::builder(&folder).opened(opened.clone()).dtype(DtypeChoice::F32).load().unwrap()
    };
    kiln_testkit::devices::opened().iter().map(load).collect()
});

/// The model of tests that do not compare devices.
static MODEL: LazyLock<Model> = LazyLock::new(|| MODELS[0].clone());

/// A server on a free port, which ends when dropped.
struct Running {
    address: SocketAddr,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn new(change: impl FnOnce(ServeOptions) -> ServeOptions) -> Self {
        Self::of(&MODEL, change)
    }

    fn of(model: &Model, change: impl FnOnce(ServeOptions) -> ServeOptions) -> Self {
        Self::offering(vec![ServedModel::loaded("demo", model.clone())], change)
    }

    fn offering(models: Vec<ServedModel>, change: impl FnOnce(ServeOptions) -> ServeOptions) -> Self {
        let options = change(ServeOptions { drain: Duration::from_secs(1), ..ServeOptions::default() });
        let server = Server::new(models, options, "127.0.0.1:0").unwrap();
        let (address, stops) = (server.address(), Arc::new(AtomicBool::new(false)));
        let stop = stops.clone();
        let thread = thread::spawn(move || server.run(|| stop.load(Ordering::Relaxed)).unwrap());
        Self { address, stops, thread: Some(thread) }
    }

    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(stream, "{head}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        stream
    }

    fn post_raw(&self, path: &str, body: &Value) -> TcpStream {
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json", self.address);
        self.send(&head, &body.to_string())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let Reply { status, body, .. } = reply(self.post_raw(path, body));
        (status, serde_json::from_str(&body).unwrap())
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let Reply { status, body, .. } =
            reply(self.send(&format!("GET {path} HTTP/1.1\r\nhost: {}", self.address), ""));
        (status, serde_json::from_str(&body).unwrap())
    }

    fn delete(&self, path: &str) -> (u16, Value) {
        let Reply { status, body, .. } =
            reply(self.send(&format!("DELETE {path} HTTP/1.1\r\nhost: {}", self.address), ""));
        (status, serde_json::from_str(&body).unwrap())
    }

    /// The data of the events of a stream, as JSON.
    fn json_events(&self, path: &str, body: &Value) -> Vec<Value> {
        self.events(path, body).iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
    }

    /// The data of the events of a stream.
    fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let Reply { status, headers, body } = reply(self.post_raw(path, body));
        assert!(status == 200 && headers.contains("content-type: text/event-stream"), "{status} {headers}");
        body.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Reply {
    status: u16,
    headers: String,
    body: String,
}

fn reply(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (headers, body) = text.split_once("\r\n\r\n").unwrap();
    let headers = headers.to_ascii_lowercase();
    let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
    let body = match headers.contains("transfer-encoding: chunked") {
        true => unchunked(body),
        false => body.to_owned(),
    };
    Reply { status, headers, body }
}

fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n").unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return text;
        }
        text.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
}

fn completion(prompt: &str, seed: u64, extra: &Value) -> Value {
    let mut body =
        json!({ "model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": seed });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The text of the model alone.
fn alone(prompt: &str, seed: u64) -> String {
    alone_of(&MODEL, prompt, seed)
}

fn alone_of(model: &Model, prompt: &str, seed: u64) -> String {
    model.generate(prompt).max_new_tokens(24).temperature(0.9).seed(seed).text().unwrap()
}
