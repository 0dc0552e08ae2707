//! A server whose memory runs short.

use std::{path::Path, thread};

use kiln::{Model, Plan};
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{MODEL, Running};

/// The demo model with this much memory, in half MiB. Its weights take 8 MiB.
fn model(half_mib: u64) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    Model::builder(folder).opened(MODEL.opened().clone()).memory(half_mib << 19).load().unwrap()
}

fn ask(server: &Running, tokens: u32, extra: &Value) -> (u16, Value) {
    let prompt: Vec<u32> = (3..3 + tokens).collect();
    let mut body =
        json!({ "model": "demo", "prompt": prompt, "max_tokens": 9, "temperature": 0, "logprobs": 0 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    server.post("/v1/completions", &body)
}

#[test]
fn requests_that_others_leave_no_memory_for_wait_and_keep_their_bits() {
    let change = |options| ServeOptions {
        prefill_chunk: Some(32),
        plans: vec![Plan::named("static").unwrap(), Plan::named("quantized:nbits=4").unwrap()],
        ..options
    };
    let alone = Running::new(|options| ServeOptions { prefix_bytes: 0, ..change(options) });
    let server = Running::of(&model(22), change);
    for cache in [
        json!({}),
        json!({ "kiln": { "cache": "static" } }),
        json!({ "kiln": { "cache": "quantized:nbits=4" } }),
    ] {
        let (alone, server, cache) = (&alone, &server, &cache);
        thread::scope(|scope| {
            // Some begin like others, all at once.
            for tokens in (40..400).step_by(15) {
                scope.spawn(move || {
                    let (status, answer) = ask(server, tokens, cache);
                    assert_eq!(status, 200, "{tokens} tokens, {cache}: {answer}");
                    let want = ask(alone, tokens, cache).1;
                    assert_eq!(answer["choices"], want["choices"], "{tokens} tokens, {cache}");
                });
            }
        });
    }
    let (_, answer) = ask(&server, 300, &json!({ "n": 4 }));
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4, "{answer}");
    assert!(choices.iter().all(|choice| choice["logprobs"] == choices[0]["logprobs"]), "{answer}");
}

#[test]
fn a_request_that_can_never_fit_is_refused_and_others_go_on() {
    let plans = vec![Plan::named("none").unwrap()];
    let server = Running::of(&model(19), |options| ServeOptions { plans, ..options });
    let (status, answer) = ask(&server, 400, &json!({ "kiln": { "cache": "none" } }));
    assert_eq!(status, 503, "{answer}");
    assert_eq!(ask(&server, 5, &json!({})).0, 200);
}
