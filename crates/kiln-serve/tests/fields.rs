//! The tables of fields know every field of OpenAI's package.

use kiln_serve::fields::{CHAT, COMMON, COMPLETIONS, EMBEDDINGS, Use};

#[test]
fn every_field_of_openai_is_in_a_table() {
    let lines = include_str!("openai-fields.txt").lines().filter(|line| !line.starts_with('#'));
    let fields: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once(' ')).collect();
    assert!(fields.contains(&("chat", "messages")) && fields.contains(&("completions", "prompt")));
    let is_known = |(endpoint, field): &(&str, &str)| {
        let tables: &[&[(&str, Use)]] = match *endpoint {
            "chat" => &[CHAT, COMMON],
            "completions" => &[COMPLETIONS, COMMON],
            _ => &[EMBEDDINGS],
        };
        tables.iter().copied().flatten().any(|(known, _)| known == field)
    };
    let unknown: Vec<_> = fields.iter().filter(|field| !is_known(field)).collect();
    assert!(unknown.is_empty(), "in no table: {unknown:?}");
}
