//! `/v1/responses`

use kiln::{ChatTemplate, Message};
use kiln_serve::ServeOptions;
use serde_json::{Value, json};

use crate::{
    Running,
    chat::{answer_alone, thinking, weather},
};

fn ask(extra: Value) -> Value {
    let mut body =
        json!({ "model": "demo", "max_output_tokens": 20, "temperature": 0, "input": "What news?" });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[test]
fn responses_are_those_of_the_model_alone_and_are_kept_for_the_next() {
    let server = Running::new(|options| ServeOptions { template: Some(ChatTemplate::chatml()), ..options });
    let template = ChatTemplate::chatml();
    let mut messages = vec![Message::new("system", "Be brief."), Message::new("user", "What news?")];
    let want = answer_alone(&template, messages.clone(), 20);
    let body = ask(json!({ "instructions": "Be brief.", "metadata": { "a": "b" } }));
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    let item = &answer["output"][0];
    assert_eq!((&item["type"], &item["content"][0]["text"]), (&json!("message"), &json!(want)));
    assert_eq!(
        (&answer["status"], &answer["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    assert_eq!((&answer["usage"]["output_tokens"], &answer["metadata"]["a"]), (&json!(20), &json!("b")));

    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.json_events("/v1/responses", &streamed);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(
        kinds[kinds.len() - 4..],
        [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete"
        ]
    );
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, want);
    let last = &events.last().unwrap()["response"];
    assert_eq!(
        (&last["output"][0]["content"], &last["usage"]["input_tokens"]),
        (&item["content"], &answer["usage"]["input_tokens"])
    );

    // The next one has the answer, and instructions of its own.
    let id = answer["id"].as_str().unwrap();
    messages[0] = Message::new("system", "Be long.");
    messages.extend([Message::new("assistant", &want), Message::new("user", "And?")]);
    let body = ask(
        json!({ "instructions": "Be long.", "input": "And?", "previous_response_id": id, "store": false }),
    );
    let (status, next) = server.post("/v1/responses", &body);
    assert_eq!(
        (status, &next["output"][0]["content"][0]["text"]),
        (200, &json!(answer_alone(&template, messages, 20))),
        "{next}"
    );
    assert_eq!(server.get(&format!("/v1/responses/{id}")), (200, answer.clone()));
    assert_eq!(server.get(&format!("/v1/responses/{}", next["id"].as_str().unwrap())).0, 404);
    assert_eq!(server.delete(&format!("/v1/responses/{id}")).1["deleted"], true);
    assert_eq!(server.post("/v1/responses", &body).0, 404);
}

#[test]
fn calls_and_reasoning_are_items() {
    let server = Running::new(|options| ServeOptions { template: Some(thinking()), ..options });
    let mut tool = weather(true)["function"].clone();
    tool["type"] = json!("function");
    let tools = json!({ "tools": [tool], "tool_choice": { "type": "function", "name": "weather" }, "max_output_tokens": 200 });
    let (status, answer) = server.post("/v1/responses", &ask(tools.clone()));
    assert_eq!(status, 200, "{answer}");
    let call = &answer["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("weather")));
    let mut cut = ask(tools.clone());
    cut["max_output_tokens"] = json!(3);
    let (_, short) = server.post("/v1/responses", &cut);
    assert_eq!(
        (&short["status"], &short["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    let mut streamed = ask(tools);
    streamed["stream"] = json!(true);
    let events = server.json_events("/v1/responses", &streamed);
    let done = events.iter().find(|event| event["type"] == "response.function_call_arguments.done").unwrap();
    assert_eq!(done["arguments"], call["arguments"]);
    let told = events.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
    let told: Vec<&str> = told.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!((told.concat().as_str(), told.len() > 1), (call["arguments"].as_str().unwrap(), true));
    let output = json!({ "type": "function_call_output", "call_id": call["call_id"], "output": "Rain." });
    let body = ask(
        json!({ "input": [output], "previous_response_id": answer["id"], "tools": [tool], "tool_choice": "none" }),
    );
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!((status, &answer["output"][0]["type"]), (200, &json!("message")), "{answer}");

    let (status, answer) = server.post("/v1/responses", &ask(json!({ "reasoning": { "effort": "high" } })));
    assert_eq!((status, &answer["output"][0]["type"]), (200, &json!("reasoning")), "{answer}");
    assert_eq!(answer["usage"]["output_tokens_details"]["reasoning_tokens"], 20);
    for (extra, param) in [
        (json!({ "input": null }), "input"),
        (json!({ "input": [{ "type": "item_reference", "id": "a" }] }), "input[0].type"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "background": true }), "background"),
        (json!({ "truncation": "auto" }), "truncation"),
        (json!({ "include": ["file_search_call.results"] }), "include"),
        (json!({ "text": { "verbosity": "low" } }), "text.verbosity"),
        (json!({ "reasoning": { "summary": "concise" } }), "reasoning.summary"),
        (json!({ "previous_response_id": "none" }), "previous_response_id"),
        (json!({ "max_output_tokens": 0 }), "max_output_tokens"),
    ] {
        let (status, answer) = server.post("/v1/responses", &ask(extra.clone()));
        assert!([400, 404].contains(&status) && answer["error"]["param"] == param, "{extra}: {answer}");
    }
}
