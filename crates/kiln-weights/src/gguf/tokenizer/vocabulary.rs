//! The vocabulary of a GGUF file: texts, kinds and scores of tokens by id, and the special tokens.

use std::{borrow::Cow, collections::HashMap};

use serde_json::{Map, Value, json};

use super::{word_piece, wrong};
use crate::{
    Error,
    gguf::{Array, Metadata, shown},
};

/// The kind of a token, `tokenizer.ggml.token_type` (`llama_token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text; also the meaning of an unknown number.
    Normal,
    Unknown,
    /// Not text, for example the end of a text.
    Control,
    /// Text that is matched before all others.
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn of(number: u64) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

#[derive(Debug)]
pub(super) struct Token<'a> {
    pub(super) text: Cow<'a, str>,
    pub(super) kind: Kind,
    /// Merge priority: tokens with a high score are merged first. 0 if the file has none.
    pub(super) score: f64,
}

/// The tokens of a file, by id.
#[derive(Debug)]
pub(super) struct Vocabulary<'a> {
    /// `tokenizer.ggml.model`
    pub(super) model: &'a str,
    pub(super) tokens: Vec<Token<'a>>,
    ids: HashMap<&'a str, u32>,
    /// The token for text outside of the vocabulary.
    unknown: Option<u32>,
    /// Whether white space after an added token belongs to it.
    strips: bool,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary from metadata.
    ///
    /// # Errors
    /// Keys that are missing or of wrong types; two tokens with the same text.
    pub(super) fn read(metadata: &'a Metadata) -> Result<Self, Error> {
        let missing = |key: &str| wrong(key, "is missing; the file has no tokenizer");
        let model = metadata.text("tokenizer.ggml.model")?.ok_or_else(|| missing("model"))?;
        let texts = metadata.strings("tokenizer.ggml.tokens")?.ok_or_else(|| missing("tokens"))?;
        if u32::try_from(texts.len()).is_err() {
            return Err(wrong("tokens", "has more tokens than 32-bit ids can name"));
        }
        let kinds = metadata.integers("tokenizer.ggml.token_type")?;
        let scores = scores(metadata)?;
        for (key, len) in
            [("token_type", kinds.as_ref().map(Vec::len)), ("scores", scores.as_ref().map(Vec::len))]
        {
            if let Some(len) = len.filter(|len| *len < texts.len()) {
                return Err(wrong(key, format!("has {len} entries for {} tokens", texts.len())));
            }
        }
        let mut ids = HashMap::with_capacity(texts.len());
        let mut tokens = Vec::with_capacity(texts.len());
        for (id, text) in (0..).zip(texts) {
            let kind = kinds
                .as_ref()
                .and_then(|kinds| kinds.get(id as usize))
                .map_or(Kind::Normal, |kind| Kind::of(*kind));
            let score = scores.as_ref().and_then(|scores| scores.get(id as usize)).copied().unwrap_or(0.0);
            let is_empty = text.is_empty();
            if !is_empty && let Some(first) = ids.insert(text.as_str(), id) {
                return Err(wrong(
                    "tokens",
                    format!("has the token {} twice, with the ids {first} and {id}", shown(text)),
                ));
            }
            let text = match (model, kind) {
                // llama.cpp's name for tokens without a text.
                _ if is_empty => Cow::from(format!("[EMPTY_{id}]")),
                ("bert", kind) if kind != Kind::Control => word_piece::text(text),
                _ => Cow::from(text),
            };
            tokens.push(Token { text, kind, score });
        }
        let name = metadata.text("general.name")?.unwrap_or_default().to_lowercase();
        let strips = ["phi-3", "phi3"].iter().any(|phi| name.contains(phi));
        let mut vocabulary = Self { model, tokens, ids, unknown: None, strips };
        vocabulary.unknown = vocabulary.special(metadata, "unknown")?;
        Ok(vocabulary)
    }

    /// Returns the id of the token with this text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub(super) fn token(&self, id: u32) -> Option<&Token<'a>> {
        self.tokens.get(id as usize)
    }

    pub(super) fn text(&self, id: u32) -> &str {
        self.token(id).map_or("", |token| &token.text)
    }

    /// Returns the id in `tokenizer.ggml.{name}_token_id`, or the default of the format. A number that no
    /// token has counts as absent: files write -1 for it.
    ///
    /// # Errors
    /// A value that is not a number.
    pub(super) fn special(&self, metadata: &Metadata, name: &str) -> Result<Option<u32>, Error> {
        let default = match (self.model, name) {
            ("llama", "unknown") => Some(0),
            ("llama", "bos") => Some(1),
            ("llama", "eos") => Some(2),
            ("bert", "unknown") => Some(100),
            ("bert", "bos") => Some(101),
            ("bert", "seperator") => Some(102),
            ("bert", "padding") => Some(0),
            ("bert", "mask") => Some(103),
            _ => None,
        };
        let exists = |id: &u32| self.token(*id).is_some();
        let said = metadata.number(&format!("tokenizer.ggml.{name}_token_id"))?;
        let said = said.filter(|id| *id >= 0.0 && *id < self.tokens.len() as f64).map(|id| id as u32);
        Ok(said.or(default).filter(exists))
    }

    /// Returns the token that llama.cpp adds if a file requests one but names none: the end of a text in
    /// Falcon's vocabulary.
    pub(super) fn assumed(&self) -> Option<u32> {
        const ID: u32 = 11;
        Some(ID).filter(|id| self.model == "gpt2" && self.token(*id).is_some())
    }

    /// Returns the tokens, except those that converters make up for ids without one, which the model's own
    /// file does not have, either.
    fn real(&self) -> impl Iterator<Item = (u32, &Token<'a>)> {
        let made_up = |id: u32, token: &Token<'_>| {
            matches!(token.kind, Kind::Unused | Kind::Unknown) && token.text == format!("[PAD{id}]")
        };
        (0..).zip(&self.tokens).filter(move |(id, token)| !made_up(*id, token))
    }

    /// Returns the vocabulary of `tokenizer.json`.
    pub(super) fn ids_by_text(&self) -> Map<String, Value> {
        self.real().map(|(id, token)| (token.text.clone().into_owned(), id.into())).collect()
    }

    /// Returns the tokens that are matched before a text is cut into words. Tokens that are not text are
    /// special.
    pub(super) fn added_tokens(&self) -> Vec<Value> {
        let special = |id: u32, kind: Kind| match kind {
            Kind::Control => Some(true),
            Kind::Unknown if self.unknown == Some(id) => Some(true),
            Kind::UserDefined => Some(false),
            _ => None,
        };
        let added = self.real().filter_map(|(id, token)| Some((id, token, special(id, token.kind)?)));
        let json = |(id, token, special): (u32, &Token<'_>, bool)| {
            // Phi-3's own files say so, except for these; GGUF has no key for it, and llama.cpp also uses the
            // name.
            let strips = self.strips && !matches!(&*token.text, "<unk>" | "<s>" | "<|endoftext|>");
            json!({
                "id": id,
                "content": token.text,
                "single_word": false,
                "lstrip": false,
                "rstrip": strips,
                "normalized": false,
                "special": special,
            })
        };
        added.map(json).collect()
    }
}

/// Reads scores as floats; old files have integers.
fn scores(metadata: &Metadata) -> Result<Option<Vec<f64>>, Error> {
    const KEY: &str = "tokenizer.ggml.scores";
    match metadata.get(KEY).and_then(|value| value.as_array()) {
        Some(Array::I32(scores)) => Ok(Some(scores.iter().map(|score| f64::from(*score)).collect())),
        _ => metadata.numbers(KEY),
    }
}
