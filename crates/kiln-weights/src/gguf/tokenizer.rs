//! The tokenizer in the metadata of a GGUF file, converted to the files of a Hugging Face folder.
//!
//! Keys: `docs/gguf.md` of ggml. Behaviour: the model's own tokenizer in Transformers if it is known,
//! otherwise `llama-vocab.cpp` of llama.cpp. [`tokenizer_json`] returns the format of the `tokenizers` crate.

mod byte_level;
pub(super) mod pre_tokenizer;
mod sentencepiece;
#[cfg(test)]
mod tests;
mod vocabulary;
mod word_piece;

use serde_json::{Map, Value, json};

use self::vocabulary::{Kind, Vocabulary};
use super::{Metadata, shown};
use crate::Error;

/// Tokens that end a text or a turn in chats. A GGUF file names only one of them as its `eos_token_id`. The
/// list is llama.cpp's (`special_eog_ids`), without the tokens of unsupported models.
pub(super) const ENDS: [&str; 11] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",
];

/// Names of special tokens in `tokenizer_config.json`, and in keys of GGUF.
const SPECIAL: [(&str, &str); 7] = [
    ("bos_token", "bos"),
    ("eos_token", "eos"),
    ("unk_token", "unknown"),
    ("pad_token", "padding"),
    ("sep_token", "seperator"),
    ("cls_token", "cls"),
    ("mask_token", "mask"),
];

/// The differences between kinds of tokenizers. The values are fields of `tokenizer.json`.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Value,
    /// Adds tokens around texts; null if it adds none.
    post_processor: Value,
}

/// Returns the `tokenizer.json` for the tokenizer in `tokenizer.ggml.*`.
///
/// The model `gpt2` is byte-level BPE; `llama` and `gemma4` are SentencePiece's BPE with byte fallback;
/// `bert` is WordPiece.
///
/// # Errors
/// Another model, an unknown pre-tokenizer, and keys that are missing or contradict each other.
pub fn tokenizer_json(metadata: &Metadata) -> Result<Value, Error> {
    let vocabulary = Vocabulary::read(metadata)?;
    let parts = match vocabulary.model {
        "gpt2" => byte_level::parts(metadata, &vocabulary)?,
        "llama" | "gemma4" => sentencepiece::parts(metadata, &vocabulary)?,
        "bert" => word_piece::parts(metadata, &vocabulary)?,
        other => {
            let why =
                format!("is {}, which is not supported; known: gpt2, llama, gemma4, bert", shown(other));
            return Err(wrong("model", why));
        }
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": parts.post_processor,
        "decoder": parts.decoder,
        "model": parts.model,
    }))
}

/// Returns the `tokenizer_config.json`: chat templates, special tokens by name, and the longest sequence in
/// tokens.
///
/// # Errors
/// Returns an error if the metadata has no tokens, or values of wrong types.
pub fn tokenizer_config(metadata: &Metadata) -> Result<Value, Error> {
    let vocabulary = Vocabulary::read(metadata)?;
    let mut config = Map::new();
    for (name, key) in SPECIAL {
        if let Some(id) = vocabulary.special(metadata, key)? {
            config.insert(name.to_owned(), vocabulary.text(id).into());
        }
    }
    for name in ["add_bos_token", "add_eos_token"] {
        if let Some(adds) = metadata.boolean(&format!("tokenizer.ggml.{name}"))? {
            config.insert(name.to_owned(), adds.into());
        }
    }
    if let Some(architecture) = metadata.text("general.architecture")? {
        let longest = metadata.unsigned(&format!("{architecture}.context_length"))?;
        config.extend(longest.map(|longest| ("model_max_length".to_owned(), longest.into())));
    }
    config.extend(chat_template(metadata)?.map(|template| ("chat_template".to_owned(), template)));
    Ok(config.into())
}

/// Returns the `generation_config.json`: ids of the tokens that begin and end a text, and of padding.
///
/// # Errors
/// Returns an error if the metadata has no tokens, or values of wrong types.
pub fn generation_config(metadata: &Metadata) -> Result<Value, Error> {
    let vocabulary = Vocabulary::read(metadata)?;
    let mut config = Map::new();
    for (name, key) in [("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        let id = vocabulary.special(metadata, key)?;
        config.extend(id.map(|id| (name.to_owned(), id.into())));
    }
    let mut ends = Vec::new();
    for key in ["eos", "eot", "eom"] {
        ends.extend(vocabulary.special(metadata, key)?);
    }
    let by_text = vocabulary.tokens.iter().zip(0..);
    let by_text = by_text.filter(|(token, _)| matches!(token.kind, Kind::Control | Kind::UserDefined));
    ends.extend(by_text.filter(|(token, _)| ENDS.contains(&&*token.text)).map(|(_, id)| id));
    let mut unique: Vec<u32> = Vec::new();
    for id in ends {
        if !unique.contains(&id) {
            unique.push(id);
        }
    }
    if !unique.is_empty() {
        config.insert("eos_token_id".to_owned(), unique.into());
    }
    if let Some(ids) = metadata.integers("tokenizer.ggml.suppress_tokens")? {
        config.insert("suppress_tokens".to_owned(), ids.into());
    }
    Ok(config.into())
}

/// Returns one template, or a list of named ones; `None` if the file has none.
fn chat_template(metadata: &Metadata) -> Result<Option<Value>, Error> {
    const KEY: &str = "tokenizer.chat_template";
    let default = metadata.text(KEY)?;
    let mut named = Vec::new();
    for (key, value) in metadata.iter() {
        // `tokenizer.chat_template.NAME`
        let name = key.strip_prefix(KEY).and_then(|rest| rest.strip_prefix('.'));
        if let (Some(name), Some(template)) = (name, value.as_str()) {
            named.push(json!({ "name": name, "template": template }));
        }
    }
    if named.is_empty() {
        return Ok(default.map(Value::from));
    }
    let default = default.map(|template| json!({ "name": "default", "template": template }));
    Ok(Some(default.into_iter().chain(named).collect()))
}

/// Returns the post-processor, which adds the tokens `bos` and `eos`; null if it adds none.
fn template(metadata: &Metadata, vocabulary: &Vocabulary<'_>, adds_bos: bool) -> Result<Value, Error> {
    let mut tokens = Map::new();
    let mut piece = |name: &str, default: bool| {
        let key = format!("add_{name}_token");
        let asked = metadata.boolean(&format!("tokenizer.ggml.{key}"))?;
        if !asked.unwrap_or(default) {
            return Ok(None);
        }
        let id = match vocabulary.special(metadata, name)? {
            None if asked.is_some() => vocabulary.assumed(),
            id => id,
        };
        let Some(id) = id else {
            return match asked {
                Some(_) => {
                    Err(wrong(&key, format!("is true, and `tokenizer.ggml.{name}_token_id` names no token")))
                }
                None => Ok(None),
            };
        };
        let text = vocabulary.text(id);
        tokens.insert(text.to_owned(), json!({ "id": text, "ids": [id], "tokens": [text] }));
        Ok(Some(text))
    };
    let (bos, eos) = (piece("bos", adds_bos)?, piece("eos", false)?);
    if bos.is_none() && eos.is_none() {
        return Ok(Value::Null);
    }
    let around = |text: &str, number: u32| {
        let token = |token| json!({ "SpecialToken": { "id": token, "type_id": number } });
        let text = json!({ "Sequence": { "id": text, "type_id": number } });
        bos.map(token).into_iter().chain([text]).chain(eos.map(token)).collect::<Vec<Value>>()
    };
    let pair = [around("A", 0), around("B", 1)].concat();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": pair,
        "special_tokens": tokens,
    }))
}

/// Returns an error about the key `tokenizer.ggml.` + `key`.
fn wrong(key: &str, why: impl Into<String>) -> Error {
    Error::Metadata { key: format!("tokenizer.ggml.{key}"), why: why.into() }
}

/// Returns the model of `tokenizer.json` for byte-pair encoding, with the settings that all kinds share.
fn bpe(vocabulary: &Vocabulary<'_>, merges: Vec<Value>) -> Map<String, Value> {
    let mut model = Map::new();
    model.insert("type".to_owned(), "BPE".into());
    model.insert("vocab".to_owned(), vocabulary.ids_by_text().into());
    model.insert("merges".to_owned(), merges.into());
    model
}
