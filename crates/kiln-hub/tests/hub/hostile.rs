//! Malicious responses: nothing panics, and nothing is written outside the cache.

use std::fs;

use super::{
    COMMIT, Cache, FOLDER, fetch, names, refused,
    server::{Reply, Request, Server},
};

const ONE: [(&str, &[u8]); 1] = [("m.gguf", b"some weights")];

/// Returns a hub that answers `HEAD` for the file with another value in a header.
fn says(header: &'static str, value: &'static str) -> Server {
    Server::with_faults("org/name", &ONE, move |request, reply| match request.method.as_str() {
        "HEAD" => reply.replace(header, value),
        _ => reply,
    })
}

/// Returns a hub with an arbitrary file listing.
fn lists(listing: impl Into<String>) -> Server {
    let listing = listing.into();
    Server::with_faults("org/name", &FOLDER, move |request, reply| match request.path.starts_with("/api/") {
        true => Reply::status(200).body(listing.clone()),
        false => reply,
    })
}

#[test]
fn wrong_file_sizes_are_errors() {
    for size in ["-1", "9223372036854775808", "1e3", "", "18446744073709551616", "0x10", "2000000000000"] {
        refused(&Cache::new().hub(&says("X-Linked-Size", size)), "org/name", "bytes, which no file has");
    }
    // An empty file is refused without a download.
    refused(&Cache::new().hub(&says("X-Linked-Size", "0")), "org/name", "has an empty file `m.gguf`");
    for (size, expected) in [
        ("1000000000000", "was cut at 12 of 1000000000000 bytes"),
        ("13", "was cut at 12 of 13 bytes"),
        ("11", "is longer than the 11 bytes it said"),
    ] {
        let cache = Cache::new();
        refused(&cache.hub(&says("X-Linked-Size", size)), "org/name", expected);
        assert!(!cache.blob(ONE[0].1).exists());
        let disk: u64 = names(&cache.path().join("models--org--name/blobs")).len() as u64;
        assert!(disk <= 1, "at most the beginning is kept");
    }
    // The `Content-Length` of the body is larger than any file.
    let server = Server::with_faults("org/name", &ONE, |request, reply| match request.cdn {
        true => reply.header("Content-Length", "9223372036854775807"),
        false => reply,
    });
    let cache = Cache::new();
    assert_eq!(fs::read(fetch(&cache.hub(&server), "org/name").unwrap()).unwrap(), ONE[0].1);
}

#[test]
fn an_endless_body_is_an_error() {
    let server = Server::with_faults("org/name", &ONE, |request, reply| match request.cdn {
        true => Reply { endless: true, ..reply },
        false => reply,
    });
    let cache = Cache::new();
    refused(&cache.hub(&server), "org/name", "is longer than the 12 bytes it said");
    let server = Server::with_faults("org/name", &ONE, |_, reply| Reply {
        endless: true,
        body: b"      ".repeat(1000),
        ..reply
    });
    refused(&cache.hub(&server), "org/name", "does not end");
}

#[test]
fn a_file_with_another_checksum_is_not_kept() {
    let sum = "\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\"";
    let cache = Cache::new();
    refused(&cache.hub(&says("X-Linked-Etag", sum)), "org/name", "m.gguf does not have the SHA-256");
    assert_eq!(names(&cache.path().join("models--org--name/blobs")), [""; 0]);
    let sizes = cache.path().join("models--org--name/snapshots");
    assert!(!sizes.exists(), "there is no link to it");
}

#[test]
fn an_etag_that_is_not_a_file_name_is_an_error() {
    let long = "x".repeat(129).leak();
    for etag in [
        "",
        "\"\"",
        "../../x",
        "\"/no-such-folder/evil\"",
        "..",
        ".",
        "a/b",
        "a\\b",
        "a b",
        "\"a\"b\"",
        "é",
        "x.incomplete",
        long,
    ] {
        let cache = Cache::new();
        refused(&cache.hub(&says("X-Linked-Etag", etag)), "org/name", "which no blob can be named after");
        cache.check_around();
        assert!(!cache.path().join("models--org--name/blobs").exists(), "{etag}");
    }
    for etag in ["W/\"abc\"", "\"abc\"", "abc", "\"abc-1\""] {
        fetch(&Cache::new().hub(&says("X-Linked-Etag", etag)), "org/name").unwrap();
    }
}

#[test]
fn listed_names_cannot_escape_the_folder() {
    let list = |names: &[&str]| {
        let siblings: Vec<_> = names.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string()
    };
    for name in [
        "../../../evil.gguf",
        "/no-such-folder/evil.gguf",
        "a/../../evil.gguf",
        "C:\\evil.gguf",
        "..\\evil.gguf",
        "a//b.gguf",
    ] {
        let cache = Cache::new();
        refused(&cache.hub(&lists(list(&[name]))), "org/name", "no GGUF file");
        cache.check_around();
    }
    // A template with an unsafe name is skipped.
    let names_of =
        ["config.json", "model.safetensors", "additional_chat_templates/../../../../../evil.jinja"];
    let cache = Cache::new();
    let folder = fetch(&cache.hub(&lists(list(&names_of))), "org/name").unwrap();
    assert_eq!(names(&folder), ["config.json", "model.safetensors"]);
    cache.check_around();
}

#[test]
fn an_index_cannot_escape_the_folder() {
    for shard in ["../evil.safetensors", "/no-such-folder/evil.safetensors", "evil.bin", ""] {
        let index = serde_json::json!({ "weight_map": { "a": shard } }).to_string();
        let files: [(&str, &[u8]); 3] = [
            ("config.json", b"{}"),
            ("model.safetensors.index.json", index.as_bytes()),
            ("../evil.safetensors", b"evil"),
        ];
        let (cache, server) = (Cache::new(), Server::new("org/name", &files));
        refused(&cache.hub(&server), "org/name", "which is no safetensors file of the repository");
        cache.check_around();
    }
}

#[test]
fn an_invalid_listing_is_an_error() {
    let deep = "[".repeat(1_000_000);
    for listing in [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "<html>",
        "{\"sha\": \"../../x\", \"siblings\": []}",
        "{\"sha\": 7, \"siblings\": []}",
        &deep,
        "{\"sha\": \"0123456789abcdef0123456789abcdef01234567\"}",
        "{\"sha\": \"0123456789abcdef0123456789abcdef01234567\", \"siblings\": [1, {}, {\"rfilename\": 2}]}",
    ] {
        let cache = Cache::new();
        let error = fetch(&cache.hub(&lists(listing)), "org/name").unwrap_err().to_string();
        assert!(error.contains("the files of org/name") || error.contains("no GGUF file"), "{error}");
    }
}

#[test]
fn redirect_loops_and_invalid_redirects_are_errors() {
    let leads = |to: &'static str| {
        move |request: &Request, reply: Reply| match request.path.starts_with("/api/") {
            true => reply,
            false => Reply::status(302).header("Location", to),
        }
    };
    let circle = Server::with_faults("org/name", &ONE, leads("/here"));
    refused(&Cache::new().hub(&circle), "org/name", "leads from one address to the next");
    assert!(circle.requests().len() <= 13, "a circle is not followed for long");
    for to in ["file:///etc/passwd", "ftp://x/y", "nowhere", "", "http://"] {
        let server = Server::with_faults("org/name", &ONE, leads(to));
        refused(&Cache::new().hub(&server), "org/name", "leads to an address that is none");
    }
}

#[test]
fn a_response_with_the_wrong_range_is_an_error() {
    let server = Server::with_faults("org/name", &ONE, |request, reply| match (request.cdn, request.from) {
        (true, None) => Reply { cut: Some(5), ..reply },
        (true, Some(_)) => reply.replace("Content-Range", "bytes 0-11/12"),
        _ => reply,
    });
    refused(&Cache::new().hub(&server), "org/name", "is another part than the one that was asked for");
}

#[test]
fn a_response_that_is_not_http_is_an_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            use std::io::{Read, Write};
            let mut stream = stream;
            _ = stream.read(&mut [0; 1024]);
            _ = stream.write_all(&b"\0\xff garbage \r\n".repeat(100));
        }
    });
    let cache = Cache::new();
    refused(&cache.hub_at(&endpoint), "org/name", "127.0.0.1 cannot be reached");
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
}
