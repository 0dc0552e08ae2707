//! Byte-level BPE (Radford et al., 2019; `ByteLevel` of tokenizers): texts are cut into words, whose bytes
//! are merged.

use serde_json::{Value, json};

use super::{
    Parts, bpe,
    pre_tokenizer::{self, PreTokenizer},
    template,
    vocabulary::Vocabulary,
    wrong,
};
use crate::{
    Error,
    gguf::{Metadata, shown},
};

pub(super) fn parts(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Parts, Error> {
    let cut = PreTokenizer::of(metadata)?;
    let merges =
        merges(metadata, vocabulary)?.ok_or_else(|| wrong("merges", "is missing, and `gpt2` needs it"))?;
    let mut model = bpe(vocabulary, merges);
    model.insert("ignore_merges".to_owned(), cut.ignores_merges.into());
    Ok(Parts {
        normalizer: if cut.composes { json!({ "type": "NFC" }) } else { Value::Null },
        pre_tokenizer: cut.json(),
        decoder: pre_tokenizer::bytes(),
        model: model.into(),
        post_processor: template(metadata, vocabulary, cut.adds_bos)?,
    })
}

/// Returns pairs of tokens, in the order of merging; `None` if the file has none.
///
/// # Errors
/// A pair that does not yield a token.
pub(super) fn merges(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Option<Vec<Value>>, Error> {
    let Some(lines) = metadata.strings("tokenizer.ggml.merges")? else { return Ok(None) };
    let mut text = String::new();
    let mut pair = |line: &String| {
        // Not at the start: the left token may be a space.
        let space = line.char_indices().skip(1).find(|(_, letter)| *letter == ' ');
        let (left, right) = space.and_then(|(at, _)| Some((line.get(..at)?, line.get(at + 1..)?)))?;
        text.clear();
        text.extend([left, right]);
        let exist = [left, right, &text].iter().all(|text| vocabulary.id(text).is_some());
        exist.then(|| json!([left, right]))
    };
    let merge = |line| {
        pair(line).ok_or_else(|| {
            wrong("merges", format!("has {}, which is no pair of tokens that gives a token", shown(line)))
        })
    };
    lines.iter().map(merge).collect::<Result<_, _>>().map(Some)
}
