//! The tokenizer of a folder for a GGUF file, in which it must tokenize texts as it does in the folder.

use kiln_core::{Error, Result, model::TokenId};
use kiln_generate::Tokenizer;
use kiln_models::{checkpoint::Checkpoint, configure};
use kiln_weights::gguf::{self, Metadata, TokenizerFiles, Value};
use serde_json::Value as Json;

use crate::folder::{TOKENIZER, json, tokenizer_config, tokenizer_json};

/// Texts that tokenizers treat differently: spaces in all places, lines, digits, contractions and letters of
/// other scripts.
const TEXTS: [&str; 17] = [
    "",
    " ",
    "   ",
    "a",
    " a",
    "  a",
    "a ",
    "a b",
    "a  b   c ",
    "\n",
    "a\n\n b\r\n\tc",
    "Don't say WE'LL, said the man.",
    "x=3.14; y[12345678]",
    "naïve e\u{301}té ﬁ",
    "日本語 テキスト",
    "🙂👩‍👩‍👧",
    "<0x0A>",
];
/// Number of added tokens that are tested, evenly spread over all of them.
const MOST_ADDED: usize = 500;

/// The name and the tokenizer of a folder, as metadata.
///
/// # Errors
/// [`Error::File`] for a tokenizer that GGUF cannot represent.
pub(super) fn metadata(checkpoint: &Checkpoint) -> Result<Metadata> {
    let vocab = configure(&checkpoint.config)?.sizes().vocab;
    let mut metadata = Metadata::from_iter([("general.name", Value::String(name(checkpoint)?))]);
    let wrong = |why: String| Error::File { path: checkpoint.path_of(TOKENIZER), why };
    let config = tokenizer_config(checkpoint)?;
    let Some(mut tokenizer) = tokenizer_json(checkpoint, &config)? else {
        const PIECES: &str = "tokenizer.model";
        if checkpoint.names("").iter().any(|name| name == PIECES) {
            let path = checkpoint.path_of(PIECES);
            let why = format!(
                "is not read; make a {TOKENIZER} of it with Transformers (`AutoTokenizer`, `save_pretrained`)"
            );
            return Err(Error::File { path, why });
        }
        // The name that llama.cpp uses for a model that takes tokens.
        metadata.insert("tokenizer.ggml.model", Value::String("none".to_owned()));
        return Ok(metadata);
    };
    if config.splits_special_tokens() {
        let path = checkpoint.path_of("tokenizer_config.json");
        let why = "has `split_special_tokens`, which a GGUF file cannot say".to_owned();
        return Err(Error::File { path, why });
    }
    // Drops tokens that only files other than `tokenizer.json` name, and that are outside the model's
    // vocabulary.
    let own = added(&json(checkpoint, TOKENIZER)?).count();
    if let Some(added) = tokenizer.get_mut("added_tokens").and_then(Json::as_array_mut) {
        let mut place = 0..;
        let fits = |token: &Json| token["id"].as_u64().is_none_or(|id| id < vocab as u64);
        added.retain(|token| place.next().is_some_and(|place| place < own) || fits(token));
    }
    let files = TokenizerFiles {
        tokenizer,
        config: json(checkpoint, "tokenizer_config.json")?,
        generation: json(checkpoint, "generation_config.json")?,
        model: checkpoint.config.json().clone(),
        chat_template: checkpoint.text("chat_template.jinja")?,
    };
    let said = gguf::tokenizer_metadata(&files, vocab).map_err(|e| wrong(e.to_string()))?;
    said.iter().for_each(|(key, value)| _ = metadata.insert(key, value.clone()));
    check(files.tokenizer, &metadata).map_err(wrong)?;
    Ok(metadata)
}

/// The name of the model: that of its folder.
fn name(checkpoint: &Checkpoint) -> Result<String> {
    let folder = checkpoint.folder.canonicalize().unwrap_or_else(|_| checkpoint.folder.clone());
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    // llama.cpp goes by this name to know whose added tokens include the white space after them; there is no
    // key for it.
    let is_phi = ["phi-3", "phi3"].iter().any(|phi| name.to_lowercase().contains(phi));
    let strips = checkpoint.config.model_type()? == "phi3"
        && checkpoint.text(TOKENIZER)?.is_some_and(|text| text.contains("\"rstrip\": true"));
    Ok(if strips && !is_phi { format!("Phi-3 {name}") } else { name })
}

/// Compares the tokenizer of a folder with the one that is read from the metadata of the file.
fn check(tokenizer: Json, metadata: &Metadata) -> Result<(), String> {
    let texts = texts(&tokenizer);
    let own = Tokenizer::from_json(tokenizer)?;
    let written = gguf::tokenizer_json(metadata).map_err(|e| e.to_string())?;
    let written = Tokenizer::from_json(written)?;
    for text in texts {
        let cut = |tokenizer: &Tokenizer| tokenizer.encode(&text, true).map_err(|e| e.to_string());
        let (own_ids, written_ids) = (cut(&own), cut(&written));
        if own_ids != written_ids {
            return Err(format!(
                "a GGUF file cannot say this tokenizer: the text {text:?} {} here, and {} there",
                outcome(&own_ids),
                outcome(&written_ids),
            ));
        }
        let Ok(ids) = own_ids else { continue };
        // llama.cpp treats tokens that look special as special tokens, which have no text there.
        if TEXTS.contains(&&*text) && own.decode(&ids, true) != written.decode(&ids, true) {
            return Err(format!(
                "a GGUF file cannot say the decoder of this tokenizer: the tokens {ids:?} are another text there"
            ));
        }
    }
    Ok(())
}

fn outcome(ids: &Result<Vec<TokenId>, String>) -> String {
    match ids {
        Ok(ids) => format!("becomes the tokens {ids:?}"),
        Err(why) => format!("is refused ({why})"),
    }
}

/// Returns [`TEXTS`], and each added token within text and white space.
fn texts(tokenizer: &Json) -> Vec<String> {
    let step = added(tokenizer).count().div_ceil(MOST_ADDED).max(1);
    let within = |token: &str| {
        // SentencePiece writes this character in place of a space, and texts hardly contain it.
        let token = &*token.replace('▁', " ");
        [format!("a{token}b {token}"), format!("  {token} a {token}  b\n{token}\n"), token.repeat(2)]
    };
    let plain = TEXTS.iter().map(|text| (*text).to_owned());
    plain.chain(added(tokenizer).step_by(step).flat_map(within)).collect()
}

fn added(tokenizer: &Json) -> impl Iterator<Item = &str> {
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    added.map(|token| token["content"].as_str().unwrap_or_default())
}
