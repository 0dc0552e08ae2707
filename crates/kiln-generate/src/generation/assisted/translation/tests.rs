#![allow(clippy::unwrap_used, reason = "these are tests")]

use serde_json::{Value, json};

use super::*;

const TEXT: &str =
    "ROMEO:\nBut soft, what light through yonder window breaks? It is the east — “and Juliet is the sun”.";

/// The tokenizer of the demo model: words, and parts of words.
fn words() -> Value {
    serde_json::from_str(include_str!("../../../../../../assets/demo/tokenizer.json")).unwrap()
}

/// A token for each byte.
fn bytes() -> Value {
    let mut file = words();
    file["model"]["merges"] = json!([]);
    file
}

fn load(file: &Value) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(file.to_string().as_bytes()).unwrap())
}

#[test]
fn a_growing_row_is_translated_like_its_whole_text() {
    for (model, draft) in [(words(), bytes()), (bytes(), words()), (words(), words())] {
        let (model, draft) = (load(&model), load(&draft));
        let ids = model.encode(TEXT, false).unwrap();
        for step in 1..6 {
            let mut translation = Translation::new(model.clone(), draft.clone());
            for end in (1..ids.len()).step_by(step).chain([ids.len()]) {
                let text = model.decode(&ids[..end], true).unwrap();
                let whole = draft.encode(&text, false).unwrap();
                assert_eq!(translation.for_draft(0, &ids[..end], 10), whole, "{step} at a time: {text}");
            }
            // Another row in its place.
            let other = &ids[ids.len() / 2..];
            let whole = draft.encode(&model.decode(other, true).unwrap(), false).unwrap();
            assert_eq!(translation.for_draft(0, other, 10), whole);
        }
    }
}

#[test]
fn drafts_are_translated_to_tokens_of_the_model_with_the_same_text() {
    let (words, bytes) = (load(&words()), load(&bytes()));
    let beginning = "ROMEO:\nBut soft, what light";
    for (model, draft) in [(&words, &bytes), (&bytes, &words)] {
        let mut translation = Translation::new(model.clone(), draft.clone());
        let ids = model.encode(beginning, false).unwrap();
        translation.for_draft(0, &ids, 10);
        let proposed = |text: &str| draft.encode(text, false).unwrap();
        for text in [" through yonder window", "ning", "!\n", " — "] {
            let new = translation.for_model(0, &proposed(text), 10).unwrap();
            assert_eq!(model.decode(&new, true).unwrap(), text, "after {beginning}");
        }
        // A character that is incomplete is left out.
        let half = [proposed(" the"), bytes.encode("—", false).unwrap()[..1].to_vec()].concat();
        let new = translation.for_model(0, &half, 10).unwrap();
        assert_eq!(model.decode(&new, true).unwrap(), " the");
    }
}
