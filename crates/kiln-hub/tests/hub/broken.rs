//! Broken connections and error responses.

use std::{
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use super::{
    Cache, FOLDER, GGUF, fetch, refused,
    server::{Reply, Server},
};

/// Data larger than one read of the client, without repeated parts.
fn large() -> Vec<u8> {
    (0..900_000u32).flat_map(u32::to_le_bytes).collect()
}

const ONE: &str = "org/name:m.gguf";

#[test]
fn a_cut_download_is_resumed_where_it_stopped() {
    let bytes = large();
    let server = Server::with_faults("org/name", &[("m.gguf", &bytes)], |request, reply| match request.cdn {
        true => Reply { cut: Some(1_200_000), ..reply },
        false => reply,
    });
    let cache = Cache::new();
    let path = fetch(&cache.hub(&server), ONE).unwrap();
    assert!(fs::read(path).unwrap() == bytes);
    let from: Vec<_> = server.requests().into_iter().filter(|request| request.cdn).map(|r| r.from).collect();
    assert_eq!(from, [None, Some(1_200_000), Some(2_400_000)]);
    assert!(!cache.blob(&bytes).with_added_extension("incomplete").exists());
}

#[test]
fn an_abandoned_download_is_resumed_by_a_later_one() {
    let bytes = large();
    let server = Server::with_faults("org/name", &[("m.gguf", &bytes)], |request, reply| match request.cdn {
        true => Reply { cut: Some(100_000), ..reply },
        false => reply,
    });
    let cache = Cache::new();
    refused(&cache.hub(&server), ONE, "m.gguf was cut at 500000 of 3600000 bytes");
    assert_eq!(server.requests().iter().filter(|request| request.cdn).count(), 5);
    let partial = cache.blob(&bytes).with_added_extension("incomplete");
    assert_eq!(fs::metadata(&partial).unwrap().len(), 500_000);
    refused(&cache.hub(&server).offline(true), ONE, "is not in the cache");

    let server = Server::new("org/name", &[("m.gguf", &bytes)]);
    let path = fetch(&cache.hub(&server), ONE).unwrap();
    assert!(fs::read(path).unwrap() == bytes);
    let from: Vec<_> = server.requests().into_iter().filter(|request| request.cdn).map(|r| r.from).collect();
    assert_eq!(from, [Some(500_000)]);
}

#[test]
fn a_download_from_a_server_without_ranges_starts_over() {
    let bytes = large();
    let calls = AtomicUsize::new(0);
    let whole = bytes.clone();
    let server = Server::with_faults("org/name", &[("m.gguf", &bytes)], move |request, reply| {
        let cut = (request.cdn && calls.fetch_add(1, Ordering::Relaxed) == 0).then_some(5000);
        match request.cdn {
            true => Reply { cut, ..Reply::status(200).body(whole.clone()) },
            false => reply,
        }
    });
    let cache = Cache::new();
    assert!(fs::read(fetch(&cache.hub(&server), ONE).unwrap()).unwrap() == bytes);
    assert_eq!(server.requests().iter().filter(|request| request.cdn).count(), 2);
}

#[test]
fn downloads_without_progress_are_abandoned() {
    let bytes = large();
    let (calls, whole) = (AtomicUsize::new(0), bytes.clone());
    let server =
        Server::with_faults("org/name", &[("m.gguf", &bytes)], move |request, reply| match request.cdn {
            // The response is cut at alternating lengths and is never complete.
            true => {
                let cut = [1_200_000, 2_400_000][calls.fetch_add(1, Ordering::Relaxed) % 2];
                Reply { cut: Some(cut), ..Reply::status(200).body(whole.clone()) }
            }
            false => reply,
        });
    refused(&Cache::new().hub(&server), ONE, "of 3600000 bytes");
    // 1.2 and 2.4 million bytes count as progress; the four attempts after them do not.
    assert_eq!(server.requests().iter().filter(|request| request.cdn).count(), 6);
}

#[test]
fn wrong_partial_and_damaged_files_are_downloaded_again() {
    let (cache, bytes) = (Cache::new(), large());
    let server = Server::new("org/name", &[("m.gguf", &bytes)]);
    let partial = cache.blob(&bytes).with_added_extension("incomplete");
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    // A partial file longer than the file cannot be its beginning.
    fs::write(&partial, vec![7; bytes.len() + 1]).unwrap();
    let path = fetch(&cache.hub(&server), ONE).unwrap();
    assert!(fs::read(&path).unwrap() == bytes);
    // A partial file of a plausible length: the checksum fails, and the next run starts over.
    fs::remove_file(&path).unwrap();
    fs::remove_file(cache.blob(&bytes)).unwrap();
    fs::write(&partial, [7; 1000]).unwrap();
    refused(&cache.hub(&server), ONE, "m.gguf does not have the SHA-256 that the hub gives");
    assert!(!partial.exists() && !cache.blob(&bytes).exists());
    assert!(fs::read(fetch(&cache.hub(&server), ONE).unwrap()).unwrap() == bytes);
    // A blob with the wrong length is damaged.
    fs::remove_file(&path).unwrap();
    fs::write(cache.blob(&bytes), b"short").unwrap();
    assert!(fs::read(fetch(&cache.hub(&server), ONE).unwrap()).unwrap() == bytes);
}

#[test]
fn concurrent_fetches_download_once() {
    let (cache, bytes) = (Cache::new(), large());
    let server = Server::new("org/name", &[("m.gguf", &bytes)]);
    let hub = cache.hub(&server);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(fs::read(fetch(&hub, ONE).unwrap()).unwrap() == bytes));
        }
    });
    assert_eq!(server.requests().iter().filter(|request| request.cdn).count(), 1);
}

#[test]
fn requests_to_a_busy_hub_are_retried() {
    let calls = AtomicUsize::new(0);
    let server = Server::with_faults("org/name", &FOLDER, move |request, reply| {
        // Each request to the hub fails once; requests to redirect targets do not.
        match !request.cdn && calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            true => Reply::status(503),
            false => reply,
        }
    });
    fetch(&Cache::new().hub(&server), "org/name").unwrap();
    let server = Server::with_faults("org/name", &FOLDER, |_, _| Reply::status(429));
    refused(&Cache::new().hub(&server), "org/name", "answers 429; try again later");
}

#[test]
fn redirects_within_the_hub_keep_the_token() {
    let server = Server::with_faults("org/name", &FOLDER, |request, reply| {
        match request.path.strip_prefix("/org/name/resolve/") {
            // At the redirect target, the server answers with an ETag and a size, as for any small file.
            Some(_) if request.path.ends_with(".json") => {
                Reply::status(307).header("Location", format!("/elsewhere{}", request.path))
            }
            _ => reply,
        }
    });
    let cache = Cache::new();
    let folder = fetch(&cache.hub(&server).token("hf_secret").unwrap(), "org/name").unwrap();
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), b"{}");
    let elsewhere: Vec<_> =
        server.requests().into_iter().filter(|request| request.path.starts_with("/elsewhere")).collect();
    assert_eq!(elsewhere.len(), 6, "HEAD and GET of three files");
    assert!(elsewhere.iter().all(|request| request.token.is_some()), "it is the same hub");
}

#[test]
fn errors_of_the_hub_say_what_to_do() {
    let no = |status: u16, code: &'static str, only_files: bool| {
        let server = Server::with_faults("org/name", &GGUF, move |request, reply| {
            match only_files && request.path.starts_with("/api/") {
                true => reply,
                false => Reply::status(status).header("X-Error-Code", code),
            }
        });
        let hub = Cache::new().hub(&server);
        let message = |hub| fetch(&hub, "org/name").unwrap_err().to_string();
        (message(hub.clone()), message(hub.token("hf_x").unwrap()))
    };
    for (status, code, only_files) in [(403, "GatedRepo", true), (401, "GatedRepo", true), (403, "", false)] {
        let (message, _) = no(status, code, only_files);
        assert!(message.contains("org/name is gated: accept its licence at http://127.0.0.1"), "{message}");
        assert!(message.contains("set HF_TOKEN"), "{message}");
    }
    let (without, with) = no(401, "", false);
    assert!(without.contains("has no model org/name; if it is private, set HF_TOKEN"), "{without}");
    assert!(with.contains("does not accept the token"), "{with}");
    let (_, message) = no(404, "RevisionNotFound", false);
    assert!(message.contains("has no revision `main`"), "{message}");
    let (_, message) = no(404, "EntryNotFound", true);
    assert!(message.contains("has no file `m-Q4_K_M.gguf`"), "{message}");
    let (_, message) = no(418, "", false);
    assert!(message.contains("is an error (418)"), "{message}");

    let server = Server::new("org/name", &GGUF);
    refused(
        &Cache::new().hub(&server),
        "org/nam",
        "has no model org/nam; the nearest is org/name; if it is private",
    );
    refused(&Cache::new().hub(&server), "who/knows", "has no model who/knows; if it is private");
}
