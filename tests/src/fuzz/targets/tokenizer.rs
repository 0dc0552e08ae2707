//! `tokenizer.json`: read, and used to encode texts and decode tokens.

use std::{path::Path, sync::Arc};

use kiln::expert::{TextStream, Tokenizer};
use serde_json::{Map, Value, json};

use crate::fuzz::{Run, Target, mutate::Format};

pub(in crate::fuzz) const TARGET: Target = Target { name: "tokenizer", format: Format::Json, seeds, prepare };

const TEXTS: [&str; 8] = [
    "",
    "a",
    "ab a  b aa\n\na<s>",
    " </s>é e\u{301} 漢字 🙂\u{0}\u{202e} 123 1.5e3",
    "▁a▁▁b ##b <0x41> [UNK] [CLS]",
    "It's we'll DON'T\r\n\t\u{a0}\u{3000}x",
    "ﬁ ﷺ Å ½ ＡＢ ① İ ß Σς",
    "(){}[]<>!?,.;:'\"``''--__==",
];

fn prepare(_: &Path) -> Run {
    let long = ["ab ".repeat(60), "a".repeat(100), "é漢 \n".repeat(50)];
    Box::new(move |input| {
        let Ok(tokenizer) = Tokenizer::load(input).map(Arc::new) else { return false };
        for text in TEXTS.into_iter().chain(long.iter().map(String::as_str)) {
            let fewest = tokenizer.fewest_tokens(text.len());
            for special in [true, false] {
                let Ok(ids) = tokenizer.encode(text, special) else { continue };
                // The estimate of the minimum number of tokens holds if no part of the text was dropped.
                if tokenizer.decode(&ids, false).is_ok_and(|decoded| decoded == text) {
                    assert!(ids.len() >= fewest, "{} tokens, and said to be at least {fewest}", ids.len());
                }
                _ = tokenizer.decode(&ids, true);
            }
        }
        for ids in
            [(0..40).collect(), vec![0; 50], vec![u32::MAX, 1 << 31, 3, 2, 1, 0], (0..300).rev().collect()]
        {
            _ = tokenizer.decode(&ids, true);
            _ = tokenizer.decode(&ids, false);
            let mut stream = TextStream::new(tokenizer.clone());
            _ = ids.iter().try_for_each(|&id| stream.push(id).map(drop));
            _ = stream.finish();
            if let Ok(mut stream) = TextStream::after(tokenizer.clone(), &ids) {
                _ = stream.push(1);
            }
        }
        true
    })
}

/// Returns a tokenizer whose tokens are those of the recorded models: one letter each.
pub(in crate::fuzz) fn of_recorded() -> Value {
    let letters = (0x21..=0x7e_u8).map(|byte| char::from(byte).to_string());
    let tokens = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter().chain(letters);
    let vocab: Map<String, Value> = tokens.enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({"version": "1.0", "added_tokens": [special(1, "<s>", false, false)],
           "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": []}, "decoder": {"type": "Fuse"}})
}

fn special(id: u32, content: &str, lstrip: bool, rstrip: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": lstrip, "rstrip": rstrip,
           "normalized": false, "special": true})
}

/// Returns the demo tokenizer, with the byte tokens and few merges.
fn demo() -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/demo/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let merges: Vec<Value> = file["model"]["merges"].as_array().unwrap().iter().take(12).cloned().collect();
    let merged: Vec<String> = merges
        .iter()
        .map(|merge| match merge {
            Value::String(pair) => pair.replace(' ', ""),
            pair => [0, 1].map(|at| pair[at].as_str().unwrap()).concat(),
        })
        .collect();
    let vocab = file["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|token, id| id.as_u64() < Some(3) || token.chars().count() == 1 || merged.contains(token));
    file["model"]["merges"] = json!(merges);
    file
}

/// Returns a small tokenizer of each kind that models come with.
fn seeds() -> Vec<Vec<u8>> {
    let replace = |kind: &str, pattern: &str, content: &str| json!({"type": "Replace", "pattern": {kind: pattern}, "content": content});
    let split = |kind: &str, pattern: &str, behavior: &str| json!({"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": false});
    let byte_level = |space: bool, regex: bool| json!({"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": true, "use_regex": regex});
    let template = |token: &str| {
        json!({"type": "TemplateProcessing",
               "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
               "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
               "special_tokens": {token: {"id": token, "ids": [1], "tokens": [token]}}})
    };
    let vocab = |tokens: &[&str]| -> Map<String, Value> {
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect()
    };
    let mut bytes = vocab(&["<unk>", "<s>", "</s>", "▁", "a", "▁a", "b", "é"]);
    bytes.extend((0..256).step_by(5).map(|byte| (format!("<0x{byte:02X}>"), json!(byte / 5 + 8))));
    let sentencepiece = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": bytes, "merges": ["▁ a"]});
    let bpe = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
        "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
        "vocab": vocab(&["<s>", "a", "Ġ", "Ã", "©", "b", "Ġa", "aa"]), "merges": [["Ġ", "a"], ["a", "a"]]});
    let suffixed = json!({"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
        "end_of_word_suffix": "</w>", "fuse_unk": false,
        "vocab": vocab(&["<unk>", "a", "b</w>", "a</w>", "ab</w>"]), "merges": ["a b</w>"]});
    let prefixed = json!({"type": "BPE", "continuing_subword_prefix": "##", "unk_token": "<unk>",
        "vocab": vocab(&["<unk>", "a", "##b", "ab", "##a"]), "merges": ["a ##b"]});
    let unigram = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": false,
        "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["▁", -1.5], ["a", -2.0], ["▁a", -2.5], ["b", -3.0], ["é", -4.0], ["ab", -5.0]]});
    let word_piece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab(&["[UNK]", "[CLS]", "a", "##b", "e", "##a"])});
    let word_level =
        json!({"type": "WordLevel", "unk_token": "?", "vocab": vocab(&["?", "a", "b", "ab", "aa"])});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": true, "prepend_scheme": "always", "split": true});
    let fallback = json!({"type": "Sequence", "decoders": [
        replace("String", "▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let precompiled = json!({"type": "Precompiled", "precompiled_charsmap": charsmap()});
    let added = [special(1, "<s>", false, false), special(2, "</s>", true, true)];

    let files = [
        json!({"added_tokens": added, "post_processor": template("<s>"), "decoder": fallback, "model": sentencepiece,
               "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace("String", " ", "▁")]}}),
        json!({"normalizer": replace("String", " ", "▁"), "pre_tokenizer": split("String", " ", "MergedWithPrevious"),
               "decoder": {"type": "Sequence", "decoders": [replace("String", "▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]},
               "post_processor": template("<s>"), "model": sentencepiece}),
        json!({"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
               "decoder": fallback, "model": sentencepiece}),
        json!({"added_tokens": [special(0, "<s>", false, false)],
               "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("Regex", llama3, "Isolated"), byte_level(false, false)]},
               "post_processor": {"type": "Sequence", "processors": [byte_level(true, true), template("<s>")]},
               "decoder": byte_level(true, true), "model": bpe}),
        json!({"normalizer": {"type": "NFC"}, "decoder": byte_level(false, false), "post_processor": byte_level(false, false), "model": bpe,
               "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                   split("Regex", "[\r\n]", "Removed"), split("Regex", r"\s?\p{P}+", "Contiguous"),
                   {"type": "Digits", "individual_digits": true}, byte_level(false, true)]}}),
        json!({"added_tokens": [special(0, "<s>", true, false)], "pre_tokenizer": byte_level(true, true), "model": bpe,
               "decoder": byte_level(true, true),
               "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": false}}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [precompiled, replace("Regex", " {2,}", " ")]},
               "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
               "post_processor": template("<s>"), "decoder": metaspace, "model": unigram}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [
                   replace("String", "``", "\""), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, precompiled,
                   {"type": "NFKC"}, {"type": "NFD"}, {"type": "Nmt"}, {"type": "Strip", "strip_left": true, "strip_right": true}]},
               "pre_tokenizer": metaspace, "decoder": metaspace, "model": unigram}),
        json!({"normalizer": bert, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": word_piece,
               "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
               "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true}}),
        json!({"normalizer": bert, "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
               "model": suffixed}),
        json!({"pre_tokenizer": {"type": "Whitespace"}, "model": prefixed, "decoder": {"type": "CTC", "pad_token": "<s>",
               "word_delimiter_token": "|", "cleanup": true}}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                   {"type": "CharDelimiterSplit", "delimiter": "-"}, {"type": "Punctuation", "behavior": "Isolated"},
                   {"type": "UnicodeScripts"}, {"type": "FixedLength", "length": 5}, {"type": "Whitespace"}]},
               "normalizer": {"type": "ByteLevel"}, "model": word_level,
               "padding": {"strategy": {"Fixed": 30}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "?"},
               "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 1}}),
    ];
    let whole = |mut file: Value| {
        file["version"] = json!("1.0");
        file.to_string().into_bytes()
    };
    files.into_iter().chain([demo(), of_recorded()]).map(whole).collect()
}

/// Returns a character map in SentencePiece's format that maps a to b.
fn charsmap() -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};

    let mut units = vec![0_u32; 256];
    units[usize::from(b'a')] = 1 << 8 | u32::from(b'a') | 1 << 10;
    let mut bytes = 1024_u32.to_le_bytes().to_vec();
    bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    bytes.extend(b"b\0");
    STANDARD.encode(bytes)
}
