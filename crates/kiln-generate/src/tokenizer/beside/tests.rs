//! Tokens that Transformers 5.23.0 (`AutoTokenizer`) reads from folders with these files.
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use serde_json::{Value, json};

use super::TokenizerConfig;
use crate::Tokenizer;

/// A token for each letter from `!` to `|`, after three special ones: 95 tokens.
fn letters(more: &[Value]) -> Value {
    let special = ["<pad>", "<s>", "</s>"];
    let letters = (b'!'..=b'|').map(|letter| char::from(letter).to_string());
    let vocab = special.iter().map(|token| (*token).to_owned()).chain(letters);
    let vocab: Value = vocab.zip(0..).map(|(token, id)| (token, json!(id))).collect();
    let added = special.iter().zip(0..).map(|(token, id)| {
        let mut token = token_of(token, true);
        token["id"] = json!(id);
        token
    });
    json!({
        "version": "1.0",
        "added_tokens": added.chain(more.iter().cloned()).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": false},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<pad>"},
    })
}

fn token_of(content: &str, special: bool) -> Value {
    json!({"content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
}

/// The tokenizer of a folder with these files in addition to `tokenizer.json`; `x` is null for missing ones.
fn of(tokenizer: &Value, config: Value, map: Value, added: Value) -> (Tokenizer, TokenizerConfig) {
    let config = TokenizerConfig::new(&config, &map, &added).unwrap();
    let mut tokenizer = tokenizer.clone();
    config.complete(&mut tokenizer);
    let tokenizer = Tokenizer::from_json(tokenizer).unwrap();
    (tokenizer.split_special_tokens(config.splits_special_tokens()), config)
}

const TEXT: &str = "<call>art_thou=</s>Romeo";

/// The tokens of [`TEXT`], summarized: the tokens of `<call>` and `thou`, `None` if they are spelled by
/// letters; and the text of the tokens without special ones.
fn cut(tokenizer: &Tokenizer) -> (Option<u32>, Option<u32>, String) {
    let ids = tokenizer.encode(TEXT, true).unwrap();
    let added = |content: &str| tokenizer.inner().token_to_id(content).filter(|id| ids.contains(id));
    (added("<call>"), added("thou"), tokenizer.decode(&ids, true).unwrap())
}

#[test]
fn tokens_of_other_files_are_added_as_by_transformers() {
    let (call, thou) = (|special| token_of("<call>", special), |special| token_of("thou", special));
    let null = Value::Null;
    let both = (Some(95), Some(96));
    let turned = (Some(96), Some(95));
    let none = (None, None);
    for (name, config, map, added, (want_call, want_thou), text) in [
        ("nothing", json!({}), null.clone(), null.clone(), none, "<call>art_thou=Romeo"),
        (
            "added_tokens_decoder",
            json!({"added_tokens_decoder": {"95": call(true), "96": thou(false)}}),
            null.clone(),
            null.clone(),
            both,
            "art_thou=Romeo",
        ),
        (
            "in the order of ids",
            json!({"added_tokens_decoder": {"96": call(true), "95": thou(false)}}),
            null.clone(),
            null.clone(),
            turned,
            "art_thou=Romeo",
        ),
        (
            "ids that are not free yet",
            json!({"added_tokens_decoder": {"100": call(true), "110": thou(true)}}),
            null.clone(),
            null.clone(),
            both,
            "art_=Romeo",
        ),
        (
            "named",
            json!({"eos_token": "thou", "pad_token": "<call>"}),
            null.clone(),
            null.clone(),
            turned,
            "art_=Romeo",
        ),
        (
            "names of its own",
            json!({"tool_token": "thou", "image_token": "<call>", "add_bos_token": true}),
            null.clone(),
            null.clone(),
            turned,
            "art_=Romeo",
        ),
        (
            "a list",
            json!({"extra_special_tokens": ["thou", "<call>"]}),
            null.clone(),
            null.clone(),
            turned,
            "art_=Romeo",
        ),
        (
            "an object",
            json!({"extra_special_tokens": {"x_token": "thou", "y": "<call>"}}),
            null.clone(),
            null.clone(),
            turned,
            "art_=Romeo",
        ),
        (
            "the old name",
            json!({"additional_special_tokens": ["thou", "<call>"]}),
            null.clone(),
            null.clone(),
            turned,
            "art_=Romeo",
        ),
        (
            "both names",
            json!({"additional_special_tokens": ["thou"], "extra_special_tokens": ["<call>"]}),
            null.clone(),
            null.clone(),
            (Some(95), None),
            "art_thou=Romeo",
        ),
        (
            "a map beside a list of tokens",
            json!({"added_tokens_decoder": {}}),
            json!({"additional_special_tokens": ["thou", "<call>"], "eos_token": "R"}),
            null.clone(),
            none,
            "<call>art_thou=Romeo",
        ),
        (
            "a map",
            null.clone(),
            json!({"additional_special_tokens": ["<call>", "thou"]}),
            null.clone(),
            both,
            "art_=Romeo",
        ),
        (
            "objects in a map",
            null.clone(),
            json!({"eos_token": token_of("R", false), "think_token": thou(false), "z_token": "<call>"}),
            null.clone(),
            turned,
            "art_=omeo",
        ),
        (
            "a name in both",
            json!({"z_token": "a"}),
            json!({"z_token": "<call>"}),
            null.clone(),
            none,
            "<cll>rt_thou=Romeo",
        ),
        (
            "lists in both",
            json!({"extra_special_tokens": ["<call>"]}),
            json!({"extra_special_tokens": ["thou", "<call>", {"content": "Ro"}]}),
            null.clone(),
            both,
            "art_=meo",
        ),
        (
            "added_tokens.json",
            json!({"eos_token": "<call>"}),
            null.clone(),
            json!({"thou": 96, "<call>": 95}),
            both,
            "art_thou=Romeo",
        ),
        (
            "tokens that stay text",
            null.clone(),
            json!({"additional_special_tokens": ["<call>"]}),
            json!({"thou": 96, "<call>": 95}),
            both,
            "<call>art_thou=Romeo",
        ),
    ] {
        let (tokenizer, _) = of(&letters(&[]), config, map, added);
        assert_eq!(cut(&tokenizer), (want_call, want_thou, text.to_owned()), "{name}");
    }
}

#[test]
fn flags_of_a_token_decide_which_text_it_matches() {
    let flags = |content: &str, flags: &[&str]| {
        let mut token = token_of(content, true);
        flags.iter().for_each(|flag| token[flag] = json!(true));
        token
    };
    let decoder =
        json!({"95": flags("<call>", &["lstrip", "rstrip"]), "96": flags("thou", &["single_word"])});
    let (tokenizer, _) =
        of(&letters(&[]), json!({"added_tokens_decoder": decoder}), Value::Null, Value::Null);
    let ids = tokenizer.encode("a <call> art thou thouart", true).unwrap();
    assert_eq!(ids, [67, 95, 67, 84, 86, 0, 96, 0, 86, 74, 81, 87, 67, 84, 86]);
}

/// A token of `tokenizer.json` becomes special if it has a name, and stays special.
#[test]
fn a_token_that_the_config_names_is_special() {
    let mut known = token_of("thou", false);
    known["id"] = json!(95);
    let file = letters(&[known.clone()]);
    let eos = |config: Value| {
        let (tokenizer, _) = of(&file, config, Value::Null, Value::Null);
        let ids = tokenizer.encode(TEXT, true).unwrap();
        tokenizer.decode(&ids, true).unwrap()
    };
    assert_eq!(eos(json!({"eos_token": "thou"})), "<call>art_=Romeo");
    assert_eq!(eos(json!({"eos_token": "thou", "added_tokens_decoder": {"95": known}})), "<call>art_=Romeo");
    assert_eq!(eos(json!({"added_tokens_decoder": {"2": token_of("</s>", false)}})), "<call>art_thou=Romeo");
}

#[test]
fn split_special_tokens_makes_special_tokens_text() {
    let config = json!({
        "split_special_tokens": true,
        "additional_special_tokens": ["<call>"],
        "added_tokens_decoder": {"95": token_of("thou", false)},
    });
    let (tokenizer, _) = of(&letters(&[]), config, Value::Null, Value::Null);
    let ids = tokenizer.encode(TEXT, true).unwrap();
    let want = [30, 69, 67, 78, 78, 32, 67, 84, 86, 65, 95, 31, 30, 17, 85, 32, 52, 81, 79, 71, 81];
    assert_eq!(ids, want);
}

#[test]
fn named_special_tokens_are_collected_from_both_files() {
    let config = json!({
        "eos_token": "</s>", "think_token": "<t>", "bos_token": {"content": "<s>"}, "pad_token": null,
        "extra_special_tokens": {"image": "<i>"},
    });
    let (_, config) = of(&letters(&[]), config, json!({"call_token": {"content": "<c>"}}), Value::Null);
    let names: Vec<_> = config.names().into_iter().map(|(name, token)| format!("{name}={token}")).collect();
    assert_eq!(names, ["bos_token=<s>", "call_token=<c>", "eos_token=</s>", "image=<i>", "think_token=<t>"]);
}

#[test]
fn invalid_token_entries_are_errors_that_name_the_file() {
    let null = Value::Null;
    for (config, map, added, file, why) in [
        (json!([]), &null, &null, "tokenizer_config.json", "is not a JSON object"),
        (json!({"added_tokens_decoder": []}), &null, &null, "tokenizer_config.json", "other than an object"),
        (
            json!({"added_tokens_decoder": {"x": {"content": "a"}}}),
            &null,
            &null,
            "tokenizer_config.json",
            "the key \"x\"",
        ),
        (
            json!({"added_tokens_decoder": {"7": "a"}}),
            &null,
            &null,
            "tokenizer_config.json",
            "the id 7 of no token",
        ),
        (json!({"eos_token": 7}), &null, &null, "tokenizer_config.json", "`eos_token`, which is no token: 7"),
        (
            json!({"extra_special_tokens": "a"}),
            &null,
            &null,
            "tokenizer_config.json",
            "neither a list nor an object",
        ),
        (
            json!({"extra_special_tokens": [7]}),
            &null,
            &null,
            "tokenizer_config.json",
            "something that is no token",
        ),
        (json!({}), &json!("a"), &null, "special_tokens_map.json", "is not a JSON object"),
        (
            json!({}),
            &null,
            &json!({"a": "b"}),
            "added_tokens.json",
            "gives the token \"a\" \"b\", which is no id",
        ),
    ] {
        let (wrong, said) = TokenizerConfig::new(&config, map, added).unwrap_err();
        assert_eq!(wrong, file);
        assert!(said.contains(why), "{said}");
    }
}
