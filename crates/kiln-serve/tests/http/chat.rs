//! `/v1/chat/completions`

use kiln::{ChatTemplate, Conversation, Message, expert::RenderOptions};
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{MODEL, Running};

/// The answer of the model alone.
pub(crate) fn answer_alone(template: &ChatTemplate, messages: Vec<Message>, tokens: usize) -> String {
    let conversation = Conversation { messages, ..Conversation::default() };
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let request = MODEL.answer(template, &conversation, &options).unwrap();
    request.max_new_tokens(tokens).temperature(0.0).text().unwrap()
}

#[test]
fn a_chat_is_answered_as_by_the_model_alone() {
    let server = Running::new(|options| ServeOptions { template: Some(ChatTemplate::chatml()), ..options });
    let messages = vec![Message::new("system", "Be brief."), Message::new("user", "What news\nfrom Rome?")];
    let want = answer_alone(&ChatTemplate::chatml(), messages, 20);
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

/// A template that tells of tools and begins with reasoning if it is asked to.
pub(crate) fn thinking() -> ChatTemplate {
    let source = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
                  {% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}\n\
                  {% endfor %}ROMEO:{% if enable_thinking %}<think>{% endif %}{% if no %}</think>{% endif %}";
    ChatTemplate::new(source).unwrap()
}

pub(crate) fn weather(strict: bool) -> Value {
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
        let arguments_of = |function: &Value| function["arguments"].as_str().unwrap().to_owned();
        let arguments: Value = serde_json::from_str(&arguments_of(function)).unwrap();
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
        let pieces =
            |name: &str| told.iter().filter_map(|call| call["function"][name].as_str()).collect::<String>();
        assert_eq!((pieces("name"), pieces("arguments")), ("weather".to_owned(), arguments_of(function)));
        assert!(
            told.iter().all(|call| call["index"] == 0)
                && told[0]["id"].is_string()
                && told[1..].iter().all(|call| call.get("id").is_none())
        );
        // The arguments of a function that is named are told as they come.
        assert_eq!(told.len() > 1, choice.is_object());
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
fn strict_tools_are_called_with_arguments_that_match_or_not_at_all() {
    let server = Running::new(|options| ServeOptions { template: Some(thinking()), ..options });
    let brace = *MODEL.encode_more("{").unwrap().last().unwrap();
    let ask = |bias: Value| {
        let body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "Rain?" }], "tools": [weather(true)],
            "temperature": 1, "seed": 3, "max_tokens": 100, "logit_bias": bias, "parallel_tool_calls": false,
        });
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    };
    // The model would begin with a brace, so it has to call.
    let calls = ask(json!({ brace.to_string(): 100 }));
    assert_eq!(calls["finish_reason"], "tool_calls", "{calls}");
    let function = &calls["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert!(["Rome", "Verona"].contains(&arguments["city"].as_str().unwrap()), "{function}");
    let text = ask(json!({}));
    assert!(text["message"].get("tool_calls").is_none() && text["message"]["content"] != "", "{text}");

    // A family that writes XML.
    let xml = ChatTemplate::new("{{ tools }}{{ messages }}<tool_call><function=").unwrap();
    let server = Running::new(|options| ServeOptions { template: Some(xml), ..options });
    let body = json!({
        "model": "demo", "messages": [{ "role": "user", "content": "Rain?" }], "tools": [weather(true)], "max_tokens": 4,
    });
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "{answer}");
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
