//! The tokens of a text, with their log-probabilities.

use kiln_core::model::TokenId;

/// A token that a text was made of.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GeneratedToken {
    pub id: TokenId,
    /// `None` unless [`Request::logprobs`](crate::Request::logprobs) asked for it.
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities of a step, by the model's logits before any setting changes them: their `log_softmax`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Logprobs {
    /// That of the token that was chosen.
    pub chosen: f32,
    /// The likeliest tokens, the likeliest first.
    pub top: Vec<(TokenId, f32)>,
}

/// A piece of a text in an [`Engine`](crate::Engine).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Piece {
    pub text: String,
    /// The tokens since the piece before. The last may continue in the next piece.
    pub tokens: Vec<GeneratedToken>,
}

impl Logprobs {
    pub(super) fn of(logits: &[f32], chosen: TokenId, top: usize) -> Self {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
        let log_prob = |logit: f32| (f64::from(logit) - f64::from(most) - sum.ln()) as f32;
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        // Equal ones in the order of their numbers.
        let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        let top = top.min(ids.len());
        if top < ids.len() {
            ids.select_nth_unstable_by(top, by_logit);
        }
        ids.truncate(top);
        ids.sort_unstable_by(by_logit);
        Self {
            chosen: logits.get(chosen as usize).map_or(f32::NEG_INFINITY, |&logit| log_prob(logit)),
            top: ids.into_iter().map(|id| (id as TokenId, log_prob(logits[id]))).collect(),
        }
    }
}
