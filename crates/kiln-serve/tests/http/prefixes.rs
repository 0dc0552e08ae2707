//! The beginnings of prompts, saved and restored by a program.

use std::path::Path;

use futures_util::StreamExt;
use kiln::{DtypeChoice, Model, Plan, expert::TensorFile};
use kiln_serve::{Body, ServeOptions, ServedModel, Service, http::Request};
use serde_json::{Value, json};

use crate::{MODEL, MODELS, completion};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

fn service(model: &Model, prefill_chunk: usize) -> Service {
    let options = ServeOptions {
        prefill_chunk: Some(prefill_chunk),
        plans: vec![
            Plan::named("quantized:nbits=4").unwrap(),
            Plan::named("sink:window=48,sinks=4").unwrap(),
        ],
        ..ServeOptions::default()
    };
    Service::new(vec![ServedModel::loaded("demo", model.clone())], options).unwrap()
}

/// The log-probabilities of an answer, and the number of tokens that its prompt reused.
fn ask(service: &Service, cache: &str) -> (Value, u64) {
    let prompt = "The Constitution of the people, and what they said in Rome. ".repeat(3);
    let body = completion(&prompt, 1, &json!({ "logprobs": 2, "kiln": { "cache": cache } })).to_string();
    let request = Request::post("/v1/completions").header("content-type", "application/json");
    block_on(async {
        let response = service.call(request.body(Body::from(body)).unwrap()).await;
        assert_eq!(response.status(), 200);
        let mut pieces = response.into_body().into_data_stream();
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.next().await {
            bytes.extend(piece.unwrap());
        }
        let answer: Value = serde_json::from_slice(&bytes).unwrap();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0]["logprobs"].clone(), cached)
    })
}

fn restored(service: &Service, bytes: &[u8]) -> kiln::Result<usize> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    let file = TensorFile::open(file.path())?;
    block_on(service.restore_prefixes(None, file))
}

#[test]
fn prompts_that_were_saved_are_computed_from_there_with_the_same_bits() {
    const CACHES: [&str; 3] = ["dynamic", "quantized:nbits=4", "sink:window=48,sinks=4"];
    for model in &*MODELS {
        let first = service(model, 16);
        let cold = CACHES.map(|cache| ask(&first, cache).0);
        let saved = block_on(first.save_prefixes(None, None)).unwrap();
        let second = service(model, 16);
        assert!(restored(&second, &saved).unwrap() >= CACHES.len());
        for (cache, cold) in CACHES.iter().zip(cold) {
            let (hot, cached) = ask(&second, cache);
            assert!(cached >= 16, "{cached} tokens with {cache}");
            assert_eq!(hot, cold, "{cache}");
        }
    }
}

#[test]
fn a_file_of_prompts_that_does_not_belong_is_refused() {
    let own = service(&MODEL, 16);
    assert_eq!(
        restored(&own, &block_on(own.save_prefixes(None, None)).unwrap()).unwrap(),
        0,
        "none was kept"
    );
    ask(&own, "dynamic");
    let of_others = block_on(own.save_prefixes(None, Some("another"))).unwrap();
    assert_eq!(restored(&own, &of_others).unwrap(), 0, "the request had no such salt");
    let saved = block_on(own.save_prefixes(Some("demo"), Some(""))).unwrap();
    assert_eq!(restored(&own, &saved).unwrap(), 1);
    let wrong = |service: &Service, bytes: &[u8], why: &str| {
        let error = restored(service, bytes).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(ask(service, "dynamic").1, 0);
    };
    let of_other_settings = service(&MODEL, 32);
    wrong(&of_other_settings, &saved, "with other settings");
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/transformers-5.23.0/models/llama");
    let device = MODEL.opened().clone();
    let other = Model::builder(&folder).opened(device).dtype(DtypeChoice::F32).load().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &saved).unwrap();
    let file = TensorFile::open(file.path()).unwrap();
    let error = other.load_prefixes(file, "any").unwrap_err().to_string();
    assert!(error.contains("another model's weights"), "{error}");
    let mut damaged = saved.clone();
    *damaged.last_mut().unwrap() ^= 1;
    wrong(&service(&MODEL, 16), &damaged, "was altered since it was saved");
    wrong(&service(&MODEL, 16), &saved[..saved.len() / 2], "is not a whole");
}
