#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use serde_json::{Value, json};

use super::{AnswerFormat, AnswerPart, ToolCall};

/// The parts of a text that comes in pieces of `size` characters, with neighbours of a kind joined.
fn parts(format: &AnswerFormat, prompt: &str, tools: &[Value], text: &str, size: usize) -> Vec<AnswerPart> {
    let mut parser = format.parser(prompt, tools);
    let chars: Vec<char> = text.chars().collect();
    let pieces = chars.chunks(size).map(|piece| piece.iter().collect::<String>());
    let mut all: Vec<AnswerPart> = pieces.flat_map(|piece| parser.push(&piece)).collect();
    all.extend(parser.finish());
    all.into_iter().fold(Vec::new(), |mut joined, part| {
        match (joined.last_mut(), part) {
            (Some(AnswerPart::Content(text)), AnswerPart::Content(more))
            | (Some(AnswerPart::Reasoning(text)), AnswerPart::Reasoning(more)) => text.push_str(&more),
            (Some(AnswerPart::Call(call)), AnswerPart::Arguments(more)) => call.arguments.push_str(&more),
            (_, part) => joined.push(part),
        }
        joined
    })
}

/// Checks that a text has these parts, in pieces of any size.
fn check(template: &str, prompt: &str, text: &str, wanted: &[AnswerPart]) {
    let format = AnswerFormat::of_source(&format!("{template} {{% for tool in tools %}}"));
    let parameters = json!({ "properties": { "n": { "type": "integer" }, "city": { "type": "string" } } });
    let tools = [json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } })];
    for size in 1..=text.chars().count().max(1) {
        assert_eq!(parts(&format, prompt, &tools, text, size), wanted, "{text} in pieces of {size}");
    }
}

fn content(text: &str) -> AnswerPart {
    AnswerPart::Content(text.to_owned())
}

fn reasoning(text: &str) -> AnswerPart {
    AnswerPart::Reasoning(text.to_owned())
}

fn call(name: &str, arguments: &str) -> AnswerPart {
    AnswerPart::Call(ToolCall { name: name.to_owned(), arguments: arguments.to_owned() })
}

fn weather() -> AnswerPart {
    call("weather", r#"{"city": "Rome", "n": 2}"#)
}

#[test]
fn calls_of_each_family_are_read_in_pieces_of_any_size() {
    let json = r#"{"name": "weather", "arguments": {"city": "Rome", "n": 2}}"#;
    let compact = call("weather", r#"{"city":"Rome","n":2}"#);
    let hermes = "<tool_call> </tool_call>";
    check(hermes, "", &format!("<tool_call>\n{json}\n</tool_call>"), &[weather()]);
    check(
        hermes,
        "",
        &format!("I look.\n<tool_call>\n{json}\n</tool_call>\n<tool_call>{json}</tool_call>"),
        &[content("I look."), weather(), weather()],
    );
    let coder = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=n>\n2\n</parameter>\n\
                 </function>\n</tool_call>";
    check(hermes, "", coder, std::slice::from_ref(&compact));
    let glm = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>n</arg_key>\n\
               <arg_value>2</arg_value>\n</tool_call>";
    check(hermes, "", glm, std::slice::from_ref(&compact));
    // Some models forget the marks.
    check(hermes, "", json, &[weather()]);
    check(hermes, "", "{\"name\": \"Rome\"}", &[content("{\"name\": \"Rome\"}")]);
    check("[TOOL_CALLS]", "", &format!("[TOOL_CALLS] [{json}]"), &[weather()]);
    let new = r#"[TOOL_CALLS]weather[ARGS]{"city": "Rome", "n": 2}[TOOL_CALLS]other[CALL_ID]a1[ARGS]{}"#;
    check("[TOOL_CALLS]", "", new, &[weather(), call("other", "{}")]);
    let llama = r#"{"name": "weather", "parameters": {"city": "Rome", "n": 2}}"#;
    check("<|python_tag|>", "", llama, &[weather()]);
    check("<|python_tag|>", "", &format!("<|python_tag|>{llama}; {llama}"), &[weather(), weather()]);
    check("<|tool_call|>", "", &format!("<|tool_call|>[{json}]<|/tool_call|>"), &[weather()]);
    check("<|tool_call|>", "", &format!("<|tool_call|>[{json}]"), &[weather()]);
    check("<tool_calls>", "", &format!("<tool_calls>[{json}]</tool_calls>"), &[weather()]);
    let deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Rome\", \
                    \"n\": 2}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Rome\", \"n\": \
                    2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check("<｜tool▁calls▁begin｜>", "", deepseek, &[weather(), weather()]);
    let lfm = r#"<|tool_call_start|>[weather(city="Rome", n=2), f(a=[True, None], b={'k': -1.5})]<|tool_call_end|>Wait."#;
    let f = call("f", r#"{"a":[true,null],"b":{"k":-1.5}}"#);
    check("<|tool_call_start|>", "", lfm, &[compact, f, content("Wait.")]);
}

#[test]
fn arguments_are_told_while_they_are_written() {
    let format = AnswerFormat::of_source("<tool_call> tools");
    let mut parser = format.parser("", &[json!({ "name": "write" })]);
    let arguments = |text: &str| AnswerPart::Arguments(text.to_owned());
    assert_eq!(parser.push("<tool_call>\n{\"name\": \"write\", \"arguments\": "), []);
    assert_eq!(parser.push("{\"text\": \"}"), [call("write", "{\"text\": \"}")]);
    assert_eq!(parser.push("</tool_call> \\\""), [arguments("</tool_call> \\\"")]);
    assert_eq!(parser.push("\", \"n\": [{}]"), [arguments("\", \"n\": [{}]")]);
    assert_eq!(parser.push("}, \"id\": 3}\n</tool_call>So."), [arguments("}"), content("So.")]);
    assert_eq!(parser.finish(), []);
    // Of an answer that was cut off.
    let text = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": ";
    check("<tool_call>", "", text, &[call("weather", "{\"city\": ")]);
    let text = "[TOOL_CALLS]weather[ARGS]{\"city\": \"Ro";
    check("[TOOL_CALLS]", "", text, &[call("weather", "{\"city\": \"Ro")]);
    let text = "<|channel|>commentary to=functions.weather<|message|> {\"city\": \"<|end|>";
    check("<|channel|>", "", text, &[call("weather", "{\"city\": \"<|end|>")]);
    // Braces too many or too few, and what else may follow a call.
    let hermes = |body: &str| format!("<tool_call>{body}</tool_call>So.");
    let written = r#"{"name": "weather", "arguments": {"n": 2}"#;
    let other = r#"{"name": "other"}"#;
    let two = call("weather", r#"{"n": 2}"#);
    for (text, more) in [
        (hermes(&format!("{written}}}}}")), vec![]),
        (hermes(written), vec![]),
        (hermes(&format!("{written}}} Done.")), vec![content("Done.")]),
        (hermes(&format!("{written}}}, {other}]")), vec![call("other", "{}")]),
        (hermes(&format!("{written}}}\n{other}")), vec![call("other", "{}")]),
        (hermes(&format!("{written}}}<function=other>")), vec![call("other", "{}")]),
    ] {
        let wanted: Vec<AnswerPart> = [vec![two.clone()], more, vec![content("So.")]]
            .concat()
            .into_iter()
            .fold(Vec::new(), |mut all, part| {
                match (all.last_mut(), &part) {
                    (Some(AnswerPart::Content(text)), AnswerPart::Content(more)) => text.push_str(more),
                    _ => all.push(part),
                }
                all
            });
        check("<tool_call>", "", &text, &wanted);
    }
    let text =
        format!("<tool_call>{}</tool_call><tool_call>{written}}}</tool_call>", &written[..written.len() - 1]);
    check("<tool_call>", "", &text, &[call("weather", r#"{"n": 2"#), two.clone()]);
    let text =
        format!("<|tool_call|>[{written}}}, {{\"arguments\": {{}}, \"name\": \"other\"}}]<|/tool_call|>");
    check("<|tool_call|>", "", &text, &[two, call("other", "{}")]);
    let text = format!("[TOOL_CALLS] [{written}}}, {other}]");
    check("[TOOL_CALLS]", "", &text, &[call("weather", r#"{"n": 2}"#), call("other", "{}")]);
    let text = "<|channel|>commentary to=functions.weather<|message|>{\"n\": 2} so<|call|>";
    check("<|channel|>", "", text, &[call("weather", "{\"n\": 2}"), content("so")]);
    // Text after a call is not lost.
    let text = "<tool_call>{\"name\": \"weather\", \"arguments\": {}} and so</tool_call>";
    check("<tool_call>", "", text, &[call("weather", "{}"), content("and so")]);
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let both = "<think> </think> <tool_call>";
    let wanted = [reasoning("Hm,\nso."), content("Yes.")];
    check(both, "<|im_start|>assistant\n", "<think>\nHm,\nso.\n</think>\n\nYes.", &wanted);
    check(both, "<|im_start|>assistant\n<think>\n", "Hm,\nso.\n</think>\n\nYes.", &wanted);
    check(both, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes.", &[content("Yes.")]);
    check(both, "<think>", "Hm", &[reasoning("Hm")]);
    check("[THINK] [/THINK]", "", "[THINK]Hm[/THINK]Yes.", &[reasoning("Hm"), content("Yes.")]);
    let json = r#"{"name": "weather", "arguments": {"city": "Rome", "n": 2}}"#;
    let text = format!("<think>a < b</think><tool_call>{json}</tool_call>");
    check(both, "", &text, &[reasoning("a < b"), weather()]);
}

#[test]
fn messages_of_gpt_oss_are_read_by_their_channels() {
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
                <|constrain|>json<|message|>{\"city\": \"Rome\", \"n\": 2}<|call|>";
    check("<|channel|>", "<|start|>assistant", text, &[reasoning("Hm."), weather()]);
    let text =
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes,  so.";
    check("<|channel|>", "<|start|>assistant", text, &[reasoning("Hm."), content("Yes,  so.")]);
}

#[test]
fn text_that_is_no_call_is_not_lost() {
    let hermes = "<tool_call>";
    for text in [
        "1 < 2, <tool> and <tool_cal",
        "<tool_call>{\"name\": 3}</tool_call> and more",
        "<tool_call>{\"name\": \"weather\", \"arguments\": [\"city\"",
        "<tool_call>{\"name\": \"weather\", \"arguments\": ",
        "<tool_call></tool_call>",
        "<tool_call>not a call</tool_call>",
    ] {
        let format = AnswerFormat::of_source("<tool_call> tools");
        for size in 1..=text.len() {
            let got = parts(&format, "", &[json!({ "name": "weather" })], text, size);
            let told: String = got
                .iter()
                .map(|part| match part {
                    AnswerPart::Content(text) => text.as_str(),
                    other => panic!("{other:?}"),
                })
                .collect();
            // White space after a mark may be missing.
            let squeezed = |text: &str| text.split_whitespace().collect::<String>();
            assert_eq!(squeezed(&told), squeezed(text));
        }
    }
    check(hermes, "", " Text.  \n", &[content(" Text.  \n")]);
    check("<think> </think>", "", "\n<think>Hm</think>\nYes.", &[reasoning("Hm"), content("Yes.")]);
    check("<|python_tag|>", "", "So: {\"name\": \"weather\"}", &[content("So: {\"name\": \"weather\"}")]);
    check("<|python_tag|>", "", "{\"a\": 1}", &[content("{\"a\": 1}")]);
    check(
        "<|tool_call_start|>",
        "",
        "<|tool_call_start|>[f(a=]<|tool_call_end|>",
        &[content("<|tool_call_start|>[f(a=]<|tool_call_end|>")],
    );
    let deep = format!("<tool_call>{}{}</tool_call>", "[".repeat(100_000), "]".repeat(100_000));
    let format = AnswerFormat::of_source("<tool_call> tools");
    assert_eq!(parts(&format, "", &[json!({ "name": "f" })], &deep, deep.len()), [content(&deep)]);
    check("<|channel|>", "<|start|>assistant", "Plain.", &[content("Plain.")]);
    // Without tools, nothing is a call.
    let format = AnswerFormat::of_source("<tool_call> tools");
    let text = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
    assert_eq!(parts(&format, "", &[], text, 7), [content(text)]);
    assert!(!AnswerFormat::of_source("{{ messages }}").is_marked());
}
