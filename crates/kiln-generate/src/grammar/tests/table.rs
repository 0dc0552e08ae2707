//! The bytes of tokens are those that the tokenizer decodes.

use serde_json::json;

use super::*;

/// Tokenizers of all kinds, with texts that they can spell.
fn kinds() -> Vec<(&'static str, Value, Vec<&'static str>)> {
    // Pieces of SentencePiece: a space is U+2581, and what has no token is spelled in bytes.
    let mut pieces = vec!["<unk>".to_owned(), "<s>".into(), "</s>".into()];
    pieces.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    pieces.extend((b'!'..=b'~').map(|byte| char::from(byte).to_string()));
    pieces.extend(["▁", "he", "ll", "▁he", "é"].map(str::to_owned));
    let special: Vec<Value> = (0..3)
        .map(|id| {
            json!({"id": id, "content": pieces[id], "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
        })
        .collect();
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(id, piece)| (piece.clone(), json!(id))).collect();
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let sentence = json!({
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]},
        "decoder": {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "l l", "▁ he"], "unk_token": "<unk>",
            "byte_fallback": true},
    });
    let unigram = json!({
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["▁", -1.0], ["▁he", -1.0], ["l", -2.0], ["lo", -1.5], ["o", -2.0]]},
    });
    let words = ["[UNK]", "hello", "world", "##s", "##ly", ".", "don", "'", "t"];
    let words: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let word_piece = json!({
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "vocab": words, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100},
    });
    let plain = json!({
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
    });
    let suffix = json!({
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "b</w>": 2, "ab</w>": 3, "a</w>": 4}, "merges": ["a b</w>"],
            "end_of_word_suffix": "</w>"},
    });
    vec![
        ("sentence", sentence, vec!["hello", "he said: {\"é\": 漢🙂}", "  two  spaces"]),
        ("unigram", unigram, vec!["hello", "he lo o"]),
        ("word piece", word_piece, vec!["hello worlds.", "don't hello"]),
        ("plain", plain, vec!["a b a"]),
        ("suffix", suffix, vec!["ab b a ab"]),
    ]
}

fn loaded(file: &Value) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::load(file.to_string().as_bytes()).unwrap())
}

/// Checks that, in the middle of a text, the bytes of the tokens are what the tokenizer decodes.
fn agrees(name: &str, tokenizer: &Tokenizer, table: &TokenTable, text: &str) {
    let ids = tokenizer.encode(text, false).unwrap();
    let bytes = |ids: &[TokenId]| ids.iter().flat_map(|id| table.bytes(*id).to_vec()).collect::<Vec<u8>>();
    for from in 0..ids.len() {
        for to in from + 1..ids.len() {
            let decoded = |to| tokenizer.decode(&ids[..to], false).unwrap();
            let (before, after) = (decoded(from), decoded(to));
            // Compares where both end with a whole character, and where the end of a text is not treated
            // differently.
            if from > 0 && !before.contains('\u{FFFD}') && !after.contains('\u{FFFD}') && name != "suffix" {
                assert_eq!(before + str::from_utf8(&bytes(&ids[from..to])).unwrap(), after, "{name}: {text}");
            }
        }
    }
    // The decoder may remove a space at either end.
    let whole = bytes(&ids);
    assert_eq!(
        str::from_utf8(&whole).unwrap().trim(),
        tokenizer.decode(&ids, false).unwrap().trim(),
        "{name}"
    );
}

#[test]
fn bytes_of_tokens_agree_with_decoding() {
    for (name, file, texts) in kinds() {
        let tokenizer = loaded(&file);
        let table = TokenTable::new(tokenizer.clone(), 400, &[]).unwrap();
        texts.iter().for_each(|text| agrees(name, &tokenizer, &table, text));
    }
    for text in ["Once upon a time, {\"a\": [1]}", "é漢🙂\n\n  x\u{1}"] {
        agrees("demo", &demo(), &table(), text);
    }
}

#[test]
fn forced_text_is_split_as_by_the_tokenizer() {
    let (_, file, _) = kinds().swap_remove(0);
    let tokenizer = loaded(&file);
    let table = Arc::new(TokenTable::new(tokenizer.clone(), 400, &[2]).unwrap());
    assert!(table.forces());
    let mut row = Grammar::regex("x hello hello").unwrap().compile(&table).unwrap();
    let forced = row.forced().unwrap();
    let whole = tokenizer.encode("x hello hello", false).unwrap();
    // The tokenizer begins a text with a space.
    assert_eq!(tokenizer.decode(&whole[..1], false).unwrap(), "");
    assert!(whole[1..].starts_with(&forced), "{forced:?} of {whole:?}");
    assert!(forced.len() > 5);
}

#[test]
fn tokenizers_without_ascii_force_no_tokens() {
    for (name, file, _) in kinds().into_iter().skip(1) {
        assert!(!TokenTable::new(loaded(&file), 400, &[]).unwrap().forces(), "{name}");
    }
    let (_, file, _) = kinds().swap_remove(2);
    let table = Arc::new(TokenTable::new(loaded(&file), 9, &[0]).unwrap());
    let mut row = Grammar::regex("( hello| world)(s|ly)").unwrap().compile(&table).unwrap();
    assert_eq!(row.mask().unwrap().tokens().collect::<Vec<_>>(), [1, 2]);
    row.accept(2).unwrap();
    assert_eq!(row.mask().unwrap().tokens().collect::<Vec<_>>(), [3, 4]);
    row.accept(3).unwrap();
    assert!(row.must_end());
}

#[test]
fn padding_and_special_tokens_are_not_allowed() {
    // 100 ids that the tokenizer does not have.
    let table = Arc::new(TokenTable::new(demo(), 2148, &[EOS]).unwrap());
    for mut row in [Grammar::regex("(?s:.*)").unwrap(), Grammar::lark("start: <[*]> /(?s:.*)/").unwrap()]
        .map(|grammar| grammar.compile(&table).unwrap())
    {
        let mask = row.mask().unwrap();
        assert_eq!(mask.vocab(), 2148);
        assert!(mask.count() > 1000);
        assert!((2048..2148).all(|id| !mask.allows(id)));
        row.accept(2100).unwrap_err();
    }
    let mask = regex("(?s:.*)").mask().unwrap();
    assert!(!mask.allows(0) && mask.allows(EOS) && !mask.allows(2));
}

#[test]
fn unusable_tokenizers_and_end_tokens_are_errors() {
    let ctc = json!({
        "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": false},
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
    });
    let error = TokenTable::new(loaded(&ctc), 2, &[]).unwrap_err().to_string();
    assert!(error.starts_with("grammar: the tokenizer cannot be used") && error.contains("CTC"), "{error}");
    let error = TokenTable::new(demo(), 2048, &[2048]).unwrap_err().to_string();
    assert!(error.starts_with("eos_token_id: token 2048"), "{error}");
    assert!(TokenTable::new(demo(), 1 << 24, &[]).unwrap_err().to_string().contains("at most"));
}
