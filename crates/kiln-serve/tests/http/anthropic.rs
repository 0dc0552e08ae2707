//! Anthropic's `/v1/messages`

use kiln::{ChatTemplate, Conversation, Message, expert::RenderOptions};
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{
    MODEL, Reply, Running,
    chat::{answer_alone, thinking},
    reply,
};

/// The city of the weather, as Anthropic's tools have it.
fn weather() -> Value {
    let tool = crate::chat::weather(false);
    json!({ "name": "weather", "input_schema": tool["function"]["parameters"], "cache_control": { "type": "ephemeral" } })
}

fn ask(extra: Value) -> Value {
    let mut body = json!({
        "model": "demo", "max_tokens": 20, "temperature": 0, "messages": [{ "role": "user", "content": "What news?" }],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn messages_are_answered_as_by_the_model_alone() {
    let server = Running::new(|options| ServeOptions { template: Some(ChatTemplate::chatml()), ..options });
    let messages = vec![Message::new("system", "Be brief."), Message::new("user", "What news\nfrom Rome?")];
    let want = answer_alone(&ChatTemplate::chatml(), messages, 20);
    let user = json!([{ "type": "text", "text": "What news" }, { "type": "text", "text": "from Rome?" }]);
    let body = ask(json!({
        "system": [{ "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } }],
        "messages": [{ "role": "user", "content": user }],
        "metadata": { "user_id": "me" },
    }));
    let (status, answer) = server.post("/v1/messages?beta=true", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["content"], json!([{ "type": "text", "text": want }]));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    let (_, counted) = server.post(
        "/v1/messages/count_tokens",
        &json!({
            "model": "demo", "system": "Be brief.", "messages": [{ "role": "user", "content": user }],
        }),
    );
    assert_eq!(
        (&counted["input_tokens"], &answer["usage"]["output_tokens"]),
        (&answer["usage"]["input_tokens"], &json!(20))
    );

    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.json_events("/v1/messages", &streamed);
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, want);
    let last = &events[events.len() - 2];
    assert_eq!((&last["delta"]["stop_reason"], &last["usage"]), (&json!("max_tokens"), &answer["usage"]));
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], answer["usage"]["input_tokens"]);

    // A stop sequence, and a beginning of the answer.
    let stop: String = want.chars().skip(6).take(2).collect();
    let body = ask(json!({
        "system": "Be brief.", "messages": [{ "role": "user", "content": user }], "stop_sequences": [stop],
    }));
    let (_, answer) = server.post("/v1/messages", &body);
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    let begin: String = want.chars().take(6).collect();
    let messages = vec![
        Message::new("system", "Be brief."),
        Message::new("user", "What news\nfrom Rome?"),
        Message::new("assistant", &begin),
    ];
    let conversation = Conversation { messages, ..Conversation::default() };
    let options = RenderOptions { continue_final: Some("content".to_owned()), ..RenderOptions::default() };
    let alone = MODEL.answer(&ChatTemplate::chatml(), &conversation, &options).unwrap();
    let body = ask(json!({
        "system": "Be brief.",
        "messages": [{ "role": "user", "content": user }, { "role": "assistant", "content": begin }],
    }));
    let (_, answer) = server.post("/v1/messages", &body);
    assert_eq!(answer["content"][0]["text"], alone.max_new_tokens(20).temperature(0.0).text().unwrap());
}

#[test]
fn tools_and_thinking_are_blocks() {
    let server = Running::new(|options| ServeOptions { template: Some(thinking()), ..options });
    let tools = json!({
        "tools": [weather()], "tool_choice": { "type": "tool", "name": "weather", "disable_parallel_tool_use": true },
        "max_tokens": 200,
    });
    let (status, answer) = server.post("/v1/messages", &ask(tools.clone()));
    assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
    let call = &answer["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")));
    assert!(["Rome", "Verona"].contains(&call["input"]["city"].as_str().unwrap()), "{call}");
    // A call that is cut off is no object, and so it is text.
    let mut cut = ask(tools.clone());
    cut["max_tokens"] = json!(3);
    let (_, short) = server.post("/v1/messages", &cut);
    assert_eq!((&short["stop_reason"], &short["content"][0]["type"]), (&json!("max_tokens"), &json!("text")));
    assert!(
        short["content"][0]["text"].as_str().unwrap().starts_with("{\"name\": \"weather\", \"arguments\": {")
    );
    let mut streamed = ask(tools);
    streamed["stream"] = json!(true);
    let events = server.json_events("/v1/messages", &streamed);
    let start = events.iter().find(|event| event["type"] == "content_block_start").unwrap();
    assert_eq!(
        (&start["content_block"]["name"], &start["content_block"]["input"]),
        (&json!("weather"), &json!({}))
    );
    let arguments: String =
        events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), call["input"]);

    // The next turn has the call and its result.
    let result = json!({ "type": "tool_result", "tool_use_id": call["id"], "content": [{ "type": "text", "text": "Rain." }] });
    let body = ask(json!({
        "tools": [weather()], "tool_choice": { "type": "none" },
        "messages": [
            { "role": "user", "content": "Rain?" },
            { "role": "assistant", "content": answer["content"] },
            { "role": "user", "content": [result, { "type": "text", "text": "And?" }] },
        ],
    }));
    let (status, answer) = server.post("/v1/messages", &body);
    assert_eq!((status, &answer["content"][0]["type"]), (200, &json!("text")), "{answer}");

    let thinks = |extra: Value| {
        let (status, answer) = server.post("/v1/messages", &ask(extra));
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let enabled = json!({ "type": "enabled", "budget_tokens": 1000 });
    let all = thinks(json!({ "thinking": enabled }));
    assert_eq!(
        (&all["content"][0]["type"], all["content"].as_array().unwrap().len()),
        (&json!("thinking"), 1),
        "{all}"
    );
    // After five tokens the mark that ends reasoning is forced.
    let cut = thinks(json!({ "thinking": { "type": "enabled", "budget_tokens": 5 }, "max_tokens": 40 }));
    let thought = cut["content"][0]["thinking"].as_str().unwrap();
    assert!(all["content"][0]["thinking"].as_str().unwrap().starts_with(thought), "{cut}");
    assert_eq!(cut["content"][1]["type"], "text", "{cut}");
    let plain = thinks(json!({ "thinking": { "type": "disabled" } }));
    assert_eq!(plain["content"][0]["type"], "text", "{plain}");
}

#[test]
fn what_is_wrong_is_named_in_the_form_of_anthropic() {
    let server = Running::new(|options| ServeOptions { keys: vec!["key".to_owned()], ..options });
    let post = |key: &str, body: &Value| {
        let head = format!(
            "POST /v1/messages HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nx-api-key: {key}",
            server.address
        );
        let Reply { status, headers, body } = reply(server.send(&head, &body.to_string()));
        assert!(headers.contains("request-id: req-"), "{headers}");
        (status, serde_json::from_str::<Value>(&body).unwrap())
    };
    let (status, answer) = post("none", &ask(json!({})));
    assert_eq!((status, &answer["error"]["type"]), (401, &json!("authentication_error")), "{answer}");
    assert_eq!(post("key", &ask(json!({}))).0, 200);
    let image = json!([{ "type": "image", "source": {} }]);
    for (extra, status, part) in [
        (json!({ "model": null }), 400, "model"),
        (json!({ "model": "claude" }), 404, "`claude`"),
        (json!({ "max_tokens": null }), 400, "max_tokens"),
        (json!({ "messages": [] }), 400, "messages"),
        (json!({ "messages": [{ "role": "user", "content": image }] }), 400, "messages[0].content"),
        (json!({ "messages": [{ "role": "robot", "content": "a" }] }), 400, "messages[0].role"),
        (json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }), 400, "tools[0].type"),
        (json!({ "tools": [weather()] }), 400, "tools"),
        (json!({ "tool_choice": { "type": "tool" } }), 400, "tool_choice"),
        (json!({ "thinking": { "type": "enabled", "budget_tokens": 9 } }), 400, "thinking"),
        (json!({ "thinking": { "type": "enabled" } }), 400, "thinking.budget_tokens"),
        (json!({ "container": "a" }), 400, "container"),
        (json!({ "max_token": 3 }), 400, "`max_tokens`"),
        (json!({ "temperature": 7 }), 400, "temperature"),
    ] {
        let (found, answer) = post("key", &ask(extra.clone()));
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(
            found == status && answer["type"] == "error" && message.contains(part),
            "{extra}: {found} {answer}"
        );
    }
}
