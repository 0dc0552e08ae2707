//! Structured output: whichever tokens are chosen, a completed text matches the grammar.

use kiln::{Error, Grammar, Model, StopReason};
use serde_json::{Value, json};

use crate::{requests::demos, support::recorded};

fn person() -> Grammar {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"enum": ["Romeo", "Juliet"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "friends": {"type": "array", "items": {"enum": ["Mercutio", "Benvolio"]}, "maxItems": 2}
        },
        "required": ["name", "age", "friends"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false}
    });
    Grammar::json_schema(&schema.to_string()).unwrap()
}

fn check(text: &str, how: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{how}: {e}: {text}"));
    assert!(["Romeo", "Juliet"].contains(&value["name"].as_str().unwrap()), "{how}: {text}");
    assert!((1..100).contains(&value["age"].as_u64().unwrap()), "{how}: {text}");
    assert!(value["friends"].as_array().unwrap().len() <= 2, "{how}: {text}");
    assert_eq!(value.as_object().unwrap().len(), 3, "{how}: {text}");
}

#[test]
fn every_decoding_mode_follows_the_schema() {
    for (device, model) in demos() {
        let request = || model.generate("A person of the play: ").grammar(person()).max_new_tokens(80);
        for name in ["greedy", "sampled", "beams", "sampled beams", "contrastive"] {
            let request = request();
            let request = match name {
                "greedy" => request.temperature(0.0),
                "sampled" => request.temperature(3.0).seed(5),
                "beams" => request.temperature(0.0).num_beams(3),
                "contrastive" => {
                    request.config(kiln::GenerationConfig::new().penalty_alpha(0.4).top_k(5)).temperature(0.0)
                }
                _ => request.temperature(2.0).seed(5).num_beams(3),
            };
            let how = format!("{name} on {device}");
            let mut pieces = request.stream().unwrap();
            let text = pieces.by_ref().collect::<kiln::Result<String>>().unwrap();
            assert_eq!(pieces.stop_reason(), Some(StopReason::EndOfText), "{how}: {text}");
            check(&text, &how);
        }
        let drawn = request().temperature(3.0).seed(1).num_return_sequences(4).completions().unwrap();
        for completion in &drawn[0] {
            check(completion.text.as_ref().unwrap(), &format!("one of several on {device}"));
        }
        let prompts = ["Two: ", "The other: "].map(|prompt| model.encode(prompt).unwrap());
        let both = model.generate(prompts.to_vec()).grammar(person()).temperature(0.0).max_new_tokens(80);
        for completions in both.completions().unwrap() {
            check(completions[0].text.as_ref().unwrap(), &format!("of a batch on {device}"));
        }
    }
}

#[test]
fn a_truncated_text_is_the_beginning_of_one_that_matches() {
    let (_, model) = demos().next().unwrap();
    let letters = || Grammar::regex("[a-c]{12}").unwrap();
    for tokens in 1..6 {
        let text = model.generate("abc").grammar(letters()).max_new_tokens(tokens).seed(1).text().unwrap();
        assert!(text.len() <= 12 && text.bytes().all(|byte| (b'a'..=b'c').contains(&byte)), "{text}");
    }
}

#[test]
fn processors_choose_among_tokens_that_the_grammar_allows() {
    let (_, model) = demos().next().unwrap();
    let config = kiln::GenerationConfig::new().top_k(1).do_sample(true).repetition_penalty(1.5);
    let grammar = Grammar::lark("start: (\"yes\" | \"no\") \"!\"").unwrap();
    let text = model.generate("Is it so?").config(config).grammar(grammar).text().unwrap();
    assert!(["yes!", "no!"].contains(&&*text), "{text}");
}

#[test]
fn grammars_that_cannot_be_applied_are_errors() {
    let (_, model) = demos().next().unwrap();
    let refused = |model: &Model, config: kiln::GenerationConfig| {
        let digits = Grammar::regex("[0-9]+").unwrap();
        model
            .generate(vec![1, 2])
            .config(config)
            .grammar(digits)
            .max_new_tokens(3)
            .steps()
            .map(drop)
            .unwrap_err()
    };
    let config = kiln::GenerationConfig::new;
    let no_end = refused(&model, config().eos_token_id(vec![]));
    assert!(matches!(no_end, Error::Setting { name: "eos_token_id", .. }), "{no_end}");
    let (_, device) = &kiln_testkit::devices::opened()[0];
    let without_tokenizer = refused(&recorded("llama", device), config().eos_token_id(vec![1]));
    assert!(matches!(without_tokenizer, Error::Prompt { .. }), "{without_tokenizer}");
    let unsupported = Grammar::json_schema(r#"{"type": "array", "uniqueItems": true}"#);
    let unsupported =
        unsupported.and_then(|grammar| model.generate("x").grammar(grammar).text()).unwrap_err();
    assert!(unsupported.to_string().contains("uniqueItems"), "{unsupported}");
}
