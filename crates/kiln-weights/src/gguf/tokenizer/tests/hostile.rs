//! Metadata from untrusted sources: arbitrary values for the keys that are read.

use proptest::prelude::*;
use tokenizers::Tokenizer;

use super::*;

/// Generates values that keys of tokenizers may have, and some that they may not.
fn any_value() -> impl Strategy<Value = Value> {
    let word = prop_oneof![Just(String::new()), "[a-c ▁]{1,3}", "<0x[0-9A-F]{2}>", any::<String>()];
    prop_oneof![
        any::<bool>().prop_map(Value::Bool),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        prop_oneof![Just("gpt2"), Just("llama"), Just("gpt-2"), Just("tekken"), Just("x")].prop_map(text),
        prop::collection::vec(word, 0..9).prop_map(strings),
        prop::collection::vec(0..9, 0..9).prop_map(|kinds| Value::Array(Array::I32(kinds))),
        prop::collection::vec(any::<f32>(), 0..9).prop_map(|scores| Value::Array(Array::F32(scores))),
    ]
}

const KEYS: [&str; 12] = [
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.token_type",
    "ggml.scores",
    "ggml.merges",
    "ggml.add_bos_token",
    "ggml.bos_token_id",
    "ggml.unknown_token_id",
    "ggml.eos_token_id",
    "ggml.add_space_prefix",
    "chat_template",
];

proptest! {
    #[test]
    fn random_metadata_never_panics(
        is_byte_level in any::<bool>(),
        changes in prop::collection::vec((0..12_usize, any_value()), 1..6),
    ) {
        let scored = [("a", 1.0), ("b", 1.0), ("ab", 0.0)];
        let mut metadata = if is_byte_level { byte_level("gpt-2") } else { sentencepiece(&scored) };
        for (key, value) in changes {
            metadata.insert(format!("tokenizer.{}", KEYS[key]), value);
        }
        // Accepted metadata can be loaded.
        if let Ok(json) = tokenizer_json(&metadata) {
            let tokenizer: Result<Tokenizer, _> = serde_json::from_value(json);
            prop_assert!(tokenizer.is_ok(), "{tokenizer:?}");
        }
        let _ = (tokenizer_config(&metadata), generation_config(&metadata));
    }
}
