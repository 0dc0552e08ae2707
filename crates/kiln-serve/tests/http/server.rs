//! The server: who may ask, limits, faults, and what it tells of itself.

use std::{
    io::{BufRead, BufReader},
    thread,
    time::{Duration, Instant},
};

use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{MODEL, Reply, Running, alone, completion, reply};

#[test]
fn the_page_and_the_metrics_are_there_and_count() {
    let plans = vec![kiln::Plan::named("sliding").unwrap()];
    let server = Running::new(|options| ServeOptions { plans, keys: vec!["key".to_owned()], ..options });
    let get = |path: &str, key: &str| {
        let head = format!("GET {path} HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {key}", server.address);
        reply(server.send(&head, ""))
    };
    for (path, kind, part) in [
        ("/", "text/html", "<script"),
        ("/page.css", "text/css", "{"),
        ("/page.js", "text/javascript", "chat/completions"),
    ] {
        let Reply { status, headers, body } = get(path, "none");
        assert!(status == 200 && headers.contains(kind) && body.contains(part), "{path}: {status} {headers}");
        assert!(headers.contains("content-security-policy: default-src 'self'"), "{headers}");
    }
    assert_eq!((get("/props", "none").status, get("/metrics", "none").status), (401, 401));
    let props: Value = serde_json::from_str(&get("/props", "key").body).unwrap();
    assert_eq!((&props["model"], &props["caches"][1]), (&json!("demo"), &json!("sliding")));
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nauthorization: Bearer key",
        server.address
    );
    assert_eq!(reply(server.send(&head, &completion("The", 1, &json!({})).to_string())).status, 200);
    let text = get("/metrics", "key").body;
    let number = |name: &str| {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    for names in ["kiln_", "vllm:"] {
        assert_eq!(number(&format!("{names}generation_tokens_total{{")), 24.0);
        assert_eq!(number(&format!("{names}num_requests_running{{")), 0.0);
        assert_eq!(number(&format!("{names}time_to_first_token_seconds_count{{")), 1.0);
        assert_eq!(number(&format!("{names}request_success_total{{")), 1.0);
    }
    assert!(text.contains("finished_reason=\"length\"") && text.contains("model_name=\"demo\""), "{text}");
}

#[test]
fn what_is_wrong_is_named() {
    let server = Running::new(|options| options);
    let completions = [
        (json!({ "prompt": "a" }), 400, "model"),
        (json!({ "model": "other", "prompt": "a" }), 404, "model"),
        (json!({ "model": "demo" }), 400, "prompt"),
        (json!({ "model": "demo", "prompt": [] }), 400, "prompt"),
        (json!({ "model": "demo", "prompt": "a", "temprature": 1 }), 400, "temprature"),
        (json!({ "model": "demo", "prompt": "a", "temperature": "warm" }), 400, "temperature"),
        (json!({ "model": "demo", "prompt": "a", "temperature": 3 }), 400, "temperature"),
        (json!({ "model": "demo", "prompt": "a", "top_p": 7 }), 400, "top_p"),
        (json!({ "model": "demo", "prompt": "a", "max_tokens": 0 }), 400, "max_tokens"),
        (json!({ "model": "demo", "prompt": "a", "n": 0 }), 400, "n"),
        (json!({ "model": "demo", "prompt": "a", "logprobs": 21 }), 400, "logprobs"),
        (json!({ "model": "demo", "prompt": "a", "logprobs": true }), 400, "logprobs"),
        (
            json!({ "model": "demo", "prompt": "a".repeat(1 << 20), "logprobs": 20, "echo": true }),
            400,
            "logprobs",
        ),
        (json!({ "model": "demo", "prompt": "a", "kiln": { "cache": "sliding" } }), 400, "kiln.cache"),
        (json!({ "model": "demo", "prompt": "a", "kiln": { "cache": "huge" } }), 400, "kiln.cache"),
        (json!({ "model": "demo", "prompt": "a", "cache_salt": "a".repeat(257) }), 400, "cache_salt"),
        (json!({ "model": "demo", "prompt": "a", "best_of": 3 }), 400, "best_of"),
        (json!({ "model": "demo", "prompt": "a", "logit_bias": { "99999999": 1 } }), 400, "logit_bias"),
        (json!({ "model": "demo", "prompt": "a", "stop": "" }), 400, "stop"),
        (json!({ "model": "demo", "prompt": "a", "stream_options": {} }), 400, "stream_options"),
    ];
    for (body, status, param) in completions {
        let (got, answer) = server.post("/v1/completions", &body);
        assert_eq!((got, answer["error"]["param"].as_str()), (status, Some(param)), "{body}: {answer}");
    }
    let image = json!([{ "type": "image_url", "image_url": { "url": "http://x" } }]);
    let chats = [
        (json!({ "model": "demo" }), "messages"),
        (json!({ "model": "demo", "messages": [] }), "messages"),
        (json!({ "model": "demo", "messages": [{ "role": "king", "content": "a" }] }), "messages[0].role"),
        (
            json!({ "model": "demo", "messages": [{ "role": "user", "content": image }] }),
            "messages[0].content",
        ),
    ];
    for (body, param) in chats {
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    }
    let long = "word ".repeat(3000);
    let (status, answer) = server.post("/v1/completions", &completion(&long, 0, &json!({})));
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")), "{answer}");
    assert_eq!(server.post("/v1/completions", &json!([1])).0, 400);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json",
        server.address
    );
    let deep = format!("{{\"model\":\"demo\",\"prompt\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let Reply { status, body, .. } = reply(server.send(&head, &deep));
    assert!(status == 400 && body.len() < 400, "{status} {body}");
    // A byte too long: all of it was read when that is found, so the connection is not reset.
    assert_eq!(reply(server.send(&head, &" ".repeat((16 << 20) + 1))).status, 413);
    // More tokens than the model has positions are not an error: the text ends where they do.
    let (status, answer) =
        server.post("/v1/completions", &completion("A", 1, &json!({ "max_tokens": 1_000_000 })));
    let all = answer["usage"]["total_tokens"].as_u64().unwrap();
    assert!(status == 200 && all <= MODEL.sizes().positions as u64 + 1, "{all}");
    assert_eq!(server.get("/nowhere").0, 404);
    assert_eq!(server.get("/v1/completions").0, 405);
    let whole = completion("a", 0, &json!({})).to_string();
    for cut in 0..whole.len() {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json",
            server.address
        );
        assert_eq!(reply(server.send(&head, &whole[..cut])).status, 400, "{}", &whole[..cut]);
    }
    assert_eq!(server.get("/v1/models/demo").1["id"], "demo");
    let (_, tokens) = server.post("/tokenize", &json!({ "content": "ROMEO:" }));
    assert_eq!(server.post("/detokenize", &tokens).1["content"], "ROMEO:");
}

#[test]
fn the_description_of_the_endpoints_is_true() {
    let server = Running::new(|options| options);
    let (status, document) = server.get("/openapi.json");
    assert_eq!((status, &document["openapi"]), (200, &json!("3.1.0")));
    // All addresses are there, but for the page and those of ollama that download or store models.
    let left_out =
        ["/", "/page.css", "/page.js", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"];
    for route in include_str!("../../src/api/mod.rs").split(".route(\"").skip(1) {
        let path = route.split('"').next().unwrap().replace("{*id}", "{id}");
        let is_there = document["paths"].get(&path).is_some();
        assert_eq!(is_there, !left_out.contains(&path.as_str()) && !path.starts_with("/api/blobs"), "{path}");
    }
    for (path, methods) in document["paths"].as_object().unwrap() {
        let Some(body) = methods["post"]["requestBody"]["content"].get("application/json") else {
            if methods.get("get").is_some() && !path.contains('{') {
                let request = format!("GET {path} HTTP/1.1\r\nhost: {}", server.address);
                assert_eq!(reply(server.send(&request, "")).status, 200, "{path}");
            }
            continue;
        };
        let (properties, required) =
            (&body["schema"]["properties"], body["schema"]["required"].as_array().unwrap());
        for name in required {
            assert!(properties.get(name.as_str().unwrap()).is_some(), "{path}: {name}");
        }
        // Each field is known, and refuses a value of another type.
        for (name, schema) in properties.as_object().unwrap() {
            let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str());
            let wrong = match kind {
                Some("object" | "array") => json!("text"),
                Some(_) => json!([{}]),
                None => continue,
            };
            let (status, answer) = server.post(path, &json!({ name: wrong }));
            assert_eq!(status, 400, "{path}: {name}: {answer}");
            let text = answer.to_string();
            assert!(
                !text.contains("no such field") && !text.contains("unknown field"),
                "{path}: {name}: {answer}"
            );
        }
    }
}

#[test]
fn only_those_who_may_ask_are_answered() {
    let server = Running::new(|options| ServeOptions {
        keys: vec!["one".into(), "two".into()],
        origins: vec!["https://chat.example".into()],
        ..options
    });
    let address = server.address;
    let ask = |lines: &str| reply(server.send(&format!("GET /v1/models HTTP/1.1\r\n{lines}"), "")).status;
    let host = format!("host: {address}");
    assert_eq!(ask(&host), 401);
    assert_eq!(ask(&format!("{host}\r\nauthorization: Bearer on")), 401);
    assert_eq!(ask(&format!("{host}\r\nauthorization: Bearer two")), 200);
    assert_eq!(ask("host: evil.example\r\nauthorization: Bearer two"), 403);
    assert_eq!(ask(&format!("{host}\r\nauthorization: Bearer two\r\norigin: https://evil.example")), 403);
    assert_eq!(ask(&format!("{host}\r\nauthorization: Bearer two\r\norigin: https://chat.example")), 200);
    assert_eq!(
        ask(&format!("localhost: x\r\nhost: localhost:{}\r\nauthorization: Bearer one", address.port())),
        200
    );
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\n{host}\r\nauthorization: Bearer one\r\ncontent-type: text/plain"
    );
    assert_eq!(reply(server.send(&head, "{}")).status, 415);
    assert_eq!(server.get("/health").0, 200);
}

/// Waits until this many answers are under way.
pub(crate) fn wait_for(server: &Running, running: u64) {
    let begun = Instant::now();
    while server.get("/health").1["running"] != running {
        assert!(begun.elapsed() < Duration::from_secs(30), "not {running} answers are under way");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_leaves_costs_no_more_passes_and_a_full_queue_refuses() {
    let server = Running::new(|options| ServeOptions { rows: Some(1), queue: 1, ..options });
    let endless = completion("ROMEO:", 0, &json!({ "stream": true, "max_tokens": 1500 }));
    let begin = || {
        let mut reader = BufReader::new(server.post_raw("/v1/completions", &endless));
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            reader.read_line(&mut line).unwrap();
        }
        reader
    };
    let first = begin();
    let second = server.post_raw("/v1/completions", &endless);
    wait_for(&server, 2);
    let refused = reply(server.post_raw("/v1/completions", &endless));
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert!(refused.headers.contains("retry-after: "), "{}", refused.headers);
    drop((first, second));
    wait_for(&server, 0);
    let (status, answer) = server.post("/v1/completions", &completion("ROMEO:", 5, &json!({})));
    assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some(alone("ROMEO:", 5).as_str())));
}
