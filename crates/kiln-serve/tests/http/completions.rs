//! `/v1/completions`

use std::thread;

use kiln::Plan;
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{MODEL, MODELS, Reply, Running, alone, alone_of, completion, reply};

#[test]
fn answers_beside_each_other_equal_those_of_the_model_alone() {
    let prompts = ["ROMEO:", "The Constitution of", "JULIET: What", "And", "HAMLET:\nTo be", "The"];
    for model in &*MODELS {
        let server = Running::of(model, |options| options);
        thread::scope(|scope| {
            for (seed, prompt) in (0..).zip(prompts) {
                let server = &server;
                scope.spawn(move || {
                    let want = alone_of(model, prompt, seed);
                    let (status, answer) =
                        server.post("/v1/completions", &completion(prompt, seed, &json!({})));
                    assert_eq!(
                        (status, answer["choices"][0]["text"].as_str()),
                        (200, Some(want.as_str())),
                        "{answer}"
                    );
                    assert_eq!(answer["usage"]["prompt_tokens"], model.encode(prompt).unwrap().len());
                    assert_eq!(answer["usage"]["completion_tokens"], 24);
                    assert_eq!(answer["choices"][0]["finish_reason"], "length");

                    let extra = json!({ "stream": true, "stream_options": { "include_usage": true } });
                    let events = server.events("/v1/completions", &completion(prompt, seed, &extra));
                    let (done, chunks) = events.split_last().unwrap();
                    assert_eq!(done, "[DONE]");
                    let chunks: Vec<Value> =
                        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
                    let text: String =
                        chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
                    assert_eq!(text, want);
                    assert_eq!(chunks.last().unwrap()["usage"], answer["usage"]);
                    assert!(chunks.iter().rev().skip(1).all(|chunk| chunk.get("usage").is_none()));

                    // vLLM's; guidellm asks for it.
                    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
                    let extra = json!({ "stream": true, "stream_options": options });
                    let mut events = server.events("/v1/completions", &completion(prompt, seed, &extra));
                    assert_eq!(events.pop().unwrap(), "[DONE]");
                    let counts: Vec<(u64, u64)> = events
                        .iter()
                        .map(|chunk| {
                            let usage = &serde_json::from_str::<Value>(chunk).unwrap()["usage"];
                            let count = |field| usage[field].as_u64().unwrap();
                            (count("prompt_tokens"), count("completion_tokens"))
                        })
                        .collect();
                    assert!(counts.is_sorted() && counts[0].1 < 24, "{counts:?}");
                    let count = |field| answer["usage"][field].as_u64().unwrap();
                    assert_eq!(*counts.last().unwrap(), (count("prompt_tokens"), count("completion_tokens")));
                });
            }
        });
    }
}

#[test]
fn choices_of_one_request_and_lists_of_prompts_have_texts_of_their_own() {
    let server = Running::new(|options| options);
    let mut body = completion("", 3, &json!({ "n": 2, "echo": true }));
    body["prompt"] = json!(["ROMEO:", "The"]);
    let (status, answer) = server.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    let want = [("ROMEO:", 3), ("ROMEO:", 4), ("The", 3), ("The", 4)];
    assert_eq!(texts, want.map(|(prompt, seed)| format!("{prompt}{}", alone(prompt, seed))));
    let prompts = MODEL.encode("ROMEO:").unwrap().len() + MODEL.encode("The").unwrap().len();
    assert_eq!(answer["usage"]["prompt_tokens"], prompts);
}

#[test]
fn an_echo_tells_the_log_probabilities_of_the_prompt() {
    let server = Running::new(|options| options);
    let prompt = "The Constitution";
    let tokens = MODEL.encode(prompt).unwrap();
    // What each beginning of the prompt gives for the token that follows it.
    let mut log_probs = vec![Value::Null];
    for n in 1..tokens.len() {
        let wanted = json!({ "logprobs": 2, "max_tokens": 1, "logit_bias": { tokens[n].to_string(): 100 } });
        let mut body = completion("", 1, &wanted);
        body["prompt"] = json!(tokens[..n]);
        let (_, answer) = server.post("/v1/completions", &body);
        log_probs.push(answer["choices"][0]["logprobs"]["token_logprobs"][0].clone());
    }
    // Products of a whole prompt sum in another order than those of one token.
    let close = |got: &Value, want: &Value| match (got.as_f64(), want.as_f64()) {
        (Some(got), Some(want)) => (got - want).abs() < 1e-3,
        _ => got == want,
    };
    let plain = server.post("/v1/completions", &completion(prompt, 1, &json!({ "logprobs": 2 }))).1;
    for stream in [false, true] {
        let wanted = json!({ "logprobs": 2, "echo": true, "stream": stream });
        let body = completion(prompt, 1, &wanted);
        let told: Vec<Value> = match stream {
            false => vec![server.post("/v1/completions", &body).1],
            true => server.json_events("/v1/completions", &body),
        };
        let all = |name: &str| -> Vec<Value> {
            let of = |chunk: &Value| chunk["choices"][0]["logprobs"][name].as_array().cloned();
            told.iter().filter_map(of).flatten().collect()
        };
        let (got, offsets) = (all("token_logprobs"), all("text_offset"));
        assert!(got.iter().zip(&log_probs).all(|(got, want)| close(got, want)), "{got:?} {log_probs:?}");
        assert_eq!(
            got[tokens.len()..],
            plain["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap()[..]
        );
        assert_eq!(offsets.len(), got.len());
        assert_eq!(offsets[tokens.len()], prompt.chars().count());
        assert_eq!(all("top_logprobs")[0], Value::Null);
        assert_eq!(all("top_logprobs")[1].as_object().unwrap().len(), 2);
    }
}

#[test]
fn settings_change_the_answer() {
    let server = Running::new(|options| options);
    let text = |extra: Value| {
        let (status, answer) = server.post("/v1/completions", &completion("The Constitution", 1, &extra));
        assert_eq!(status, 200, "{answer}");
        (
            answer["choices"][0]["text"].as_str().unwrap().to_owned(),
            answer["choices"][0]["finish_reason"].clone(),
        )
    };
    let (plain, _) = text(json!({ "temperature": 0 }));
    let token = MODEL.encode_more(&plain).unwrap()[0];
    assert_ne!(text(json!({ "temperature": 0, "logit_bias": { token.to_string(): -100 } })).0, plain);
    assert_ne!(text(json!({ "temperature": 0, "frequency_penalty": 2 })).0, plain);
    assert_ne!(text(json!({ "temperature": 0, "presence_penalty": 2 })).0, plain);
    let stop: String = plain.chars().skip(8).take(3).collect();
    let (cut, reason) = text(json!({ "temperature": 0, "stop": stop }));
    assert_eq!((cut.as_str(), reason), (&plain[..plain.find(&stop).unwrap()], json!("stop")));
    let ends = |extra: Value| {
        let prompt = MODEL.encode("The").unwrap();
        let eos = MODEL.generation_config().eos_token_id.clone().unwrap()[0];
        let mut body = completion("", 1, &extra);
        // The token that ends a text becomes the likeliest.
        body["prompt"] = json!(prompt);
        body["logit_bias"] = json!({ eos.to_string(): 100 });
        server.post("/v1/completions", &body).1["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert_eq!((ends(json!({})), ends(json!({ "ignore_eos": true }))), (1, 24));
    assert_eq!(ends(json!({ "min_tokens": 7 })), 8);
    // In objects, a model as small as this puts white space without end.
    let schema = json!({ "enum": ["Rome", "Verona"] });
    let body = json!({
        "model": "demo", "messages": [{ "role": "user", "content": "?" }], "max_tokens": 300, "temperature": 0,
        "response_format": { "type": "json_schema", "json_schema": { "name": "a", "schema": schema } },
    });
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(["\"Rome\"", "\"Verona\""].contains(&content), "{content}");
}

#[test]
fn log_probabilities_are_those_of_the_model_alone() {
    for model in &*MODELS {
        let server = Running::of(model, |options| options);
        let mut alone = model
            .generate("ROMEO:")
            .max_new_tokens(24)
            .temperature(0.9)
            .seed(5)
            .logprobs(3)
            .stream()
            .unwrap();
        let text: String = alone.by_ref().map(Result::unwrap).collect();
        let want: Vec<_> =
            alone.take_tokens().into_iter().map(|token| (token.id, token.logprobs.unwrap())).collect();
        let body = completion("ROMEO:", 5, &json!({ "logprobs": 3 }));
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        let (got, all) =
            (&choice["logprobs"], |field: &str| choice["logprobs"][field].as_array().unwrap().clone());
        assert_eq!(choice["text"], text);
        assert_eq!(all("tokens").iter().map(|token| token.as_str().unwrap()).collect::<String>(), text);
        let number = |value: &Value| value.as_f64().unwrap() as f32;
        let logprobs: Vec<f32> = all("token_logprobs").iter().map(number).collect();
        assert_eq!(logprobs, want.iter().map(|(_, logprobs)| logprobs.chosen).collect::<Vec<_>>());
        for (top, (_, logprobs)) in all("top_logprobs").iter().zip(&want) {
            assert_eq!(
                top.as_object().unwrap().values().map(number).fold(f32::MIN, f32::max),
                logprobs.top[0].1
            );
        }
        assert_eq!((&got["text_offset"][0], all("text_offset").len()), (&json!(0), want.len()));

        // In a chat, streamed, with a sum of probabilities of at most 1.
        let body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "What news?" }], "max_tokens": 9,
            "logprobs": true, "top_logprobs": 5, "stream": true, "temperature": 0,
        });
        let events = server.events("/v1/chat/completions", &body);
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        let entries: Vec<Value> = chunks
            .flat_map(|chunk| {
                chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
            })
            .collect();
        assert_eq!(entries.len(), 9);
        for entry in entries {
            let top = entry["top_logprobs"].as_array().unwrap();
            assert_eq!(
                (top.len(), &top[0]["logprob"], &top[0]["bytes"]),
                (5, &entry["logprob"], &entry["bytes"])
            );
            assert!(top.iter().map(|one| number(&one["logprob"]).exp()).sum::<f32>() <= 1.0001);
        }
    }
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_is_computed_from_there_with_the_same_bits() {
    const CHUNK: usize = 16;
    for model in &*MODELS {
        let change = |options| ServeOptions {
            prefill_chunk: Some(CHUNK),
            plans: vec![kiln::Plan::named("quantized:nbits=4").unwrap()],
            keys: vec!["one".to_owned(), "two".to_owned()],
            ..options
        };
        let server = Running::of(model, change);
        let begin = "The Constitution of the people, and what they said in Rome. ".repeat(2);
        let ask = |key: &str, end: &str, extra: Value| {
            let body = completion(&format!("{begin}{end}"), 1, &extra).to_string();
            let head = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nauthorization: Bearer {key}",
                server.address
            );
            let Reply { status, body, .. } = reply(server.send(&head, &body));
            assert_eq!(status, 200, "{body}");
            let answer: Value = serde_json::from_str(&body).unwrap();
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize;
            (
                answer["choices"][0].clone(),
                cached,
                answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize,
            )
        };
        let logprobs = || json!({ "logprobs": 2 });
        let (cold, cached, tokens) = ask("one", "ROMEO:", logprobs());
        assert_eq!((cached, tokens), (0, model.encode(&format!("{begin}ROMEO:")).unwrap().len()));
        let (hot, cached, again) = ask("one", "ROMEO:", logprobs());
        assert_eq!((&hot, cached, again), (&cold, (tokens - 1) / CHUNK * CHUNK, tokens));
        // The user of another key cannot notice; neither can the owner of one with another salt.
        assert_eq!(ask("two", "ROMEO:", logprobs()), (cold.clone(), 0, tokens));
        assert_eq!(ask("one", "ROMEO:", json!({ "logprobs": 2, "cache_salt": "a" })).1, 0);
        // The common part of another prompt, in the grid of chunks, as without any.
        let (other, cached, _) = ask("one", "JULIET: What is it?", logprobs());
        assert!(cached > 0 && cached % CHUNK == 0, "{cached}");
        let alone = model.generate(format!("{begin}JULIET: What is it?")).max_new_tokens(24).temperature(0.9);
        assert_eq!(other["text"], alone.seed(1).prefill_chunk(CHUNK).text().unwrap());
        // Caches of another kind share nothing with these.
        let quantized = || json!({ "logprobs": 2, "kiln": { "cache": "quantized:nbits=4" } });
        let (cold, cached, _) = ask("one", "ROMEO:", quantized());
        assert_eq!(cached, 0);
        let (hot, cached, _) = ask("one", "ROMEO:", quantized());
        assert!(cached > 0 && hot == cold, "{cached}");
    }
}

#[test]
fn a_prompt_begins_with_an_earlier_answer_if_the_server_allows_it_and_the_response_says_so() {
    for model in MODELS.iter() {
        let server = |reuse_answers| Running::of(model, |options| ServeOptions { reuse_answers, ..options });
        let prompt = "ROMEO: What news, and from which of the two houses?";
        for reuses in [false, true] {
            let server = server(reuses);
            let ask = |prompt: &str| {
                let (status, answer) = server.post("/v1/completions", &completion(prompt, 3, &json!({})));
                assert_eq!(status, 200, "{answer}");
                answer
            };
            let first = ask(prompt);
            assert_eq!(first["kiln"], Value::Null, "nothing was there to begin with");
            let text = first["choices"][0]["text"].as_str().unwrap();
            let next = format!("{prompt}{text} And what more?");
            let second = ask(&next);
            let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() as usize;
            let begin = model.encode(prompt).unwrap().len();
            if reuses {
                assert!(cached > begin, "{cached} tokens of {begin} and an answer");
                assert_eq!(second["kiln"], json!({ "exact": false }));
                let streamed = json!({ "stream": true });
                let chunks = server.json_events("/v1/completions", &completion(&next, 3, &streamed));
                assert_eq!(chunks.last().unwrap()["kiln"], json!({ "exact": false }));
            } else {
                assert_eq!((cached, &second["kiln"]), (0, &Value::Null), "shorter than a chunk");
                assert_eq!(second["choices"][0]["text"], alone_of(model, &next, 3));
            }
        }
    }
}

#[test]
fn the_fingerprint_tells_servers_apart_whose_bits_may_differ() {
    let fingerprint = |change: fn(ServeOptions) -> ServeOptions| {
        let server = Running::new(change);
        let (status, answer) = server.post("/v1/completions", &completion("And", 1, &json!({})));
        assert_eq!(status, 200, "{answer}");
        answer["system_fingerprint"].as_str().unwrap().to_owned()
    };
    let first = fingerprint(|options| options);
    assert_eq!(
        fingerprint(|options| ServeOptions { rows: Some(2), ..options }),
        first,
        "no bit depends on rows"
    );
    let others: [fn(ServeOptions) -> ServeOptions; 2] = [
        |options| ServeOptions { prefill_chunk: Some(32), ..options },
        |options| ServeOptions { plan: Some(Plan::named("quantized:nbits=4").unwrap()), ..options },
    ];
    for other in others {
        assert_ne!(fingerprint(other), first);
    }
}
