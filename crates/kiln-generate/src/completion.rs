//! What a generation returns for a prompt.

use kiln_core::model::TokenId;

use crate::stopping::StopReason;

/// A sequence that was generated for a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// The tokens behind the prompt, the one that ends them included.
    pub tokens: Vec<TokenId>,
    /// Their text, up to a stop string; `None` where nobody knows the tokenizer.
    pub text: Option<String>,
    /// Why it ended; `None` where the generation was given up before.
    pub stop_reason: Option<StopReason>,
    /// Of a beam search: the sum of `token_scores`, divided by the number of tokens to the power of `length_penalty`. With
    /// groups of beams, the sum includes what the diversity penalty took. (`sequences_scores`)
    pub score: Option<f32>,
    /// Of a beam search, for each token: its log-probability after all processors. (`compute_transition_scores`)
    pub token_scores: Vec<f32>,
    /// Of a beam search, for each token: the row that it continued. (`beam_indices`)
    pub beam_indices: Vec<usize>,
}
