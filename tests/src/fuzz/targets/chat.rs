//! Chat templates with fixed conversations, and conversations with fixed templates.

use std::{collections::BTreeMap, fs, path::Path, time::SystemTime};

use kiln::{ChatTemplate, Conversation, expert::RenderOptions};
use serde_json::{Value, json};

use crate::fuzz::{Run, Target, mutate::Format};

pub(in crate::fuzz) const TEMPLATE: Target = Target {
    name: "chat_template",
    format: Format::Jinja,
    seeds: templates,
    prepare: templates_of_strangers,
};

pub(in crate::fuzz) const CONVERSATION: Target = Target {
    name: "conversation",
    format: Format::Json,
    seeds: conversations,
    prepare: conversations_of_users,
};

fn data(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/chat_templates").join(name)
}

fn sources() -> Vec<String> {
    let mut paths: Vec<_> = fs::read_dir(data("")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let templates = paths.iter().filter(|path| path.extension().is_some_and(|name| name == "jinja"));
    templates.map(|path| fs::read_to_string(path).unwrap()).collect()
}

fn templates() -> Vec<Vec<u8>> {
    let expressions = fs::read_to_string(data("expressions.txt")).unwrap();
    let expressions = expressions.lines().map(|line| format!("{{{{ {line} }}}}{{{{ messages }}}}"));
    // About as many expressions as templates, which are longer.
    sources().into_iter().chain(expressions.step_by(9)).map(String::into_bytes).collect()
}

fn conversations() -> Vec<Vec<u8>> {
    let cases: Value = serde_json::from_slice(&fs::read(data("cases.json")).unwrap()).unwrap();
    cases["conversations"].as_object().unwrap().values().map(|told| told.to_string().into_bytes()).collect()
}

fn special_tokens() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")]
        .map(|(name, token)| (name.to_owned(), token.to_owned()))
        .into()
}

/// Returns the two sets of options for rendering a prompt.
fn options() -> [RenderOptions; 2] {
    let now = Some(SystemTime::UNIX_EPOCH);
    [
        RenderOptions { add_generation_prompt: true, continue_final: None, now },
        RenderOptions { add_generation_prompt: false, continue_final: Some("content".into()), now },
    ]
}

fn templates_of_strangers(_: &Path) -> Run {
    let wanted = ["several_turns", "continued", "parts", "tool_call"];
    let cases: Value = serde_json::from_slice(&fs::read(data("cases.json")).unwrap()).unwrap();
    let told: Vec<Conversation> = wanted
        .iter()
        .map(|name| serde_json::from_value(cases["conversations"][name].clone()).unwrap())
        .collect();
    Box::new(move |input| {
        let Ok(template) = ChatTemplate::new(&String::from_utf8_lossy(input)) else { return false };
        // Only one of each: a template may take seconds to reach its step limit.
        let (told, options) = (&told[input.len() % told.len()], &options()[input.len() / told.len() % 2]);
        template.render(told, &special_tokens(), options).is_ok()
    })
}

fn conversations_of_users(_: &Path) -> Run {
    let templates: Vec<ChatTemplate> = sources()
        .iter()
        .filter_map(|source| ChatTemplate::new(source).ok())
        .chain([ChatTemplate::chatml()])
        .collect();
    Box::new(move |input| {
        let Ok(conversation) = serde_json::from_slice::<Conversation>(input) else { return false };
        _ = json!(conversation).to_string();
        templates.iter().fold(false, |any, template| {
            let made = options().map(|options| template.render(&conversation, &special_tokens(), &options));
            any | made.iter().any(Result::is_ok)
        })
    })
}
