//! Fetching models from local test hubs: a correct one, one with broken connections, and a malicious one.
#![allow(clippy::disallowed_methods, reason = "tests write files of their own")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use kiln_hub::{Error, Hub, Spec};
use tempfile::TempDir;

mod broken;
mod hostile;
mod server;
mod stored;

use server::{COMMIT, Server, sha256};

/// A repository with the files that a model folder needs and others that it does not need.
const FOLDER: [(&str, &[u8]); 8] = [
    ("README.md", b"# a model"),
    ("config.json", b"{}"),
    ("generation_config.json", b"{\"top_k\": 1}"),
    ("model.safetensors", b"weights of a model"),
    ("onnx/config.json", b"{}"),
    ("pytorch_model.bin", b"a pickle"),
    ("tokenizer.json", b"{\"model\": {}}"),
    ("additional_chat_templates/rag.jinja", b"{{ rag }}"),
];

const GGUF: [(&str, &[u8]); 4] = [
    ("m-Q4_K_M.gguf", b"four bits"),
    ("m-Q8_0-00001-of-00002.gguf", b"eight "),
    ("m-Q8_0-00002-of-00002.gguf", b"bits"),
    ("mmproj-F16.gguf", b"an eye"),
];

/// A cache, and the folder around it, into which nothing may be written.
struct Cache {
    around: TempDir,
}

impl Cache {
    fn new() -> Self {
        let around = tempfile::tempdir().unwrap();
        fs::create_dir(around.path().join("cache")).unwrap();
        Self { around }
    }

    fn path(&self) -> PathBuf {
        self.around.path().join("cache")
    }

    fn hub(&self, server: &Server) -> Hub {
        self.hub_at(&server.endpoint)
    }

    fn hub_at(&self, endpoint: &str) -> Hub {
        Hub::new(endpoint, self.path()).unwrap().pause(Duration::from_millis(1))
    }

    /// Returns the path of the blob with these bytes, named like the blob of a large file.
    fn blob(&self, bytes: &[u8]) -> PathBuf {
        self.path().join("models--org--name/blobs").join(sha256(bytes))
    }

    /// Checks that the cache is the only entry in the folder around it.
    #[track_caller]
    fn check_around(&self) {
        let names: Vec<_> =
            fs::read_dir(self.around.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["cache"], "written outside of the cache");
    }
}

fn spec(text: &str) -> Spec {
    text.parse().unwrap()
}

fn fetch(hub: &Hub, text: &str) -> Result<PathBuf, Error> {
    hub.fetch(&spec(text), |_| {})
}

#[track_caller]
fn refused(hub: &Hub, text: &str, expected: &str) {
    let message = fetch(hub, text).unwrap_err().to_string();
    assert!(message.contains(expected), "{message}");
}

fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

#[test]
fn only_needed_files_of_a_folder_are_fetched_and_only_once() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &FOLDER));
    let hub = cache.hub(&server);
    let mut seen = Vec::new();
    let folder = hub.fetch(&spec("org/name"), |progress| seen.push((progress.read, progress.total))).unwrap();
    assert_eq!(folder, cache.path().join("models--org--name/snapshots").join(COMMIT));
    let texts = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"];
    assert_eq!(names(&folder), [&["additional_chat_templates"], &texts[..]].concat());
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"weights of a model");
    assert_eq!(fs::read(folder.join("additional_chat_templates/rag.jinja")).unwrap(), b"{{ rag }}");
    assert_eq!(seen.last(), Some(&(18, 18)), "the weights come last");
    // The cache has the layout of `huggingface_hub`.
    assert_eq!(fs::read(cache.blob(b"weights of a model")).unwrap(), b"weights of a model");
    assert_eq!(fs::read_to_string(cache.path().join("models--org--name/refs/main")).unwrap(), COMMIT);
    #[cfg(unix)]
    {
        let link = fs::read_link(folder.join("additional_chat_templates/rag.jinja")).unwrap();
        assert!(link.starts_with("../../../blobs"), "{link:?}");
        assert!(fs::read_link(folder.join("config.json")).unwrap().starts_with("../../blobs"));
    }
    let requests = server.requests();
    assert!(!requests.iter().any(|request| request.path.contains(".bin") || request.path.contains("onnx")));

    assert_eq!(fetch(&hub, "org/name").unwrap(), folder);
    let again: Vec<String> = server.requests().into_iter().map(|request| request.path).collect();
    assert_eq!(again, ["/api/models/org/name/revision/main"], "the files are there");
    // A commit cannot change.
    assert_eq!(fetch(&hub, &format!("org/name@{COMMIT}")).unwrap(), folder);
    assert_eq!(fetch(&hub.clone().offline(true), "org/name").unwrap(), folder);
    assert_eq!(server.requests().len(), 0);
    cache.check_around();
}

#[test]
fn the_token_is_sent_only_to_the_hub() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &FOLDER));
    fetch(&cache.hub(&server).token("hf_secret").unwrap(), "org/name").unwrap();
    let (cdn, hub): (Vec<_>, Vec<_>) = server.requests().into_iter().partition(|request| request.cdn);
    assert!(!cdn.is_empty() && cdn.iter().all(|request| request.token.is_none()), "{cdn:?}");
    assert!(hub.iter().all(|request| request.token.as_deref() == Some("Bearer hf_secret")), "{hub:?}");
}

#[test]
fn a_quant_or_a_file_fetches_one_gguf_file_with_all_its_parts() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &GGUF));
    let hub = cache.hub(&server);
    let read = |text: &str| fs::read(fetch(&hub, text).unwrap()).unwrap();
    assert_eq!(read("org/name"), b"four bits", "the usual one");
    let split = fetch(&hub, "org/name:q8_0").unwrap();
    assert!(split.ends_with("m-Q8_0-00001-of-00002.gguf"), "{split:?}");
    assert_eq!(fs::read(split.with_file_name("m-Q8_0-00002-of-00002.gguf")).unwrap(), b"bits");
    assert_eq!(read("org/name:mmproj-F16.gguf@main"), b"an eye");
    refused(&hub, "org/name:Q4_K", "org/name has no GGUF file of `Q4_K`; it has Q4_K_M, Q8_0");
    refused(&hub, "org/name:m-Q4_K_S.gguf", "the nearest is `m-Q4_K_M.gguf`");
}

#[test]
fn only_weights_that_an_index_names_are_fetched() {
    let index = br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("m-1.safetensors", b"one"),
        ("m-2.safetensors", b"two"),
        ("m-3.safetensors", b"of another model"),
        ("model.safetensors.index.json", index),
    ];
    let (cache, server) = (Cache::new(), Server::new("org/name", &files));
    let folder = fetch(&cache.hub(&server), "org/name").unwrap();
    let expected = ["config.json", "m-1.safetensors", "m-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(&folder), expected);

    // Offline, the error names the missing file.
    fs::remove_file(folder.join("m-2.safetensors")).unwrap();
    let offline = cache.hub(&server).offline(true);
    refused(&offline, "org/name", "`m-2.safetensors` of org/name is not in the cache");
    refused(&offline, "org/name@v2", "org/name@v2 is not in the cache");
    refused(&offline, "org/name:Q8_0", "org/name:Q8_0 is not in the cache");
    refused(&offline, "org/other", "org/other is not in the cache");
    // The blob of the removed link is still in the cache.
    server.requests();
    fetch(&cache.hub(&server), "org/name").unwrap();
    assert!(server.requests().iter().all(|request| !request.cdn), "nothing is downloaded again");

    let cache = Cache::new();
    let server = Server::new("org/name", &files[..2].iter().chain(&files[3..]).copied().collect::<Vec<_>>());
    refused(
        &cache.hub(&server),
        "org/name",
        "has no file `m-2.safetensors`, which model.safetensors.index.json names",
    );
}

#[test]
fn a_listing_of_another_commit_is_an_error() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &FOLDER));
    let hub = cache.hub(&server);
    let other = "fedcba9876543210fedcba9876543210fedcba98";
    refused(&hub, &format!("org/name@{other}"), &format!("is of commit {COMMIT}, and {other} was asked for"));
    fetch(&hub, &format!("org/name@{}", COMMIT.to_uppercase())).unwrap();
}

#[test]
fn empty_repositories_and_files_are_errors() {
    let empty: [&[(&str, &[u8])]; 5] = [
        &[],
        &[("README.md", b"")],
        &[("m.gguf", b"")],
        &[("config.json", b"{}"), ("model.safetensors", b"")],
        &[("config.json", b""), ("model.safetensors", b"x")],
    ];
    for files in empty {
        let (cache, server) = (Cache::new(), Server::new("org/name", files));
        let message = fetch(&cache.hub(&server), "org/name").unwrap_err().to_string();
        let is_needed = files.iter().any(|(name, _)| *name != "README.md");
        let expected = if is_needed { "has an empty file `" } else { "which is what Kiln reads" };
        assert!(message.starts_with("org/name has ") && message.contains(expected), "{message}");
    }
}

#[test]
fn a_complete_model_is_used_without_a_connection() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &FOLDER));
    let folder = fetch(&cache.hub(&server), "org/name").unwrap();
    // Nobody listens on this port.
    let nobody = cache.hub_at("http://127.0.0.1:1");
    assert_eq!(fetch(&nobody, "org/name").unwrap(), folder);
    refused(&nobody, "org/other", "127.0.0.1 cannot be reached");
    refused(&cache.hub_at("http://nobody.invalid"), "org/other", "nobody.invalid cannot be reached");
}

#[test]
fn revisions_may_have_slashes() {
    let (cache, server) = (Cache::new(), Server::new("org/name", &FOLDER));
    fetch(&cache.hub(&server), "org/name@refs/pr/1").unwrap();
    assert_eq!(server.requests()[0].path, "/api/models/org/name/revision/refs%2Fpr%2F1");
    fetch(&cache.hub(&server).offline(true), "org/name@refs/pr/1").unwrap();
}
