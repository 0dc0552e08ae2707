//! The prompt of a request.

use kiln_core::{Result, model::TokenId, model_cache::ModelCache};

use crate::Model;

/// The text or tokens that a model continues.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prompt {
    /// Text. The tokenizer adds the special tokens that begin a text, unless a cache with the beginning is
    /// continued.
    Text(String),
    /// Text that includes its special tokens, such as a rendered chat template. None are added.
    Rendered(String),
    /// Tokens of one row.
    Tokens(Vec<TokenId>),
    /// Tokens of several rows, of any lengths.
    Batch(Vec<Vec<TokenId>>),
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&String> for Prompt {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<Vec<TokenId>> for Prompt {
    fn from(tokens: Vec<TokenId>) -> Self {
        Self::Tokens(tokens)
    }
}

impl From<&[TokenId]> for Prompt {
    fn from(tokens: &[TokenId]) -> Self {
        Self::Tokens(tokens.to_vec())
    }
}

impl From<Vec<Vec<TokenId>>> for Prompt {
    fn from(rows: Vec<Vec<TokenId>>) -> Self {
        Self::Batch(rows)
    }
}

impl From<&[Vec<TokenId>]> for Prompt {
    fn from(rows: &[Vec<TokenId>]) -> Self {
        Self::Batch(rows.to_vec())
    }
}

impl Prompt {
    /// The tokens of each row. `continues`: whether they follow the tokens in `cache`.
    pub(super) fn rows(
        self,
        model: &Model,
        cache: &ModelCache,
        continues: bool,
    ) -> Result<Vec<Vec<TokenId>>> {
        let (text, adds_special_tokens) = match self {
            Self::Tokens(row) => return Ok(vec![row]),
            Self::Batch(rows) => return Ok(rows),
            Self::Text(text) => (text, !continues),
            Self::Rendered(text) => (text, false),
        };
        model.check_length(&text, cache)?;
        Ok(vec![match adds_special_tokens {
            true => model.encode(&text)?,
            false => model.encode_more(&text)?,
        }])
    }
}
