//! Verification of drafted tokens.

use kiln_core::{Result, model::TokenId};

use super::{Accepted, Asked, Proposal, constraint::Constraint};
use crate::{
    generation::{Options, rows::Stopping},
    sampler::{Sampler, greedy, no_distribution},
};

/// The inputs of the verification of a row.
#[derive(Debug)]
pub(super) struct Verification<'a> {
    pub(super) row: usize,
    pub(super) asked: &'a Asked<'a>,
    pub(super) proposal: &'a Proposal,
    pub(super) constraint: &'a Constraint<'a>,
    /// `[proposed + 1, vocab]`: after the last token of the row, and after each drafted token.
    pub(super) logits: &'a [f32],
    pub(super) vocab: usize,
    pub(super) options: &'a Options,
    pub(super) stopping: Stopping<'a>,
}

impl Verification<'_> {
    /// The tokens that follow the row: drafted tokens as long as the model would choose them, then one that
    /// it chooses.
    ///
    /// Tokens are chosen as if nothing had been drafted: the likeliest, or sampled from the same
    /// distribution. If the draft model sampled them, this is algorithm 1 of "Fast Inference from
    /// Transformers via Speculative Decoding" (Leviathan et al., 2023); if drafts are given, a token is
    /// sampled with the usual random words, and compared.
    pub(super) fn accepted(&self, mut sampler: Option<&mut Sampler>) -> Result<Vec<Accepted>> {
        let Options { settings, keep_logits, keep_scores, .. } = self.options;
        let mut ids = self.asked.state.ids.to_vec();
        let mut accepted = Vec::new();
        for (i, logits) in self.logits.chunks_exact(self.vocab).enumerate() {
            let state = self.asked.state.ahead(&ids, i);
            let mut scores = logits.to_vec();
            if let Some(mask) = self.constraint.mask(self.row, i) {
                mask.apply(&mut scores);
            }
            let allowed = scores.clone();
            settings.processors.apply(&state, &mut scores)?;
            let chosen = match &mut sampler {
                Some(sampler) => self.drawn(i, &scores, sampler),
                None => greedy(&scores).ok_or_else(no_distribution),
            };
            let token =
                chosen.map_err(|error| settings.processors.emptied(&state, &allowed).unwrap_or(error))?;
            ids.push(token);
            let stopped = self.stopping.reason(&self.asked.state.ahead(&ids, i + 1));
            accepted.push(Accepted {
                token,
                logits: if *keep_logits { logits.to_vec() } else { Vec::new() },
                scores: if *keep_scores { scores } else { Vec::new() },
                stopped,
            });
            if stopped.is_some() || self.proposal.tokens.get(i) != Some(&token) {
                break;
            }
        }
        Ok(accepted)
    }

    /// The token after the first `i` drafted tokens.
    fn drawn(&self, i: usize, scores: &[f32], sampler: &mut Sampler) -> Result<TokenId> {
        let (Some(&token), Some(draft)) = (self.proposal.tokens.get(i), self.proposal.drawn_from.get(i))
        else {
            return sampler.sample(self.row, scores);
        };
        let model = probabilities(scores);
        if !model.iter().sum::<f64>().is_finite() {
            return Err(no_distribution());
        }
        let (p, q) = (model[token as usize], draft[token as usize]);
        if sampler.uniform(self.row) * q < p {
            return Ok(token);
        }
        // The part of the distribution that the model finds likelier than the draft model does.
        let left: Vec<f64> = model.iter().zip(draft).map(|(p, q)| (p - q).max(0.0)).collect();
        sampler.draw(self.row, &left).map_or_else(|| sampler.sample(self.row, scores), Ok)
    }
}

/// The probabilities of scores; NaN if they are not a distribution.
pub(super) fn probabilities(scores: &[f32]) -> Vec<f64> {
    let largest = f64::from(scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let weights: Vec<f64> = scores.iter().map(|&score| (f64::from(score) - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}
