//! Tokenizers of folders: what stands beside `tokenizer.json`, and what of it a GGUF file can say.

use std::{fs, ops::ControlFlow};

use kiln::{Mixture, Model, tokenizer_of};
use serde_json::json;

use crate::{chat::folder, support::float32};

fn ids(folder: &tempfile::TempDir, text: &str) -> Vec<u32> {
    tokenizer_of(folder.path()).unwrap().unwrap().encode(text, true).unwrap()
}

fn quantized(folder: &tempfile::TempDir) -> kiln::Result<tempfile::TempDir> {
    let output = tempfile::tempdir().unwrap();
    kiln::quantize(folder.path(), output.path().join("model.gguf"), Mixture::Q8_0, |_| {
        ControlFlow::Continue(())
    })?;
    Ok(output)
}

#[test]
fn tokens_beside_a_tokenizer_are_tokens() {
    let plain = ids(&folder(&[]), "<call></s>");
    assert!(plain.len() > 2 && plain.ends_with(&[1]));
    let list = json!({"added_tokens_decoder": {"2048": {"content": "<call>", "special": true}}}).to_string();
    for file in [
        ("added_tokens.json", r#"{"<call>": 2048}"#),
        ("special_tokens_map.json", r#"{"additional_special_tokens": ["<call>"]}"#),
        ("tokenizer_config.json", r#"{"call_token": "<call>"}"#),
        ("tokenizer_config.json", &*list),
    ] {
        assert_eq!(ids(&folder(&[file]), "<call></s>"), [2048, 1], "{file:?}");
    }
    let split = folder(&[("tokenizer_config.json", r#"{"split_special_tokens": true}"#)]);
    assert_eq!(ids(&split, "<call></s>").last(), ids(&split, ">").last());
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let model = float32(Model::builder(split.path()), opened).load().unwrap();
    assert_eq!(model.encode("</s>").unwrap(), ids(&split, "</s>"));

    let wrong = folder(&[("added_tokens.json", r#"{"<call>": "2048"}"#)]);
    let error = tokenizer_of(wrong.path()).unwrap_err().to_string();
    assert!(error.contains("added_tokens.json: gives the token \"<call>\""), "{error}");
}

#[test]
fn a_gguf_file_has_the_tokens_beside_a_tokenizer() {
    // A word of the vocabulary that is now found before all others, and a token that the model has no embedding for.
    let id = ids(&folder(&[]), "ould")[0];
    let added = json!({"ould": id, "<call>": 2048}).to_string();
    let folder = folder(&[("added_tokens.json", &added)]);
    let output = quantized(&folder).unwrap();
    let written = tokenizer_of(output.path().join("model.gguf")).unwrap().unwrap();
    for text in ["shouldst not", "could</s>  would"] {
        assert_eq!(written.encode(text, true).unwrap(), ids(&folder, text), "{text}");
    }
}

#[test]
fn a_tokenizer_that_gguf_cannot_say_is_refused() {
    let refused = |files: &[(&str, &str)], why: &str| {
        let error = quantized(&folder(files)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&[("tokenizer_config.json", r#"{"split_special_tokens": true}"#)], "`split_special_tokens`");
    for flag in ["lstrip", "rstrip", "single_word"] {
        let token = json!({"content": "</s>", "special": true, flag: true});
        let config = json!({"added_tokens_decoder": {"1": token}}).to_string();
        refused(&[("tokenizer_config.json", &config)], "a GGUF file cannot say this tokenizer: the text");
    }
    // Another text for the same tokens.
    let folder = folder(&[]);
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let strip = json!({"type": "Replace", "pattern": {"String": "Ġ"}, "content": "_"});
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": [strip, tokenizer["decoder"]]});
    fs::write(&path, tokenizer.to_string()).unwrap();
    let error = quantized(&folder).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("cannot say the decoder"), "{error}");
}
