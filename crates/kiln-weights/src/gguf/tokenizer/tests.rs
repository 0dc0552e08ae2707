//! Tests with small tokenizers made by hand, that of the demo model, and those of llama.cpp's own tests.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;

use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _,
    Tokenizer, normalizers::NFC,
};

use super::{pre_tokenizer::PRE_TOKENIZERS, *};
use crate::gguf::{Array, Value};

mod hostile;
mod vocabs;

/// Returns metadata with these values below `tokenizer.`.
fn metadata<const N: usize>(values: [(&str, Value); N]) -> Metadata {
    values.into_iter().map(|(key, value)| (format!("tokenizer.{key}"), value)).collect()
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn strings<S: ToString>(strings: impl IntoIterator<Item = S>) -> Value {
    Value::Array(Array::String(strings.into_iter().map(|text| text.to_string()).collect()))
}

fn tokenizer(metadata: &Metadata) -> Tokenizer {
    serde_json::from_value(tokenizer_json(metadata).unwrap()).unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode(text, false).unwrap().get_ids().to_vec()
}

/// Returns the texts of the tokens of `text`, including the added ones.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text, true).unwrap().get_tokens().to_vec()
}

fn refused(metadata: &Metadata, why: &str) {
    let error = tokenizer_json(metadata).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

/// Returns GPT-2's letters for bytes.
fn letters() -> Vec<String> {
    let letters = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
    let mut letters: Vec<String> = letters.into_iter().map(String::from).collect();
    letters.sort();
    letters
}

/// Returns a byte-level BPE with `er` as its only merge; the last token is `</s>`.
fn byte_level(pre: &str) -> Metadata {
    let tokens: Vec<String> = letters().into_iter().chain(["er".to_owned(), "</s>".to_owned()]).collect();
    let mut kinds = vec![1; tokens.len()];
    *kinds.last_mut().unwrap() = 3;
    metadata([
        ("ggml.model", text("gpt2")),
        ("ggml.pre", text(pre)),
        ("ggml.tokens", strings(tokens)),
        ("ggml.token_type", Value::Array(Array::I32(kinds))),
        ("ggml.merges", strings(["e r"])),
        ("ggml.bos_token_id", Value::U32(257)),
        ("ggml.eos_token_id", Value::U32(257)),
    ])
}

/// Returns a SentencePiece BPE with these scored tokens after `<unk>`, `<s>`, `</s>` and 256 bytes.
fn sentencepiece(scored: &[(&str, f32)]) -> Metadata {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let named = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
    let tokens: Vec<String> =
        named.chain(bytes).chain(scored.iter().map(|(token, _)| (*token).to_owned())).collect();
    let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain(vec![1; scored.len()]).collect();
    let scores = vec![0.0; 259].into_iter().chain(scored.iter().map(|(_, score)| *score)).collect();
    metadata([
        ("ggml.model", text("llama")),
        ("ggml.tokens", strings(tokens)),
        ("ggml.token_type", Value::Array(Array::I32(kinds))),
        ("ggml.scores", Value::Array(Array::F32(scores))),
    ])
}

#[derive(Debug)]
struct Demo {
    own: Tokenizer,
    converted: Tokenizer,
}

/// Returns the tokenizer of the demo model, and its form in a GGUF file.
fn demo() -> Demo {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo/tokenizer.json");
    let file = fs::read_to_string(path).unwrap();
    let json: Json = serde_json::from_str(&file).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens: Vec<&String> = vocab.keys().collect();
    tokens.sort_by_key(|token| vocab[*token].as_u64());
    let mut kinds = vec![1; tokens.len()];
    for added in json["added_tokens"].as_array().unwrap() {
        kinds[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let merge = |pair: &Json| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
    let metadata = metadata([
        ("ggml.model", text("gpt2")),
        ("ggml.pre", text("gpt-2")),
        ("ggml.tokens", strings(tokens)),
        ("ggml.token_type", Value::Array(Array::I32(kinds))),
        ("ggml.merges", strings(json["model"]["merges"].as_array().unwrap().iter().map(merge))),
    ]);
    Demo { own: file.parse().unwrap(), converted: tokenizer(&metadata) }
}

impl Demo {
    fn compare(&self, text: &str) {
        let tokens = ids(&self.own, text);
        assert_eq!(ids(&self.converted, text), tokens, "{text:?}");
        for skips in [false, true] {
            let decoded = |tokenizer: &Tokenizer| tokenizer.decode(&tokens, skips).unwrap();
            assert_eq!(decoded(&self.converted), decoded(&self.own), "{text:?}");
        }
    }
}

#[test]
fn the_demo_tokenizer_is_the_same_in_gguf() {
    let demo = demo();
    for text in [
        "",
        "Who's there?",
        "<s>USER:\n12 345</s>",
        "  two  spaces\t\r\n\n",
        "naïve 我 🦙",
        "'LL don't",
        "a<pad>b",
    ] {
        demo.compare(text);
    }
    proptest!(ProptestConfig::with_cases(500), |(text in any::<String>())| demo.compare(&text));
    let likely = r"([a-z]{1,9}|[ \t\n]{1,3}|'s|[0-9]{1,5}|[.,!?]){1,12}";
    proptest!(ProptestConfig::with_cases(500), |(text in likely)| demo.compare(&text));
}

/// Returns the words that a pre-tokenizer cuts a text into.
fn words(pre: &str, text: &str) -> Vec<String> {
    let tokenizer = tokenizer(&byte_level(pre));
    let mut cut = PreTokenizedString::from(text);
    tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut cut).unwrap();
    let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
}

#[test]
fn the_name_of_a_pre_tokenizer_decides_how_text_is_split() {
    for (pre, text, expected) in [
        ("default", "a,b 12345", &["a", ",", "b", " ", "123", "45"][..]),
        (
            "gpt-2",
            "I'VE don't 1234  x\t\ty",
            &["I", "'", "VE", " don", "'t", " 1234", " ", " x", "\t", "\t", "y"],
        ),
        ("smollm", "x 1234", &["x", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'VE 12345 x", &["I", "'VE", " ", "123", "45", " x"]),
        ("qwen2", "I'VE 123\n\n x", &["I", "'VE", " ", "1", "2", "3", "\n\n", " x"]),
        ("qwen35", "ke\u{301}s", &["ke\u{301}s"]),
        ("qwen2", "ke\u{301}s", &["ke", "\u{301}s"]),
        ("gpt-4o", "camelCase's 1234 a/\n", &["camel", "Case's", " ", "123", "4", " a", "/\n"]),
        ("tekken", "camelCase's 12", &["camel", "Case", "'s", " ", "1", "2"]),
        ("falcon", "a`b 12345", &["a", "`", "b", " ", "123", "45"]),
        ("deepseek-llm", "ab我们12 \n", &["ab", "我们", "1", "2", " ", "\n"]),
        ("deepseek-coder", "a, b我 12\n", &["a", ",", " b", "我", " ", "1", "2", "\n"]),
        ("deepseek-v3", "x=foo 12345我们", &["x", "=foo", " ", "123", "45", "我们"]),
        ("seed-coder", "x! \n12", &["x", "!", " \n", "1", "2"]),
        ("bloom", "Hi there, x", &["Hi", " there", ",", " x"]),
        ("viking", "a 12", &["a", " ", "1", "2"]),
    ] {
        assert_eq!(words(pre, text), expected, "{pre}: {text:?}");
    }
}

#[test]
fn every_byte_level_tokenizer_keeps_the_text() {
    let all: Vec<_> =
        PRE_TOKENIZERS.iter().flat_map(|one| one.names).map(|name| tokenizer(&byte_level(name))).collect();
    let keeps = |text: &str| {
        for (tokenizer, composes) in
            all.iter().zip(PRE_TOKENIZERS.iter().flat_map(|one| one.names.iter().map(|_| one.composes)))
        {
            let mut expected = NormalizedString::from(text);
            if composes {
                NFC.normalize(&mut expected).unwrap();
            }
            let decoded = tokenizer.decode(&ids(tokenizer, text), false).unwrap();
            assert_eq!(decoded, expected.get());
        }
    };
    keeps("cafe\u{301} über  我 \n12 'S");
    proptest!(ProptestConfig::with_cases(50), |(text in any::<String>())| keeps(&text));
}

#[test]
fn names_of_pre_tokenizers_are_unique() {
    let mut names: Vec<_> = PRE_TOKENIZERS.iter().flat_map(|one| one.names).collect();
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn higher_scores_are_merged_first() {
    let scored = [
        ("▁", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
        ("ab", -2.0),
        ("bc", -1.0),
        ("▁a", -3.0),
        ("abc", -4.0),
    ];
    let tokenizer = tokenizer(&sentencepiece(&scored));
    assert_eq!(tokens(&tokenizer, "abc"), ["<s>", "▁a", "bc"]);
    assert_eq!(tokens(&tokenizer, "bab"), ["<s>", "▁", "b", "ab"]);
    // Here, `abc` can only consist of `a` and `bc`, and `▁a` is merged earlier.
    assert_eq!(tokens(&tokenizer, "babc"), ["<s>", "▁", "b", "abc"]);
    // Letters that are not tokens become bytes.
    assert_eq!(tokens(&tokenizer, "é"), ["<s>", "▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "a éb"), true).unwrap(), "a éb");
    assert_eq!(tokens(&tokenizer, "<s>a"), ["<s>", "<s>", "▁a"]);
}

#[test]
fn equal_scores_are_merged_in_the_order_of_ids() {
    let scored = ["▁", "a", "b", "c", "bc", "ab"].map(|token| (token, -1000.0));
    assert_eq!(tokens(&tokenizer(&sentencepiece(&scored)), "abc"), ["<s>", "▁", "a", "bc"]);
    // Zeros of both signs are equal.
    let scored = [("▁", 0.0), ("a", 0.0), ("b", 0.0), ("c", 0.0), ("bc", -0.0), ("ab", 0.0)];
    assert_eq!(tokens(&tokenizer(&sentencepiece(&scored)), "abc"), ["<s>", "▁", "a", "bc"]);
}

#[test]
fn merges_may_be_given_without_a_space_prefix() {
    let mut metadata = sentencepiece(&[("▁", 0.0), ("a", 0.0), ("b", 0.0), ("ab", 0.0), ("▁a", 0.0)]);
    metadata.insert("tokenizer.ggml.merges", strings(["▁ a"]));
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let tokenizer = tokenizer(&metadata);
    assert_eq!(tokens(&tokenizer, "ab ab"), ["<s>", "a", "b", "▁a", "b"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, " ab"), true).unwrap(), " ab");
}

#[test]
fn bos_and_eos_are_added_as_the_metadata_says() {
    let with = |pre: &str, bos: Option<bool>, eos: Option<bool>| {
        let mut metadata = byte_level(pre);
        for (key, adds) in [("bos", bos), ("eos", eos)] {
            adds.map(|adds| metadata.insert(format!("tokenizer.ggml.add_{key}_token"), Value::Bool(adds)));
        }
        tokens(&tokenizer(&metadata), "er")
    };
    assert_eq!(with("gpt-2", None, None), ["er"]);
    assert_eq!(with("llama-bpe", None, None), ["</s>", "er"]);
    assert_eq!(with("llama-bpe", Some(false), Some(true)), ["er", "</s>"]);
    assert_eq!(with("gpt-2", Some(true), Some(true)), ["</s>", "er", "</s>"]);

    // As in llama.cpp, a number that names no token counts as absent.
    let mut metadata = byte_level("llama-bpe");
    metadata.insert("tokenizer.ggml.bos_token_id", Value::I32(-1));
    assert_eq!(tokens(&tokenizer(&metadata), "er"), ["er"]);
    // If a token is requested and none is named, it is number 11, if that exists.
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let json = tokenizer(&metadata);
    assert_eq!(tokens(&json, "er").len(), 2);
}

#[test]
fn token_types_decide_which_tokens_are_added() {
    let mut metadata = sentencepiece(&[("[PAD259]", 0.0), ("<tool>", 0.0), ("[PAD261]", 0.0), ("rest", 0.0)]);
    let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain([5, 4, 2, 5]).collect();
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    metadata.insert("general.name", text("Phi-3 mini"));
    let json = tokenizer_json(&metadata).unwrap();
    let added: Vec<_> = json["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| {
            (
                token["content"].as_str().unwrap(),
                token["special"].as_bool().unwrap(),
                token["rstrip"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        added,
        [("<unk>", true, false), ("<s>", true, false), ("</s>", true, true), ("<tool>", false, true)]
    );
    // Tokens made up by converters are left out; unused tokens are kept.
    let vocab = json["model"]["vocab"].as_object().unwrap();
    assert!(!vocab.contains_key("[PAD259]") && !vocab.contains_key("[PAD261]") && vocab.contains_key("rest"));
}

#[test]
fn user_defined_tokens_are_matched_first() {
    // Like Gemma's runs of spaces. Converters write them as spaces, as in a text before spaces become `▁`.
    let mut metadata = sentencepiece(&[("▁", 0.0), ("a", 0.0), ("▁a", 0.0), ("   ", 0.0), ("\n\n", 0.0)]);
    let kinds = [2, 3, 3].into_iter().chain([6; 256]).chain([1, 1, 1, 4, 4]).collect();
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let tokenizer = tokenizer(&metadata);
    assert_eq!(tokens(&tokenizer, "a    a\n\n\na a"), ["<s>", "a", "   ", "▁a", "\n\n", "<0x0A>", "a", "▁a"]);
    assert_eq!(tokenizer.decode(&ids(&tokenizer, "a    a\n\n a"), true).unwrap(), "a    a\n\n a");
}

/// Returns a WordPiece vocabulary in the form of files.
fn word_pieces() -> Metadata {
    let tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "break", "able", "▁,", "▁cafe", "▁Cafe", "▁é"];
    let kinds = [3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1];
    metadata([
        ("ggml.model", text("bert")),
        ("ggml.tokens", strings(tokens)),
        ("ggml.token_type", Value::Array(Array::I32(kinds.to_vec()))),
        ("ggml.unknown_token_id", Value::U32(1)),
        ("ggml.cls_token_id", Value::U32(2)),
        ("ggml.seperator_token_id", Value::U32(3)),
    ])
}

#[test]
fn word_pieces_are_those_of_bert() {
    let mut metadata = word_pieces();
    let found = |metadata: &Metadata, text: &str| tokens(&tokenizer(metadata), text);
    let want = ["[CLS]", "un", "##break", "##able", ",", "cafe", "[SEP]"];
    assert_eq!(found(&metadata, "Unbreakable,\tCafé"), want);
    assert_eq!(found(&metadata, "able [SEP]"), ["[CLS]", "[UNK]", "[SEP]", "[SEP]"]);
    assert_eq!(found(&metadata, ""), ["[CLS]", "[SEP]"]);
    let tokenizer = tokenizer(&metadata);
    let encoded = ids(&tokenizer, "unbreakable, cafe");
    assert_eq!(tokenizer.decode(&encoded, true).unwrap(), "unbreakable, cafe");
    let config = tokenizer_config(&metadata).unwrap();
    assert_eq!([&config["cls_token"], &config["sep_token"]], ["[CLS]", "[SEP]"]);

    metadata.insert("tokenizer.ggml.normalizer.lowercase", Value::Bool(false));
    assert_eq!(found(&metadata, "Cafe é"), ["[CLS]", "Cafe", "é", "[SEP]"]);
    metadata.insert("tokenizer.ggml.normalizer.strip_accents", Value::Bool(true));
    assert_eq!(found(&metadata, "Café"), ["[CLS]", "Cafe", "[SEP]"]);
    // Newer files have another key. The default is BERT's own number, which this vocabulary does not have.
    metadata.insert("tokenizer.ggml.cls_token_id", Value::I32(-1));
    refused(&metadata, "`tokenizer.ggml.cls_token_id` names no token");
    let without: Metadata = word_pieces()
        .iter()
        .filter(|(key, _)| !key.ends_with("cls_token_id"))
        .map(|(k, v)| (k, v.clone()))
        .collect();
    refused(&without, "`tokenizer.ggml.bos_token_id` names no token");
    let mut other = without;
    other.insert("tokenizer.ggml.bos_token_id", Value::U32(2));
    assert_eq!(found(&other, ","), ["[CLS]", ",", "[SEP]"]);
}

#[test]
fn impossible_tokenizers_are_errors() {
    let with = |key: &str, value: Value| {
        let mut metadata = byte_level("gpt-2");
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
        metadata
    };
    refused(&Metadata::new(), "`tokenizer.ggml.model` is missing");
    refused(&metadata([("ggml.model", text("gpt2"))]), "`tokenizer.ggml.tokens` is missing");
    refused(
        &with("model", text("t5")),
        "`tokenizer.ggml.model` is `t5`, which is not supported; known: gpt2, llama, gemma4, bert",
    );
    refused(
        &with("pre", text("new\x1b[1m")),
        "`tokenizer.ggml.pre` is `new\\u{1b}[1m`, which is unknown; known: default, gpt-2,",
    );
    refused(&with("token_type", Value::Array(Array::I32(vec![1; 3]))), "has 3 entries for 258 tokens");
    refused(&with("merges", strings(["e  r"])), "has `e  r`, which is no pair of tokens that gives a token");
    refused(&with("merges", strings(["er"])), "has `er`, which");
    refused(&with("merges", strings(["a b"])), "has `a b`, which");
    refused(&with("merges", Value::U8(1)), "`tokenizer.ggml.merges` must be an array of strings");
    refused(&with("tokens", strings(["a", "a"])), "has the token `a` twice, with the ids 0 and 1");
    refused(&sentencepiece(&[(&"a".repeat(1025), 0.0)]), "has a token of 1025 bytes, at most 1024 are taken");

    let mut old = metadata([
        ("ggml.model", text("gpt2")),
        ("ggml.tokens", strings(["a"])),
        ("ggml.merges", strings([""; 0])),
    ]);
    refused(&old, "`tokenizer.ggml.pre` is missing");
    old.insert("general.architecture", text("qwen2"));
    assert_eq!(tokenizer_json(&old).unwrap()["normalizer"]["type"], "NFC");
}

#[test]
fn chat_templates_and_special_tokens_are_read() {
    let mut metadata = byte_level("gpt-2");
    assert_eq!(tokenizer_config(&metadata).unwrap(), json!({ "bos_token": "</s>", "eos_token": "</s>" }));
    metadata.insert("tokenizer.chat_template", text("{{ plain }}"));
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(false));
    metadata.insert("general.architecture", text("llama"));
    metadata.insert("llama.context_length", Value::U32(512));
    let expected = json!({
        "bos_token": "</s>", "eos_token": "</s>", "add_bos_token": false, "model_max_length": 512,
        "chat_template": "{{ plain }}",
    });
    assert_eq!(tokenizer_config(&metadata).unwrap(), expected);
    metadata.insert("tokenizer.chat_templates", strings(["tool_use"]));
    metadata.insert("tokenizer.chat_template.tool_use", text("{{ tools }}"));
    let templates = json!([
        { "name": "default", "template": "{{ plain }}" },
        { "name": "tool_use", "template": "{{ tools }}" },
    ]);
    assert_eq!(tokenizer_config(&metadata).unwrap()["chat_template"], templates);
}

#[test]
fn a_generation_ends_with_any_token_that_ends_a_turn() {
    let mut metadata = byte_level("gpt-2");
    assert_eq!(generation_config(&metadata).unwrap(), json!({ "bos_token_id": 257, "eos_token_id": [257] }));
    let added = ["</s>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<x>"];
    metadata.insert("tokenizer.ggml.tokens", strings(letters().into_iter().chain(added.map(str::to_owned))));
    // The fourth is text, according to its kind.
    let kinds = [1; 256].into_iter().chain([3, 3, 4, 1, 3]).collect();
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(256));
    metadata.insert("tokenizer.ggml.eot_token_id", Value::U32(260));
    metadata.insert("tokenizer.ggml.padding_token_id", Value::U32(0));
    metadata.insert("tokenizer.ggml.suppress_tokens", Value::Array(Array::I32(vec![7])));
    let expected = json!({
        "bos_token_id": 257, "eos_token_id": [256, 260, 257, 258], "pad_token_id": 0, "suppress_tokens": [7],
    });
    assert_eq!(generation_config(&metadata).unwrap(), expected);
}
