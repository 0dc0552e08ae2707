//! ollama's API

use kiln::{ChatTemplate, Message, Pooling};
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{
    MODEL, Running,
    chat::{answer_alone, thinking, weather},
    reply,
};

fn options() -> Value {
    json!({ "num_predict": 20, "temperature": 0 })
}

#[test]
fn chats_and_texts_are_those_of_the_model_alone() {
    let server = Running::new(|options| ServeOptions { template: Some(ChatTemplate::chatml()), ..options });
    let messages = vec![Message::new("system", "Be brief."), Message::new("user", "What news?")];
    let want = answer_alone(&ChatTemplate::chatml(), messages, 20);
    let body = json!({
        "model": "demo:latest", "options": options(),
        "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "What news?" }],
    });
    let answer = reply(server.post_raw("/api/chat", &body));
    assert!(answer.headers.contains("content-type: application/x-ndjson"), "{}", answer.headers);
    let lines: Vec<Value> = answer.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let text: String = lines.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
    assert_eq!(text, want);
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(20))
    );
    assert!(
        last["created_at"].as_str().unwrap().ends_with('Z') && last["total_duration"].as_u64() > Some(0),
        "{last}"
    );
    let mut whole = body;
    whole["stream"] = json!(false);
    assert_eq!(server.post("/api/chat", &whole).1["message"]["content"], want);
    let (_, answer) = server.post("/api/generate", &json!({
        "model": "demo", "prompt": "What news?", "system": "Be brief.", "stream": false, "options": options(),
    }));
    assert_eq!(answer["response"], want);
    let raw = MODEL.generate("ROMEO:").max_new_tokens(20).temperature(0.0).text().unwrap();
    let (_, answer) = server.post("/api/generate", &json!({
        "model": "demo", "prompt": "ROMEO:", "raw": true, "stream": false, "options": options(), "logprobs": true,
    }));
    assert_eq!((&answer["response"], answer["logprobs"].as_array().unwrap().len()), (&json!(raw), 20));
    // The context bounds the prompt and the answer.
    let tokens = MODEL.encode("ROMEO:").unwrap().len();
    let (_, answer) = server.post("/api/generate", &json!({
        "model": "demo", "prompt": "ROMEO:", "raw": true, "stream": false, "options": { "num_ctx": tokens + 5 },
    }));
    assert_eq!((&answer["eval_count"], &answer["prompt_eval_count"]), (&json!(5), &json!(tokens)));
    let (_, answer) = server.post(
        "/api/generate",
        &json!({
            "model": "demo", "prompt": "a", "format": { "enum": ["Rome", "Verona"] }, "stream": false,
        }),
    );
    assert!(["\"Rome\"", "\"Verona\""].contains(&answer["response"].as_str().unwrap()), "{answer}");
}

#[test]
fn tools_thinking_and_models() {
    let change =
        |options| ServeOptions { template: Some(thinking()), pooling: Some(Pooling::Mean), ..options };
    let server = Running::new(change);
    let ask = |extra: Value| {
        let mut body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "Why?" }], "stream": false, "options": options(),
        });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        server.post("/api/chat", &body)
    };
    let (_, thinks) = ask(json!({ "think": true }));
    assert!(thinks["message"]["thinking"].is_string() && thinks["message"]["content"] == "", "{thinks}");
    let (_, plain) = ask(json!({ "think": false }));
    assert!(plain["message"].get("thinking").is_none() && plain["message"]["content"] != "", "{plain}");
    let call = json!({ "function": { "name": "weather", "arguments": { "city": "Rome" } } });
    let (status, answer) = ask(json!({ "tools": [weather(false)], "messages": [
        { "role": "user", "content": "Rain?" }, { "role": "assistant", "tool_calls": [call] },
        { "role": "tool", "tool_name": "weather", "content": "Rain." },
    ] }));
    assert_eq!(status, 200, "{answer}");

    assert_eq!(server.get("/api/tags").1["models"][0]["name"], "demo");
    assert_eq!(server.get("/api/ps").1["models"][0]["context_length"], MODEL.sizes().positions);
    let (_, shown) = server.post("/api/show", &json!({ "model": "demo" }));
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking", "embedding"]));
    assert_eq!(server.get("/api/version").1["version"], env!("CARGO_PKG_VERSION"));
    let want = MODEL.embed(["To be"]).pooling(Pooling::Mean).run().unwrap();
    let (_, answer) = server.post("/api/embed", &json!({ "model": "demo", "input": "To be" }));
    assert_eq!(
        (
            serde_json::from_value::<Vec<Vec<f32>>>(answer["embeddings"].clone()).unwrap(),
            &answer["prompt_eval_count"]
        ),
        (want.vectors.clone(), &json!(want.tokens[0]))
    );
    let (_, answer) = server.post("/api/embeddings", &json!({ "model": "demo", "prompt": "To be" }));
    assert_eq!(serde_json::from_value::<Vec<f32>>(answer["embedding"].clone()).unwrap(), want.vectors[0]);
    // A text that is too long is cut.
    let long = "word ".repeat(3000);
    let (status, _) = server.post("/api/embed", &json!({ "model": "demo", "input": long }));
    let (refused, _) =
        server.post("/api/embed", &json!({ "model": "demo", "input": long, "truncate": false }));
    assert_eq!((status, refused), (200, 400));
    let (_, answer) = server.post("/api/generate", &json!({ "model": "demo" }));
    assert_eq!((&answer["done_reason"], &answer["response"]), (&json!("load"), &json!("")));

    for (extra, status, part) in [
        (json!({ "model": "other" }), 404, "`other`"),
        (json!({ "options": { "mirostat": 2 } }), 400, "mirostat"),
        (json!({ "options": { "tempreature": 1 } }), 400, "`temperature`"),
        (json!({ "options": { "num_ctx": 1_000_000 } }), 400, "num_ctx"),
        (json!({ "options": { "num_predict": -7 } }), 400, "num_predict"),
        (json!({ "options": { "repeat_penalty": 1.1, "repeat_last_n": 64 } }), 400, "repeat_last_n"),
        (json!({ "format": "yaml" }), 400, "format"),
        (json!({ "keep_alive": "soon" }), 400, "keep_alive"),
        (
            json!({ "messages": [{ "role": "user", "content": "a", "images": ["aGk="] }] }),
            400,
            "messages[0].images",
        ),
    ] {
        let (found, answer) = ask(extra.clone());
        let message = answer["error"].as_str().unwrap_or_default();
        assert!(found == status && message.contains(part), "{extra}: {found} {answer}");
    }
    let (status, answer) = server.post("/api/pull", &json!({ "model": "llama3" }));
    assert!(status == 403 && answer["error"].is_string(), "{answer}");
}
