//! Texts or tokens of a request, one or several.

use kiln::{EmbeddingInput, TokenId};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a text, a list of texts, a list of tokens, or a list of these")]
pub(super) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<TokenId>),
    Lists(Vec<Vec<TokenId>>),
}

/// One prompt.
#[derive(Clone, Debug)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

impl Prompts {
    pub(super) fn list(self) -> Vec<Prompt> {
        match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::Tokens(tokens) => vec![Prompt::Tokens(tokens)],
            Self::Lists(lists) => lists.into_iter().map(Prompt::Tokens).collect(),
        }
    }
}

impl Prompt {
    /// The size, in bytes of text. A token is counted as four.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => 4 * tokens.len(),
        }
    }
}

impl From<Prompt> for EmbeddingInput {
    fn from(prompt: Prompt) -> Self {
        match prompt {
            Prompt::Text(text) => text.into(),
            Prompt::Tokens(tokens) => tokens.into(),
        }
    }
}
