//! Requests over HTTP: answers equal those of the model alone, and what is wrong is refused by name.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use kiln::{
    ChatTemplate, Conversation, DtypeChoice, Message, Model, Pooling, device::Opened, expert::RenderOptions,
};
use kiln_serve::{ServeOptions, Server};
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
        let options = change(ServeOptions { drain: Duration::from_secs(1), ..ServeOptions::new("demo") });
        let server = Server::new(model.clone(), options, "127.0.0.1:0").unwrap();
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
fn a_chat_is_answered_as_by_the_model_alone() {
    let server = Running::new(|options| ServeOptions { template: Some(ChatTemplate::chatml()), ..options });
    let messages = vec![Message::new("system", "Be brief."), Message::new("user", "What news\nfrom Rome?")];
    let conversation = Conversation { messages, ..Conversation::default() };
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let request = MODEL.answer(&ChatTemplate::chatml(), &conversation, &options).unwrap();
    let want = request.max_new_tokens(20).temperature(0.0).text().unwrap();
    let body = json!({
        "model": "demo",
        "messages": [
            { "role": "developer", "content": "Be brief." },
            { "role": "user", "content": [{ "type": "text", "text": "What news" }, { "type": "text", "text": "from Rome?" }] },
        ],
        "max_completion_tokens": 20,
        "temperature": 0,
    });
    let (status, answer) = server.post("/v1/chat/completions", &body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        (status, message["role"].as_str(), message["content"].as_str()),
        (200, Some("assistant"), Some(&*want))
    );
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.events("/v1/chat/completions", &streamed);
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let text: String = chunks
        .filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(text, want);
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

/// A template that tells of tools and begins with reasoning if it is asked to.
fn thinking() -> ChatTemplate {
    let source = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
                  {% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}\n\
                  {% endfor %}ROMEO:{% if enable_thinking %}<think>{% endif %}{% if no %}</think>{% endif %}";
    ChatTemplate::new(source).unwrap()
}

fn weather(strict: bool) -> Value {
    let city = json!({ "enum": ["Rome", "Verona"] });
    let parameters = json!({
        "type": "object", "properties": { "city": city }, "required": ["city"], "additionalProperties": false,
    });
    json!({ "type": "function", "function": { "name": "weather", "parameters": parameters, "strict": strict } })
}

#[test]
fn a_tool_that_must_be_called_is_called_with_arguments_that_match() {
    let server = Running::new(|options| ServeOptions { template: Some(thinking()), ..options });
    let named = json!({ "type": "function", "function": { "name": "weather" } });
    for choice in [json!("required"), named] {
        let body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "Rain?" }], "tools": [weather(true)],
            "tool_choice": choice, "parallel_tool_calls": false, "temperature": 0, "max_tokens": 200,
        });
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let (message, reason) = (&answer["choices"][0]["message"], &answer["choices"][0]["finish_reason"]);
        assert_eq!((reason, &message["content"]), (&json!("tool_calls"), &Value::Null), "{answer}");
        let calls = message["tool_calls"].as_array().unwrap();
        let function = &calls[0]["function"];
        assert_eq!((calls.len(), &function["name"]), (1, &json!("weather")));
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Verona"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");

        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = server.events("/v1/chat/completions", &streamed);
        let chunks: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let told: Vec<_> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .collect();
        assert_eq!((told.len(), &told[0]["function"], &told[0]["index"]), (1, function, &json!(0)));
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

        // The next turn has the call, with arguments as a text, and its result.
        let mut next = body;
        let messages = next["messages"].as_array_mut().unwrap();
        messages.push(message.clone());
        messages.push(json!({ "role": "tool", "tool_call_id": calls[0]["id"], "content": "Rain." }));
        next["tool_choice"] = json!("none");
        let (status, answer) = server.post("/v1/chat/completions", &next);
        assert_eq!((status, answer["choices"][0]["message"].get("tool_calls")), (200, None), "{answer}");
    }
    let user = || json!([{ "role": "user", "content": "a" }]);
    for (extra, param) in [
        (json!({ "tools": [{}] }), "tools[0]"),
        (json!({ "tools": [weather(true)] }), "tools[0].function.strict"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tools": [weather(false)], "tool_choice": "perhaps" }), "tool_choice"),
        (
            json!({ "tools": [weather(false)], "tool_choice": { "type": "function", "function": { "name": "f" } } }),
            "tool_choice",
        ),
        (
            json!({
                "tools": [weather(false)], "tool_choice": "required", "response_format": { "type": "json_object" },
            }),
            "response_format",
        ),
        (json!({ "functions": [{}] }), "functions"),
    ] {
        let mut body = json!({ "model": "demo", "messages": user(), "max_tokens": 4 });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    }
    // A template that says nothing of tools.
    let server = Running::new(|options| options);
    let body = json!({ "model": "demo", "messages": user(), "tools": [weather(false)] });
    assert_eq!(server.post("/v1/chat/completions", &body).1["error"]["param"], "tools");
    let body = json!({ "model": "demo", "messages": user(), "reasoning_effort": "high" });
    assert_eq!(server.post("/v1/chat/completions", &body).1["error"]["param"], "reasoning_effort");
}

#[test]
fn reasoning_is_told_apart_from_the_answer() {
    let server = Running::new(|options| ServeOptions { template: Some(thinking()), ..options });
    let ask = |effort: &str| {
        let body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "Why?" }], "max_tokens": 12, "temperature": 0,
            "reasoning_effort": effort,
        });
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let alone = |prompt: &str| {
        let request = MODEL.generate(kiln::Prompt::Rendered(prompt.to_owned()));
        request.max_new_tokens(12).temperature(0.0).text().unwrap()
    };
    let thinks = ask("high");
    let message = &thinks["choices"][0]["message"];
    let want = alone("user: Why?ROMEO:<think>");
    assert_eq!(message["reasoning_content"].as_str().unwrap().trim(), want.trim());
    assert_eq!((&message["reasoning"], &message["content"]), (&message["reasoning_content"], &json!("")));
    assert_eq!(thinks["usage"]["completion_tokens_details"]["reasoning_tokens"], 12);
    let plain = ask("none");
    let message = &plain["choices"][0]["message"];
    assert_eq!(message["content"].as_str().unwrap().trim(), alone("user: Why?ROMEO:").trim());
    assert_eq!(message.get("reasoning_content"), None);
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
        (json!({ "model": "demo", "prompt": "a", "logprobs": 1, "echo": true }), 400, "logprobs"),
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
    assert_eq!(status, 400, "{answer}");
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
fn wait_for(server: &Running, running: u64) {
    let begun = Instant::now();
    while server.get("/health").1["running"] != running {
        assert!(begun.elapsed() < Duration::from_secs(30), "not {running} answers are under way");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_client_that_leaves_costs_no_more_passes_and_a_full_queue_refuses() {
    let server = Running::new(|options| ServeOptions { rows: 1, queue: 1, ..options });
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

#[test]
fn embeddings_equal_those_of_the_model_also_beside_answers() {
    for model in &*MODELS {
        let server = Running::of(model, |options| ServeOptions { pooling: Some(Pooling::Mean), ..options });
        let texts = ["What news from Rome?", "To be"];
        let want = model.embed(texts).pooling(Pooling::Mean).run().unwrap();
        let long = completion("ROMEO:", 0, &json!({ "stream": true, "max_tokens": 100 }));
        let beside = server.post_raw("/v1/completions", &long);
        let (status, answer) = server.post("/v1/embeddings", &json!({ "model": "demo", "input": texts }));
        assert_eq!(status, 200, "{answer}");
        let got: Vec<Vec<f32>> =
            (0..2).map(|i| serde_json::from_value(answer["data"][i]["embedding"].clone()).unwrap()).collect();
        assert_eq!(got, want.vectors);
        assert_eq!(answer["usage"]["total_tokens"], want.tokens.iter().sum::<usize>());
        assert!(reply(beside).body.contains("[DONE]"));

        let body = json!({ "model": "demo", "input": model.encode("To be").unwrap(), "encoding_format": "base64", "dimensions": 2 });
        let (_, answer) = server.post("/v1/embeddings", &body);
        // Two float32 numbers are eight bytes.
        assert_eq!(answer["data"][0]["embedding"].as_str().map(str::len), Some(12), "{answer}");
    }
    let server = Running::new(|options| ServeOptions { pooling: Some(Pooling::Mean), ..options });
    for (body, param) in [
        (json!({ "model": "demo" }), "input"),
        (json!({ "model": "demo", "input": [] }), "input"),
        (json!({ "model": "demo", "input": "a", "dimension": 3 }), "dimension"),
        (json!({ "model": "demo", "input": "a", "encoding_format": "hex" }), "encoding_format"),
        (json!({ "model": "demo", "input": "a", "dimensions": 1_000_000 }), "dimensions"),
    ] {
        let (status, answer) = server.post("/v1/embeddings", &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{body}: {answer}");
    }
}
