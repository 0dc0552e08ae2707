#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{StopStrings, StoppedText, TextStream};
use crate::Tokenizer;

/// A tokenizer of `tokens`, the last of which is special.
fn tokenizer(tokens: &[String], decoder: Value) -> Arc<Tokenizer> {
    let vocab: Map<String, Value> = tokens.iter().enumerate().map(|(id, t)| (t.clone(), json!(id))).collect();
    let special = json!({
        "id": tokens.len(), "content": "<end>", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
    });
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": decoder, "added_tokens": [special],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
    });
    Arc::new(Tokenizer::load(file.to_string().as_bytes()).unwrap())
}

/// A tokenizer like GPT-2's: a character for every byte; then some tokens of two bytes.
fn byte_level() -> Arc<Tokenizer> {
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut others = 256u32..;
    let characters: Vec<char> = (0..256u32)
        .map(|b| char::from_u32(if printable(b) { b } else { others.next().unwrap() }).unwrap())
        .collect();
    let single = characters.iter().map(|c| c.to_string());
    let mut tokens: Vec<String> = single.collect();
    // Tails of characters with the characters that follow, and two halves of different characters.
    for pair in [[0xac, b'a'], [0x82, 0xac], [0xa9, 0xc3], [0x99, 0x82], [b' ', 0xe2], [b'a', b'b']] {
        tokens.push(pair.iter().map(|&b| characters[b as usize]).collect());
    }
    tokenizer(
        &tokens,
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
    )
}

/// A tokenizer like Llama 2's: words with a mark for the space, and bytes for other text.
fn byte_fallback() -> Arc<Tokenizer> {
    let bytes = (0..256u32).map(|b| format!("<0x{b:02X}>"));
    let words = ["▁", "▁a", "a", "b", "ab", "▁€", "é"].map(str::to_owned);
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    tokenizer(&bytes.chain(words).collect::<Vec<_>>(), decoder)
}

/// All pieces joined, after checking that each is text by itself.
fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer.clone());
    let mut text = String::new();
    for &id in ids {
        let piece = stream.push(id).unwrap().unwrap_or_default();
        assert!(!piece.ends_with('\u{fffd}'), "{piece:?} is cut");
        text.push_str(&piece);
    }
    text.push_str(&stream.finish().unwrap().unwrap_or_default());
    assert_eq!(stream.finish(), Ok(None), "it is empty now");
    text
}

/// Splits `text` into tokens of one or more bytes at random.
fn spelled(tokenizer: &Tokenizer, text: &str, long: &[bool]) -> Vec<u32> {
    let vocab = tokenizer.inner().get_vocab(true);
    let bytes = text.as_bytes();
    let pairs = [[0xac, b'a'], [0x82, 0xac], [0xa9, 0xc3], [0x99, 0x82], [b' ', 0xe2], [b'a', b'b']];
    let (mut ids, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let pair = pairs.iter().position(|pair| bytes[at..].starts_with(pair));
        match pair.filter(|_| long[at % long.len()]) {
            Some(pair) => ids.push(256 + pair as u32),
            None => ids.push(u32::from(bytes[at])),
        }
        at += if ids.last().is_some_and(|&id| id >= 256) { 2 } else { 1 };
        if at % 5 == 0 {
            ids.push(vocab["<end>"]);
        }
    }
    ids
}

proptest! {
    #[test]
    fn streamed_pieces_join_to_the_text(text in "[ab €é🙂\\n]{0,12}", long in prop::collection::vec(any::<bool>(), 1..9)) {
        let tokenizer = byte_level();
        let ids = spelled(&tokenizer, &text, &long);
        prop_assert_eq!(streamed(&tokenizer, &ids), text);
    }

    #[test]
    fn streamed_pieces_equal_decoding_all_ids_together(characters in prop::collection::vec((0usize..12, 0u32..7), 0..12)) {
        // Whole characters, as bytes or as words; incomplete ones are replaced differently as more of their
        // bytes arrive.
        let bytes = ["a", " ", "é", "€", "🙂"];
        let ids: Vec<u32> = characters.iter().flat_map(|&(kind, word)| match bytes.get(kind) {
            Some(character) => character.bytes().map(u32::from).collect(),
            None => vec![256 + word],
        }).collect();
        let tokenizer = byte_fallback();
        prop_assert_eq!(streamed(&tokenizer, &ids), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn a_text_ends_before_the_first_stop_string(
        text in "[abé🙂]{0,24}",
        stops in prop::collection::vec("[abé🙂]{1,4}", 0..4),
        cuts in prop::collection::vec(any::<bool>(), 24),
    ) {
        // Character by character, without holding anything back.
        let longest = |so_far: &str| stops.iter().filter(|s| so_far.ends_with(s.as_str())).map(String::len).max();
        let stop = text.char_indices().map(|(at, c)| at + c.len_utf8()).find_map(|n| Some(n - longest(&text[..n])?));
        let want = &text[..stop.unwrap_or(text.len())];

        let mut stream = StopStrings::new(stops.clone()).unwrap();
        let (mut got, mut piece) = (String::new(), String::new());
        for (character, cut) in text.chars().zip(cuts.iter().cycle()) {
            piece.push(character);
            if *cut {
                got.push_str(&stream.push(&std::mem::take(&mut piece)));
                prop_assert!(want.starts_with(&got), "{} was given out too early", got);
            }
        }
        got.push_str(&stream.push(&piece));
        prop_assert_eq!(stream.found().is_some(), stop.is_some());
        got.push_str(&stream.finish());
        prop_assert_eq!(got, want);
    }
}

#[test]
fn incomplete_characters_are_held_back_and_replaced_at_the_end() {
    let tokenizer = byte_level();
    let mut stream = TextStream::new(tokenizer.clone());
    let euro = "€".as_bytes();
    assert_eq!(stream.push(u32::from(b'a')), Ok(Some("a".to_owned())));
    assert_eq!(stream.push(u32::from(euro[0])), Ok(None));
    assert_eq!(stream.push(u32::from(euro[1])), Ok(None));
    assert_eq!(stream.finish(), Ok(Some("\u{fffd}".to_owned())));
    assert_eq!(stream.push(u32::from(b'b')), Ok(Some("b".to_owned())), "a new text");
}

#[test]
fn special_and_unknown_ids_give_no_text() {
    let tokenizer = byte_level();
    let special = tokenizer.inner().token_to_id("<end>").unwrap();
    assert_eq!(streamed(&tokenizer, &[special, 97, special, 100_000, 98]), "ab");
}

#[test]
fn text_is_held_back_only_where_a_stop_string_may_begin() {
    let mut stops = StopStrings::new(vec!["</s>".to_owned(), "\n\n".to_owned()]).unwrap();
    assert_eq!(stops.push("one <"), "one ");
    assert_eq!(stops.push("b> two\n"), "<b> two");
    assert_eq!(stops.push("</"), "\n");
    assert_eq!(stops.push("s> three"), "");
    assert!(stops.found().is_some());
    assert_eq!((stops.push("four"), stops.finish()), (String::new(), String::new()));
}

#[test]
fn an_empty_stop_string_is_an_error() {
    assert!(StopStrings::new(vec!["a".to_owned(), String::new()]).is_err());
    let mut none = StopStrings::default();
    assert_eq!((none.push("text"), none.found()), ("text".to_owned(), None));
}

/// Decoders like Llama 2's drop the space before the first word; generated text does not begin with the first
/// word.
#[test]
fn a_text_after_a_prompt_keeps_its_first_space() {
    let json = r#"{
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "\u2581The": 1, "\u2581life": 2}, "unk_token": "<unk>"},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ]}
    }"#;
    let tokenizer = Arc::new(Tokenizer::load(json.as_bytes()).unwrap());
    assert_eq!(TextStream::new(tokenizer.clone()).push(2).unwrap().as_deref(), Some("life"));
    let mut stream = TextStream::after(tokenizer.clone(), &[1]).unwrap();
    assert_eq!(stream.push(2).unwrap().as_deref(), Some(" life"));
    assert_eq!(stream.finish().unwrap(), None);
    assert_eq!(
        TextStream::after(tokenizer.clone(), &[1]).unwrap().finish().unwrap(),
        None,
        "the prompt is not repeated"
    );
}

/// A special token has a name, which is searched, and no text.
#[test]
fn a_text_ends_before_a_special_token_that_is_a_stop_string() {
    let tokenizer = byte_level();
    let special = tokenizer.inner().token_to_id("<end>").unwrap();
    let ids = [97, 98, special, 99, 100];
    assert_eq!(tokenizer.searched_text(&ids).unwrap(), "ab<end>cd");
    for (stop, want) in
        [("<end>", "ab"), ("b<end>c", "a"), ("nd>cd", "ab"), ("<end>d", "abcd"), ("bc", "abcd")]
    {
        let mut text = StoppedText::new(TextStream::new(tokenizer.clone()), vec![stop.to_owned()]).unwrap();
        let mut got: String = ids.iter().map(|id| text.push(*id).unwrap()).collect();
        got.push_str(&text.finish().unwrap());
        assert_eq!(got, want, "{stop}");
        assert_eq!(text.found(), (want != "abcd").then_some(stop), "{stop}");
    }
}

proptest! {
    #[test]
    fn hidden_text_is_searched_for_stop_strings(
        pieces in prop::collection::vec(("[abé]{0,3}", any::<bool>()), 0..12),
        stops in prop::collection::vec("[abé]{1,4}", 0..3),
    ) {
        let whole: String = pieces.iter().map(|(piece, _)| piece.as_str()).collect();
        let longest = |so_far: &str| stops.iter().filter(|s| so_far.ends_with(s.as_str())).map(String::len).max();
        let stop = whole.char_indices().map(|(at, c)| at + c.len_utf8()).find_map(|n| Some(n - longest(&whole[..n])?));
        let seen = pieces.iter().flat_map(|(piece, hidden)| piece.bytes().map(|byte| (byte, *hidden)));
        let seen = seen.take(stop.unwrap_or(whole.len())).filter(|(_, hidden)| !hidden).map(|(byte, _)| byte);
        let want = String::from_utf8(seen.collect()).unwrap();

        let mut stream = StopStrings::new(stops.clone()).unwrap();
        let mut got = String::new();
        for (piece, hidden) in &pieces {
            got.push_str(&if *hidden { stream.push_hidden(piece) } else { stream.push(piece) });
            prop_assert!(want.starts_with(&got), "{} was given out too early", got);
        }
        prop_assert_eq!(stream.found().is_some(), stop.is_some());
        got.push_str(&stream.finish());
        prop_assert_eq!(got, want);
    }
}
