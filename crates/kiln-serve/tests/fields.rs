//! The tables of fields know every field of the packages of OpenAI, Anthropic and ollama.

use kiln_serve::fields::{
    AUDIO, CHAT, COMMON, COMPLETIONS, EMBEDDINGS, MESSAGES, OLLAMA, OLLAMA_CHAT, OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS, OLLAMA_GENERATE, OLLAMA_OPTIONS, OLLAMA_SHOW, RESPONSES, Use,
};

#[test]
fn every_field_of_other_packages_is_in_a_table() {
    let lines = include_str!("api-fields.txt").lines().filter(|line| !line.starts_with('#'));
    let fields: Vec<(&str, &str)> = lines.filter_map(|line| line.split_once(' ')).collect();
    for known in
        [("chat", "messages"), ("responses", "input"), ("messages", "thinking"), ("ollama-chat", "think")]
    {
        assert!(fields.contains(&known), "{known:?} is not recorded");
    }
    let is_known = |(endpoint, field): &(&str, &str)| {
        let tables: &[&[(&str, Use)]] = match *endpoint {
            "chat" => &[CHAT, COMMON],
            "completions" => &[COMPLETIONS, COMMON],
            "embeddings" => &[EMBEDDINGS],
            // The file is no text.
            "audio" if *field == "file" => return true,
            "audio" => &[AUDIO],
            "responses" => &[RESPONSES],
            "messages" => &[MESSAGES],
            "ollama-chat" => &[OLLAMA_CHAT, OLLAMA],
            "ollama-generate" => &[OLLAMA_GENERATE, OLLAMA],
            "ollama-options" => &[OLLAMA_OPTIONS],
            "ollama-embed" => &[OLLAMA_EMBED],
            "ollama-embeddings" => &[OLLAMA_EMBEDDINGS],
            "ollama-show" => &[OLLAMA_SHOW],
            _ => &[],
        };
        tables.iter().copied().flatten().any(|(known, _)| known == field)
    };
    let unknown: Vec<_> = fields.iter().filter(|field| !is_known(field)).collect();
    assert!(unknown.is_empty(), "in no table: {unknown:?}");
}
