//! Tokenizers of folders: files next to `tokenizer.json`, and the parts that a GGUF file can represent.

use std::{fs, ops::ControlFlow};

use kiln::{Chat, ChatTemplate, GenerationConfig, Mixture, Model, StopReason, expert::tokenizer_of};
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
fn tokens_of_other_files_are_added_to_the_tokenizer() {
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
fn a_gguf_file_has_the_added_tokens_of_other_files() {
    // A word of the vocabulary that is now matched before all others, and a token without an embedding.
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
fn a_tokenizer_that_gguf_cannot_express_is_an_error() {
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

/// Creates the demo model with one of its tokens made special. Returns the greedy tokens up to it.
fn ends_with_a_special_token(opened: &kiln::device::Opened) -> (tempfile::TempDir, Model, String, Vec<u32>) {
    let demo = folder(&[]);
    let tokenizer = tokenizer_of(demo.path()).unwrap().unwrap();
    let model = float32(Model::builder(demo.path()), opened).load().unwrap();
    let completion = &model.generate(PROMPT).config(greedy(30)).completions().unwrap()[0][0];
    let text = |id: u32| tokenizer.decode(&[id], false).unwrap();
    let is_first = |at: &usize| !completion.tokens[..*at].contains(&completion.tokens[*at]);
    let is_word = |at: &usize| text(completion.tokens[*at]).chars().all(char::is_alphabetic);
    let at = (3..completion.tokens.len()).filter(is_first).find(is_word).unwrap();
    let (id, word) = (completion.tokens[at], text(completion.tokens[at]));
    let config = json!({"added_tokens_decoder": {id.to_string(): {"content": word, "special": true}}});
    let folder = folder(&[("tokenizer_config.json", &config.to_string())]);
    let model = float32(Model::builder(folder.path()), opened).load().unwrap();
    (folder, model, word, completion.tokens[..=at].to_vec())
}

const PROMPT: &str = "ROMEO:\n";

fn greedy(n: usize) -> GenerationConfig {
    GenerationConfig::new().max_new_tokens(n).do_sample(false)
}

#[test]
fn a_special_token_is_a_stop_string_in_every_kind_of_request() {
    for (device, opened) in kiln_testkit::devices::opened() {
        let (_folder, model, word, tokens) = ends_with_a_special_token(opened);
        let want = model.decode(&tokens).unwrap();
        let config = |n| {
            let mut config = greedy(n);
            config.stop_strings = Some(vec![word.clone()]);
            config
        };
        let unstopped = model.generate(PROMPT).config(greedy(30)).text().unwrap();
        assert!(unstopped.len() > want.len() && !unstopped[..want.len()].contains(&word), "on {device}");
        let mut stream = model.generate(PROMPT).config(config(30)).stream().unwrap();
        let text: String = stream.by_ref().map(Result::unwrap).collect();
        assert_eq!(
            (text.as_str(), stream.stop_reason()),
            (&*want, Some(StopReason::StopString)),
            "on {device}"
        );
        let ids = model.encode(PROMPT).unwrap();
        let rows = model.generate(vec![ids.clone(), ids]).config(config(30)).completions().unwrap();
        for completion in rows.iter().flatten() {
            assert_eq!(completion.tokens, tokens, "on {device}");
            assert_eq!(completion.text.as_ref(), Some(&want), "on {device}");
            assert_eq!(completion.stop_reason, Some(StopReason::StopString), "on {device}");
        }
        let beams = model.generate(PROMPT).config(config(30)).num_beams(2).completions().unwrap();
        let best = &beams[0][0];
        assert!(
            best.stop_reason != Some(StopReason::StopString) || !best.text.as_ref().unwrap().contains(&word)
        );
    }
}

/// A turn ends with a special token of the template that is not an end token of the model.
#[test]
fn an_answer_ends_at_a_special_token_of_its_template() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let (_folder, model, word, tokens) = ends_with_a_special_token(opened);
    for end in [word.clone(), format!("\n{word}")] {
        let source = format!(
            "{{% for m in messages %}}{{{{ m.content }}}}{{% if m.role == 'assistant' %}}{end}\n{{% endif %}}{{% endfor %}}"
        );
        let template = ChatTemplate::new(&source).unwrap();
        let mut chat = Chat::new(&model, template, model.plan()).unwrap();
        let said = chat.say(PROMPT).unwrap().config(greedy(30)).text().unwrap();
        assert_eq!(said, model.decode(&tokens).unwrap());
    }
}

/// If the folder names no end token, generated text continues, and an answer ends with the end token of the
/// tokenizer.
#[test]
fn an_answer_ends_with_the_end_token_of_the_tokenizer() {
    let (_, opened) = &kiln_testkit::devices::opened()[0];
    let (_folder, _, word, tokens) = ends_with_a_special_token(opened);
    let config = json!({ "eos_token": word }).to_string();
    let folder = folder(&[("tokenizer_config.json", &config), ("generation_config.json", "{}")]);
    let model = float32(Model::builder(folder.path()), opened).load().unwrap();
    let text = model.generate(PROMPT).config(greedy(30)).completions().unwrap();
    assert_eq!(text[0][0].tokens.len(), 30);
    let says = |config: GenerationConfig| {
        let template = ChatTemplate::new("{{ messages[-1].content }}").unwrap();
        let mut chat = Chat::new(&model, template, model.plan()).unwrap();
        chat.say(PROMPT).unwrap().config(config).completions().unwrap()[0][0].tokens.clone()
    };
    assert_eq!(says(greedy(30)), tokens);
    assert_eq!(says(greedy(30).eos_token_id(Vec::new())).len(), 30, "a list that is empty asks for none");
}
