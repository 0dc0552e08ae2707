//! The tables of fields know every field of OpenAI's package.

use kiln_serve::fields::{CHAT, COMMON, COMPLETIONS};

#[test]
fn every_field_of_openai_is_in_a_table() {
    let lines = include_str!("openai-fields.txt").lines().filter(|line| !line.starts_with('#'));
    let fields: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once(' ')).collect();
    assert!(fields.contains(&("chat", "messages")) && fields.contains(&("completions", "prompt")));
    let is_known = |(endpoint, field): &(&str, &str)| {
        let own = if *endpoint == "chat" { CHAT } else { COMPLETIONS };
        own.iter().chain(COMMON).any(|(known, _)| known == field)
    };
    let unknown: Vec<_> = fields.iter().filter(|field| !is_known(field)).collect();
    assert!(unknown.is_empty(), "in no table: {unknown:?}");
}
