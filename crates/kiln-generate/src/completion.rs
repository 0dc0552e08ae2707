//! The result of a generation for a prompt.

use kiln_core::model::TokenId;

use crate::stopping::StopReason;

/// A sequence that was generated for a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// The tokens after the prompt, including the token that ends them.
    pub tokens: Vec<TokenId>,
    /// The text of the tokens, up to a stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// The reason for which the sequence ended; `None` if the generation was dropped before.
    pub stop_reason: Option<StopReason>,
    /// For beam search: the sum of `token_scores`, divided by the number of tokens to the power of
    /// `length_penalty`. With groups of beams, the sum includes the diversity penalty. (`sequences_scores`)
    pub score: Option<f32>,
    /// For beam search, per token: log-probability after all processors. (`compute_transition_scores`)
    pub token_scores: Vec<f32>,
    /// For beam search, per token: index of the row that it continued. (`beam_indices`)
    pub beam_indices: Vec<usize>,
}
