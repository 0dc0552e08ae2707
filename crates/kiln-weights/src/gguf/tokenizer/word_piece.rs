//! WordPiece (Schuster and Nakajima, 2012; `BertTokenizer` of Transformers): words are cut at white space and
//! punctuation, and each into the longest tokens from its beginning on.

use std::borrow::Cow;

use serde_json::json;

use super::{Parts, vocabulary::Vocabulary, wrong};
use crate::{Error, gguf::Metadata};

/// Begins a token within a word.
const INSIDE: &str = "##";

/// The beginning of a word in files.
const BEGIN: char = '▁';

/// Returns the text of a token in a folder. Files mark tokens that begin a word, folders all others.
pub(super) fn text(stored: &str) -> Cow<'_, str> {
    match stored.strip_prefix(BEGIN) {
        Some(text) => Cow::from(text),
        None => Cow::from(format!("{INSIDE}{stored}")),
    }
}

pub(super) fn parts(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Parts, Error> {
    let switch = |name: &str| metadata.boolean(&format!("tokenizer.ggml.normalizer.{name}"));
    let lower_case = switch("lowercase")?.unwrap_or(true);
    let token = |name: &str| {
        let why = "names no token of the vocabulary";
        let found = vocabulary.special(metadata, name)?.map(|id| (vocabulary.text(id), id));
        found.ok_or_else(|| wrong(&format!("{name}_token_id"), why))
    };
    // Files have either name, or both.
    let begin = match metadata.get("tokenizer.ggml.cls_token_id") {
        Some(_) => token("cls")?,
        None => token("bos")?,
    };
    let ((unknown, _), end) = (token("unknown")?, token("seperator")?);
    Ok(Parts {
        normalizer: json!({
            "type": "BertNormalizer",
            "clean_text": true,
            "handle_chinese_chars": true,
            "strip_accents": switch("strip_accents")?.unwrap_or(lower_case),
            "lowercase": lower_case,
        }),
        pre_tokenizer: json!({ "type": "BertPreTokenizer" }),
        decoder: json!({ "type": "WordPiece", "prefix": INSIDE, "cleanup": true }),
        model: json!({
            "type": "WordPiece",
            "vocab": vocabulary.ids_by_text(),
            "unk_token": unknown,
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": 100,
        }),
        post_processor: json!({ "type": "BertProcessing", "cls": begin, "sep": end }),
    })
}
