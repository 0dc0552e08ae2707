//! The tokens of a text, with their log-probabilities.

use kiln_core::model::TokenId;
use kiln_generate::Logprobs;

/// A token of a text, or of its prompt.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GeneratedToken {
    pub id: TokenId,
    /// `None` unless [`Request::logprobs`](crate::Request::logprobs) asked for it.
    pub logprobs: Option<Logprobs>,
}

/// A piece of a text in an [`Engine`](crate::Engine).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    pub text: String,
    /// The tokens of the prompt: in the first piece, if
    /// [`Request::prompt_logprobs`](crate::Request::prompt_logprobs) asked for them.
    pub prompt: Vec<GeneratedToken>,
    /// The tokens since the piece before. The last may continue in the next piece.
    pub tokens: Vec<GeneratedToken>,
}
