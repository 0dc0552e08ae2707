//! SentencePiece's BPE (Kudo and Richardson, 2018; `LlamaConverter` of Transformers): spaces become `▁`,
//! letters are merged over the whole text, and letters that are not tokens are written as bytes.

use serde_json::{Value, json};

use super::{
    Parts, bpe,
    byte_level::merges,
    template,
    vocabulary::{Kind, Vocabulary},
    wrong,
};
use crate::{Error, gguf::Metadata};

/// Maximum length of a token in bytes, because each token is cut at every letter. SentencePiece's default is
/// 16 letters.
const MOST_BYTES: usize = 1024;

pub(super) fn parts(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Parts, Error> {
    let prefix = metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(vocabulary.model == "llama");
    let unknown = vocabulary.special(metadata, "unknown")?.map(|id| vocabulary.text(id));
    let merges = match merges(metadata, vocabulary)? {
        Some(merges) => merges,
        None => merges_by_score(vocabulary)?,
    };
    let mut model = bpe(vocabulary, merges);
    model.insert("unk_token".to_owned(), unknown.into());
    model.insert("fuse_unk".to_owned(), true.into());
    model.insert("byte_fallback".to_owned(), true.into());

    let mut normalizers = vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" })];
    let mut decoders = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    if prefix {
        normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(Parts {
        normalizer: json!({ "type": "Sequence", "normalizers": normalizers }),
        pre_tokenizer: Value::Null,
        decoder: json!({ "type": "Sequence", "decoders": decoders }),
        model: model.into(),
        post_processor: template(metadata, vocabulary, true)?,
    })
}

/// Returns the merges that SentencePiece's scores imply: all pairs that yield a token, in descending order of
/// scores.
///
/// Files that were converted from a `tokenizer.json` have equal scores everywhere. Their ids are in the order
/// of merges.
///
/// # Errors
/// A token that is too long.
fn merges_by_score(vocabulary: &Vocabulary<'_>) -> Result<Vec<Value>, Error> {
    let text =
        |id: u32| vocabulary.token(id).filter(|token| token.kind == Kind::Normal).map(|token| &*token.text);
    let mut ids: Vec<u32> = (0..vocabulary.tokens.len() as u32).filter(|id| text(*id).is_some()).collect();
    // Zeros of both signs compare as equal.
    let score = |id: &u32| vocabulary.token(*id).map_or(0.0, |token| token.score + 0.0);
    // Stable, so equal scores keep the order of ids.
    ids.sort_by(|a, b| score(b).total_cmp(&score(a)));
    let mut merges = Vec::new();
    for id in ids {
        let Some(whole) = text(id) else { continue };
        if whole.len() > MOST_BYTES {
            return Err(wrong(
                "tokens",
                format!("has a token of {} bytes, at most {MOST_BYTES} are taken", whole.len()),
            ));
        }
        let normal = |part: &str| vocabulary.id(part).filter(|id| text(*id).is_some());
        let cuts = whole.char_indices().skip(1).filter_map(|(at, _)| whole.split_at_checked(at));
        let mut pairs: Vec<_> =
            cuts.filter_map(|(left, right)| Some((normal(left)?, normal(right)?, left, right))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(.., left, right)| json!([left, right])));
    }
    Ok(merges)
}
