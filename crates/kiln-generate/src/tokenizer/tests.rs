#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use serde_json::{Value, json};

use super::*;

/// A file whose model has the tokens `a`, `b`, `aa` and a space, with some parts replaced by `parts`.
fn file(parts: Value) -> Value {
    let mut file = json!({
        "version": "1.0",
        "model": {"type": "BPE", "unk_token": "?", "vocab": {"a": 0, "b": 1, "aa": 2, " ": 3, "?": 4}, "merges": ["a a"]},
    });
    let whole = file.as_object_mut().unwrap();
    whole.extend(parts.as_object().unwrap().clone());
    file
}

fn load(parts: Value) -> Checked<Tokenizer> {
    Tokenizer::load(file(parts).to_string().as_bytes())
}

/// Whether the crate by itself panics when it reads the file, encodes `text` and decodes `ids`.
fn panics(parts: &Value, text: &str, ids: &[u32]) -> bool {
    let file = file(parts.clone()).to_string();
    let used = contained(|| {
        let tokenizer = tokenizers::Tokenizer::from_bytes(file.as_bytes())?;
        tokenizer.encode(text, true)?;
        tokenizer.decode(ids, true)
    });
    used.is_err()
}

/// Checks that a file with which the crate panics is rejected, with `why` in the sentence.
fn refused(parts: Value, text: &str, ids: &[u32], why: &str) {
    assert!(panics(&parts, text, ids), "the crate does not panic with {parts}");
    let error = load(parts).expect_err(why);
    assert!(error.contains(why), "{error}");
}

#[test]
fn a_truncated_file_is_an_error() {
    let broken = br#"{"version": "1.0", "decoder": {"#;
    assert!(contained(|| tokenizers::Tokenizer::from_bytes(broken).is_ok()).is_err());
    assert!(Tokenizer::load(broken).unwrap_err().contains("not JSON"));
}

#[test]
fn a_character_map_that_points_outside_itself_is_an_error() {
    // Texts are the zero byte; a trie has 0, 1 or 256 units.
    let map = |units: &[u32]| {
        let bytes: Vec<u8> =
            [units.len() as u32 * 4].iter().chain(units).flat_map(|unit| unit.to_le_bytes()).collect();
        json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded(&[&bytes[..], &[0]].concat())}})
    };
    let mut outside = vec![0; 256];
    // A leaf for "a" whose text is at 99.
    outside[0] = 0;
    outside[usize::from(b'a')] = 1 << 8 | u32::from(b'a') | 1 << 10;
    outside[usize::from(b'a') ^ 1] = 99;
    refused(map(&[]), "a", &[], "outside of itself");
    refused(map(&[0]), "a", &[], "outside of itself");
    refused(map(&outside), "a", &[], "outside of its texts");
    let short = |text: &str| json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}});
    refused(short(""), "a", &[], "is empty");
    refused(short("AAA"), "a", &[], "no character map");
    refused(short("/////wAA"), "a", &[], "cut off");
}

#[test]
fn a_character_map_that_grows_text_too_much_is_an_error() {
    let mut units = vec![0_u32; 256];
    units[usize::from(b'a')] = 1 << 8 | u32::from(b'a') | 1 << 10;
    let mut bytes = 1024_u32.to_le_bytes().to_vec();
    bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    bytes.extend([b'b'; 5000]);
    let parts = json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded(&bytes)}});
    let tokenizer = tokenizers::Tokenizer::from_bytes(file(parts.clone()).to_string()).unwrap();
    assert_eq!(tokenizer.encode("aa", false).unwrap().get_ids().len(), 10_000);
    assert!(load(parts).unwrap_err().contains("5000 times"));
}

fn encoded(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

#[test]
fn a_pattern_that_matches_empty_text_is_an_error() {
    for pattern in
        [json!({"String": ""}), json!({"Regex": ""}), json!({"Regex": "a*"}), json!({"Regex": "^"})]
    {
        let replace = json!({"type": "Replace", "pattern": pattern, "content": "b"});
        let normalizer = json!({"type": "Sequence", "normalizers": [replace, {"type": "Lowercase"}]});
        refused(json!({"normalizer": normalizer}), "bab", &[], "replaces nothing");
    }
}

#[test]
fn a_panic_that_depends_on_the_text_is_an_error() {
    let replace = json!({"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "b"});
    let normalizer = json!({"type": "Sequence", "normalizers": [replace, {"type": "Lowercase"}]});
    let parts = json!({"normalizer": normalizer});
    assert!(panics(&parts, "ab", &[]));
    let tokenizer = load(parts).unwrap();
    assert!(tokenizer.encode("ab", true).unwrap_err().to_string().contains("panicked"));
    assert_eq!(tokenizer.encode("b", true), Ok(vec![1]));
}

#[test]
fn pieces_of_length_zero_are_errors() {
    refused(json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}}), "a", &[], "length 0");
}

#[test]
fn a_template_that_names_missing_parts_is_an_error() {
    let template = |single: Value| {
        let tokens = json!({"b": {"id": "b", "ids": [1], "tokens": ["b"]}});
        json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens})
    };
    let token = |id| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let part = |id| json!({"Sequence": {"id": id, "type_id": 0}});
    refused(json!({"post_processor": template(json!([part("B")]))}), "a", &[], "second text");
    refused(json!({"post_processor": template(json!([token("c")]))}), "a", &[], "does not define");
    let named = json!({"type": "ByteLevel", "single": [part("B")], "pair": [], "special_tokens": {}});
    refused(json!({"post_processor": named}), "a", &[], "second text");
    let bos = template(json!([token("b"), token("b"), part("A")]));
    let twice = json!({"type": "Sequence", "processors": [bos, bos]});
    refused(json!({"post_processor": twice}), "a", &[], "2 templates");

    assert_eq!(load(json!({"post_processor": bos})).unwrap().encode("a", true), Ok(vec![1, 1, 0]));
    let repeated = template(json!([part("A"), part("A")]));
    assert!(load(json!({"post_processor": repeated})).unwrap_err().contains("repeats its text"));
}

#[test]
fn a_merge_that_gives_no_token_is_an_error() {
    let model = |vocab: Value, prefix: &str, merge: &str| {
        let model =
            json!({"type": "BPE", "vocab": vocab, "merges": [merge], "continuing_subword_prefix": prefix});
        json!({"model": model})
    };
    refused(model(json!({"a": 0, "b": 1}), "", "a b"), "a", &[], "gives no token");
    refused(model(json!({"a": 0, "b": 1, "ab": 2}), "##", "a b"), "a", &[], "gives no token");
    // The crate slices a `str` within a character here, and says so in its error.
    let half = model(json!({"a": 0, "é": 1, "abc": 2}), "#", "a é");
    assert!(load(half).unwrap_err().contains("gives no token"));
    let whole = load(model(json!({"a": 0, "##b": 1, "ab": 2}), "##", "a ##b")).unwrap();
    assert_eq!(whole.encode("ab", true), Ok(vec![2]));
}

#[test]
fn a_decoder_that_strips_the_end_is_an_error() {
    let decoder = json!({"type": "Strip", "content": "a", "start": 0, "stop": 2});
    refused(json!({"decoder": decoder}), "a", &[0], "strips the end");
}

#[test]
fn a_space_that_belongs_to_two_tokens_is_an_error() {
    let token = |id: u32, content: &str, lstrip: bool, rstrip: bool| {
        json!({"id": id, "content": content, "lstrip": lstrip, "rstrip": rstrip, "single_word": false,
               "normalized": false, "special": false})
    };
    refused(
        json!({"added_tokens": [token(0, "a", false, true), token(3, " ", true, false)]}),
        "a  b",
        &[],
        "all space",
    );
    let apart =
        load(json!({"added_tokens": [token(0, "a", true, true), token(3, "   ", false, false)]})).unwrap();
    assert!(apart.encode("a      a   b", true).is_ok());
}

#[test]
fn padding_truncation_and_dropout_are_ignored() {
    let padding = json!({"strategy": {"Fixed": 1_000_000}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                         "pad_type_id": 0, "pad_token": "a"});
    let truncation = json!({"direction": "Right", "max_length": 0, "strategy": "OnlySecond", "stride": 5});
    let mut parts = json!({"padding": padding, "truncation": truncation});
    let plain = tokenizers::Tokenizer::from_bytes(file(parts.clone()).to_string()).unwrap();
    assert_eq!(plain.encode("a", false).unwrap().get_ids().len(), 1_000_000);
    parts["model"] = file(json!({}))["model"].clone();
    parts["model"]["dropout"] = json!(1.0);
    assert_eq!(load(parts).unwrap().encode("aa", true), Ok(vec![2]));
}

#[test]
fn parts_that_grow_text_too_much_are_errors() {
    let double = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let normalizer = |times| json!({"type": "Sequence", "normalizers": vec![double.clone(); times]});
    let plain =
        tokenizers::Tokenizer::from_bytes(file(json!({"normalizer": normalizer(13)})).to_string()).unwrap();
    assert_eq!(plain.encode("a", true).unwrap().get_ids().len(), 4096);
    assert!(load(json!({"normalizer": normalizer(13)})).unwrap_err().contains("8192 times"));
    assert!(load(json!({"normalizer": normalizer(11)})).is_err());
    let ten = load(json!({"normalizer": normalizer(10)})).unwrap();
    assert_eq!(ten.encode("a", true).map(|ids| ids.len()), Ok(512));
    assert!(ten.encode(&"a".repeat(70_000), true).unwrap_err().to_string().contains("too long"));

    let decoder = |times| json!({"type": "Sequence", "decoders": vec![double.clone(); times]});
    let plain = tokenizers::Tokenizer::from_bytes(file(json!({"decoder": decoder(13)})).to_string()).unwrap();
    assert_eq!(plain.decode(&[0], true).unwrap().len(), 8192);
    assert!(load(json!({"decoder": decoder(13)})).unwrap_err().contains("8192 times"));
    let ten = load(json!({"decoder": decoder(10)})).unwrap();
    assert!(ten.decode(&[0; 70_000], true).unwrap_err().to_string().contains("too long"));

    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = json!({"type": "Sequence", "pretokenizers": vec![byte_level; 13]});
    assert!(load(json!({"pre_tokenizer": split})).unwrap_err().contains("8192 times"));
    let prepend = json!({"type": "Prepend", "prepend": "a".repeat(5000)});
    assert!(load(json!({"normalizer": prepend})).unwrap_err().contains("5001 times"));
    let empty = json!({"type": "BPEDecoder", "suffix": ""});
    let decoder = json!({"type": "Sequence", "decoders": vec![empty; 8]});
    assert!(load(json!({"decoder": decoder})).unwrap_err().contains("6561 times"));
}

#[test]
fn parts_that_are_too_deep_too_many_or_too_long_are_errors() {
    let mut deep = json!({"type": "Nmt"});
    for _ in 0..9 {
        deep = json!({"type": "Sequence", "normalizers": [deep]});
    }
    assert!(load(json!({"normalizer": deep["normalizers"][0]})).is_ok());
    assert!(load(json!({"normalizer": deep})).unwrap_err().contains("8 deep"));
    let many = json!({"type": "Sequence", "normalizers": vec![json!({"type": "Nmt"}); 65]});
    assert!(load(json!({"normalizer": many})).unwrap_err().contains("64 parts"));
    let split = json!({"type": "Split", "pattern": {"Regex": "a".repeat(5000)}, "behavior": "Isolated", "invert": false});
    assert!(load(json!({"pre_tokenizer": split})).unwrap_err().contains("5012 bytes"));
}

#[test]
fn parts_of_an_ambiguous_or_missing_type_are_errors() {
    for part in [
        json!({"type": "None"}),
        json!({"pattern": {"String": ""}, "content": "a"}),
        json!({"type": 1}),
        json!([1]),
    ] {
        for (role, _) in ROLES {
            assert!(load(json!({ role: part })).is_err(), "{role} {part}");
        }
    }
    // The crate takes the first for the replacement that it looks like.
    let part = json!({"type": "BertNormalizer", "pattern": {"String": "a"}, "content": "aa"});
    assert!(load(json!({"normalizer": part})).is_err());
    assert!(load(json!({"model": {"type": "Guess", "vocab": {}, "merges": []}})).is_err());
    assert!(Tokenizer::load(b"[]").is_err());
}

/// The crate's trie of such a token overflows the stack when it is freed.
#[test]
fn tokens_that_are_too_long_are_errors() {
    let model = json!({"type": "Unigram", "unk_id": 0, "vocab": [["?", 0.0], ["a".repeat(200_000), -1.0]]});
    assert!(load(json!({"model": model})).unwrap_err().contains("200000 bytes"));
    let long = json!({"type": "WordLevel", "unk_token": "?", "vocab": {"a".repeat(200_000): 0, "?": 1}});
    assert!(load(json!({"model": long})).unwrap_err().contains("200000 bytes"));
    let word = json!({"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "#", "vocab": {"?": 0},
                      "max_input_chars_per_word": 1_000_000});
    assert!(load(json!({"model": word})).unwrap_err().contains("512 characters"));
    let added = json!({"id": 5, "content": "a".repeat(20_000), "lstrip": false, "rstrip": false, "single_word": false,
                       "normalized": false, "special": true});
    assert!(load(json!({"added_tokens": [added]})).unwrap_err().contains("20000 bytes"));
}

#[test]
fn the_demo_tokenizer_gives_the_ids_and_text_of_the_crate() {
    let file =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo/tokenizer.json")).unwrap();
    let plain = tokenizers::Tokenizer::from_bytes(&file).unwrap();
    let tokenizer = Tokenizer::load(&file).unwrap();
    for text in ["", "Once upon a time", "  two\n\n spaces é 漢字 🙂</s> \u{0}"] {
        let ids = plain.encode(text, true).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.encode(text, true), Ok(ids.clone()));
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), plain.decode(&ids, true).unwrap());
        let (mut state, mut all) = ((Vec::new(), String::new(), 0), String::new());
        for id in tokenizer.encode(text, true).unwrap() {
            let piece = tokenizer.step(id, &mut state.0, &mut state.1, &mut state.2).unwrap();
            all.push_str(&piece.unwrap_or_default());
        }
        assert_eq!(all, tokenizer.decode(&ids, true).unwrap());
    }
}

/// A character map that maps a to b, in SentencePiece's format.
fn small_map() -> String {
    let mut units = vec![0_u32; 256];
    units[usize::from(b'a')] = 1 << 8 | u32::from(b'a') | 1 << 10;
    let mut bytes = 1024_u32.to_le_bytes().to_vec();
    bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    bytes.extend(b"b\0");
    encoded(&bytes)
}

#[test]
fn well_known_tokenizers_are_accepted() {
    let bytes: Map<String, Value> =
        (0..256).map(|byte| (format!("<0x{byte:02X}>"), json!(byte + 3))).collect();
    let mut vocab = bytes.clone();
    vocab.extend(
        json!({"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 259, "a": 260, "▁a": 261}).as_object().unwrap().clone(),
    );
    let sentencepiece = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocab, "merges": ["▁ a"]});
    let special = |id: u32, content: &str, lstrip: bool, rstrip: bool| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip,
               "normalized": false, "special": true})
    };
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let byte_level = |space: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": regex});
    let template = |token: &str, before: bool| {
        let (token_piece, text) = (
            json!({"SpecialToken": {"id": token, "type_id": 0}}),
            json!({"Sequence": {"id": "A", "type_id": 0}}),
        );
        let single = if before { json!([token_piece, text]) } else { json!([text, token_piece]) };
        json!({"type": "TemplateProcessing", "single": single,
               "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
               "special_tokens": {token: {"id": token, "ids": [1], "tokens": [token]}}})
    };
    let replace = |kind: &str, pattern: &str, content: &str| json!({"type": "Replace", "pattern": {kind: pattern}, "content": content});
    let fallback = json!({"type": "Sequence", "decoders": [
        replace("String", "▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let letters = |names: &[&str]| {
        let mut vocab: Map<String, Value> = Map::new();
        for name in names.iter().copied().chain(["a", "Ġ", "Ã", "©", "b", "Ġa"]) {
            let id = vocab.len();
            vocab.insert(name.into(), json!(id));
        }
        vocab
    };
    let bpe = |names: &[&str]| {
        json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
               "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
               "vocab": letters(names), "merges": [["Ġ", "a"]]})
    };
    let unigram = |names: &[&str]| {
        let pieces = names.iter().copied().chain(["▁", "a", "▁a", "b", "é"]);
        let pieces: Vec<_> = pieces.enumerate().map(|(at, piece)| json!([piece, -(at as f64)])).collect();
        json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false})
    };
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true, "prepend_scheme": "always"});
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": small_map()});
    let old = json!({"dropout": null, "unk_token": "", "continuing_subword_prefix": "", "end_of_word_suffix": "",
                     "fuse_unk": false, "vocab": letters(&["<|endoftext|>"]), "merges": ["#version: 0.2", "Ġ a"]});

    let known = [
        (
            "Llama 2",
            json!({
            "added_tokens": [special(1, "<s>", false, false)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace("String", " ", "▁")]},
            "post_processor": template("<s>", true), "decoder": fallback, "model": sentencepiece}),
        ),
        (
            "Phi 3",
            json!({
            "added_tokens": [special(2, "</s>", false, true)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace("String", " ", "▁")]},
            "decoder": fallback, "model": sentencepiece}),
        ),
        (
            "Gemma",
            json!({
            "normalizer": replace("String", " ", "▁"),
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
            "post_processor": template("<s>", true), "model": sentencepiece,
            "decoder": {"type": "Sequence", "decoders": [replace("String", "▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}}),
        ),
        (
            "Mistral",
            json!({
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
            "decoder": fallback, "model": sentencepiece}),
        ),
        (
            "Llama 3",
            json!({
            "added_tokens": [special(0, "<|begin_of_text|>", false, false)],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                byte_level(false, false)]},
            "post_processor": {"type": "Sequence", "processors": [byte_level(true, true), template("<|begin_of_text|>", true)]},
            "decoder": byte_level(true, true), "model": bpe(&["<|begin_of_text|>"])}),
        ),
        (
            "Qwen 2",
            json!({
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                split(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                byte_level(false, false)]},
            "post_processor": byte_level(false, false), "decoder": byte_level(false, false), "model": bpe(&[])}),
        ),
        (
            "DeepSeek",
            json!({
            "normalizer": {"type": "Sequence", "normalizers": []},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"),
                {"type": "Digits", "individual_digits": true}, byte_level(false, false)]},
            "decoder": byte_level(true, true), "model": bpe(&[])}),
        ),
        (
            "GPT 2",
            json!({
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
            "post_processor": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true}, "model": old}),
        ),
        (
            "RoBERTa",
            json!({
            "added_tokens": [special(0, "<mask>", true, false)],
            "pre_tokenizer": byte_level(false, true), "decoder": byte_level(true, true), "model": bpe(&["<mask>"]),
            "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": true,
                               "add_prefix_space": false}}),
        ),
        (
            "Whisper",
            json!({
            "pre_tokenizer": byte_level(false, true), "decoder": byte_level(true, true), "model": bpe(&["<|startoftranscript|>"]),
            "post_processor": template("<|startoftranscript|>", true)}),
        ),
        (
            "T5",
            json!({
            "normalizer": precompiled,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
            "post_processor": template("</s>", false), "decoder": metaspace, "model": unigram(&["<pad>", "</s>"])}),
        ),
        (
            "XLM-R",
            json!({
            "normalizer": {"type": "Sequence", "normalizers": [precompiled, replace("Regex", " {2,}", " ")]},
            "pre_tokenizer": metaspace, "decoder": metaspace, "model": unigram(&["<s>"])}),
        ),
        (
            "ALBERT",
            json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                replace("String", "``", "\""), replace("String", "''", "\""), {"type": "NFKD"}, {"type": "StripAccents"},
                {"type": "Lowercase"}, precompiled, replace("Regex", " {2,}", " ")]},
            "pre_tokenizer": metaspace, "decoder": metaspace, "model": unigram(&["<unk>"])}),
        ),
        (
            "BERT",
            json!({
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
                           "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "post_processor": template("[CLS]", true),
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                      "vocab": {"[UNK]": 0, "[CLS]": 1, "a": 2, "##b": 3, "e": 4}}}),
        ),
        (
            "OpenAI GPT",
            json!({
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": true,
                           "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                      "end_of_word_suffix": "</w>", "fuse_unk": false,
                      "vocab": {"<unk>": 0, "a": 1, "b</w>": 2, "a</w>": 3, "ab</w>": 4}, "merges": ["a b</w>"]}}),
        ),
        (
            "CLIP",
            json!({
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, replace("Regex", r"\s+", " "), {"type": "Lowercase"}]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"},
                 "behavior": "Removed", "invert": true}, byte_level(false, true)]},
            "decoder": byte_level(true, true), "model": bpe(&[])}),
        ),
    ];
    for (name, parts) in known {
        let plain = tokenizers::Tokenizer::from_bytes(file(parts.clone()).to_string()).unwrap();
        let tokenizer = load(parts).unwrap_or_else(|e| panic!("{name}: {e}"));
        println!("{name}: {} {}", tokenizer.encoded, tokenizer.decoded);
        assert!(tokenizer.encode("a", true).is_ok(), "{name}");
        for text in ["a", "ab a  a é\n\na<s>", " a </s> a<mask>b"] {
            let ids = plain
                .encode(text, true)
                .map(|encoding| encoding.get_ids().to_vec())
                .map_err(|e| Error::Prompt { why: e.to_string() });
            assert_eq!(tokenizer.encode(text, true), ids, "{name}");
            let Ok(ids) = ids else { continue };
            assert_eq!(
                tokenizer.decode(&ids, false),
                plain.decode(&ids, false).map_err(|e| undecodable(e.to_string())),
                "{name}"
            );
        }
        assert!(bounded(200_000, tokenizer.encoded, "a text").is_ok(), "{name}");
    }
}
