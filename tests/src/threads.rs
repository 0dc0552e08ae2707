//! Models, requests and what they generate, held and moved as servers and bindings do.

use std::thread;

use kiln::{Chat, GeneratedText, Model, Request, Sequence, Steps, TokenId, Transcriber, Transcript};

use crate::requests::demos;

const PROMPT: &str = "The Constitution";

fn drawn(model: &Model, prompt: &str, seed: u64) -> Request<'static> {
    model.generate(prompt).max_new_tokens(16).temperature(1.5).seed(seed)
}

fn tokens(request: Request<'_>) -> Vec<TokenId> {
    request.steps().unwrap().map(|step| step.unwrap().tokens[0].unwrap()).collect()
}

#[test]
fn handles_are_send_and_models_are_shared() {
    fn is_send<T: Send + 'static>() {}
    fn is_shared<T: Clone + Send + Sync + 'static>() {}
    is_shared::<Model>();
    is_shared::<Transcriber>();
    is_send::<Request<'static>>();
    is_send::<Steps<'static>>();
    is_send::<GeneratedText<'static>>();
    is_send::<Sequence>();
    is_send::<Chat>();
    is_send::<Transcript>();
}

/// A stream as a server keeps it.
struct Client {
    text: GeneratedText<'static>,
    received: String,
}

#[test]
fn requests_and_streams_outlive_the_handle_of_their_model() {
    for (device, model) in demos() {
        let text = drawn(&model, PROMPT, 3).text().unwrap();
        let request = drawn(&model, PROMPT, 3);
        let cache = model.cache(model.plan()).unwrap();
        let with_cache = drawn(&model, PROMPT, 3).cache(cache);
        let stream = drawn(&model, PROMPT, 3).stream().unwrap();
        let mut client = Client { text: stream, received: String::new() };
        drop(model);
        let elsewhere = thread::spawn(move || request.text().unwrap()).join().unwrap();
        assert_eq!(elsewhere, text, "on {device}");
        assert_eq!(with_cache.text().unwrap(), text, "a cache that was given away, on {device}");
        for piece in client.text.by_ref() {
            client.received.push_str(&piece.unwrap());
        }
        assert_eq!(client.received, text, "on {device}");
    }
}

#[test]
fn threads_generate_concurrently_with_one_model() {
    const PROMPTS: [&str; 2] = [PROMPT, "ROMEO:"];

    for (device, model) in demos() {
        let alone: Vec<_> =
            (0..).zip(PROMPTS).map(|(seed, prompt)| tokens(drawn(&model, prompt, seed))).collect();
        assert_ne!(alone[0], alone[1], "on {device}");
        let threads: Vec<_> = (0..)
            .zip(PROMPTS)
            .map(|(seed, prompt)| {
                let model = model.clone();
                thread::spawn(move || (0..4).map(|_| tokens(drawn(&model, prompt, seed))).collect::<Vec<_>>())
            })
            .collect();
        for (thread, alone) in threads.into_iter().zip(alone) {
            let together = thread.join().unwrap();
            assert!(
                together.iter().all(|tokens| *tokens == alone),
                "on {device}: {together:?}, not {alone:?}"
            );
        }
    }
}
