//! Grammars of answers with strict calls.

use serde_json::json;

use super::{Tokenizer, accepts, demo, table};
use crate::{AnswerFormat, ChatTemplate};

fn format(template: &str) -> AnswerFormat {
    AnswerFormat::of(&ChatTemplate::new(template).unwrap())
}

/// Whether an answer matches, of a family with text as marks.
fn matches(template: &str, parallel: bool, text: &str) -> bool {
    let format = format(template);
    let arguments = json!({
        "type": "object", "properties": { "city": { "enum": ["Rome", "Verona"] } }, "required": ["city"],
        "additionalProperties": false,
    });
    let schema = json!({
        "type": "object", "properties": { "name": { "const": "weather" }, format.arguments_key(): arguments },
        "required": ["name", format.arguments_key()], "additionalProperties": false,
        "x-guidance": { "whitespace_flexible": false, "key_separator": ": ", "item_separator": ", " },
    });
    let grammar = format.strict_grammar(&schema, parallel, |_| None).unwrap().unwrap();
    accepts(grammar.compile(&table()).unwrap(), text)
}

#[test]
fn calls_match_their_schemas_and_text_is_free() {
    let hermes = "{{ tools }}<tool_call></tool_call>";
    let call = r#"<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>"#;
    let bare = r#"{"name": "weather", "arguments": {"city": "Verona"}}"#;
    for (text, parallel, want) in [
        ("".to_owned(), true, true),
        ("It rains.\n<b>".to_owned(), true, true),
        (call.to_owned(), true, true),
        (format!("Let me see.\n{call}"), true, true),
        (format!("{call}\nand\n{call}"), true, true),
        (format!("{call}\nand\n{call}"), false, false),
        (format!("{call}\nThat is all <tool"), false, true),
        (bare.to_owned(), false, true),
        (format!("{bare}\n{bare}"), true, true),
        (call.replace("Rome", "Paris"), true, false),
        (call.replace("weather", "wether"), true, false),
        (bare.replace("Verona", "Paris"), true, false),
        // Without marks, JSON is a call.
        (r#"{"a": 1}"#.to_owned(), true, false),
        (r#"So: {"a": 1}"#.to_owned(), true, true),
        // A call that does not end.
        (call.replace("</tool_call>", ""), true, false),
    ] {
        assert_eq!(matches(hermes, parallel, &text), want, "{parallel} {text}");
    }
    let llama = "{{ tools }}<|python_tag|>";
    let call = r#"{"name": "weather", "parameters": {"city": "Rome"}}"#;
    for (text, want) in [
        (call.to_owned(), true),
        (format!("<|python_tag|>{call}"), true),
        ("It rains.".to_owned(), true),
        (call.replace("parameters", "arguments"), false),
    ] {
        assert_eq!(matches(llama, true, &text), want, "{text}");
    }
    let mistral = "{{ tools }}[TOOL_CALLS]";
    let call = r#"{"name": "weather", "arguments": {"city": "Rome"}}"#;
    for (text, parallel, want) in [
        (format!("[TOOL_CALLS][{call}]"), true, true),
        (format!("[TOOL_CALLS][{call}, {call}]"), true, true),
        (format!("[TOOL_CALLS][{call}, {call}]"), false, false),
        (r#"{"a": 1}"#.to_owned(), true, true),
        (format!("[TOOL_CALLS]{call}"), true, false),
    ] {
        assert_eq!(matches(mistral, parallel, &text), want, "{parallel} {text}");
    }
    for other in [
        "{{ tools }}<tool_call><function=",
        "{{ tools }}[TOOL_CALLS][ARGS]",
        "{{ tools }}<|tool_call_start|>",
    ] {
        assert_eq!(
            format(other).strict_grammar(&json!({}), true, |_| None).unwrap().map(|_| ()),
            None,
            "{other}"
        );
    }
}

#[test]
fn marks_may_be_special_tokens() {
    let tokenizer: &Tokenizer = &demo();
    // A token that the demo model has, in the place of the marks.
    let pad = tokenizer.inner().token_to_id("<pad>").unwrap();
    let format = format("{{ tools }}<tool_call></tool_call><think></think>");
    let schema = json!({ "const": 1 });
    let special = |mark: &str| (mark != "<tool_call>" && mark != "</tool_call>").then_some(pad);
    let grammar = format.strict_grammar(&schema, true, special).unwrap().unwrap();
    assert!(accepts(grammar.compile(&table()).unwrap(), "It rains."));
    let mut row = grammar.compile(&table()).unwrap();
    let token = |text: &str| tokenizer.encode(text, false).unwrap();
    for id in [vec![pad], token("Rain?"), vec![pad], token("Yes.")].concat() {
        assert!(row.accept(id).is_ok(), "{id}");
    }
}
