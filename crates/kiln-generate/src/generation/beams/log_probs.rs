//! Log-probabilities of the next token of a beam.

use kiln_core::{Result, model::TokenId};

use super::super::scores::Scored;
use crate::{processors::log_softmax, sampler::no_distribution};

/// Log-probabilities of a beam's next token, after processors.
#[derive(Clone, Debug)]
pub(super) enum LogProbs {
    /// Log-probabilities of every token.
    All(Vec<f32>),
    /// Log-probabilities of the likeliest tokens.
    Top(Vec<(TokenId, f32)>),
}

impl LogProbs {
    /// The log-probabilities of a row. A token loses `penalty` for each time that it is in `chosen`.
    pub(super) fn of(step: &Scored<'_>, row: usize, penalty: f32, chosen: &[TokenId]) -> Result<Self> {
        if let Some(top) = step.top {
            let mut top: Vec<(TokenId, f32)> = top.of(row).ok_or_else(no_distribution)?;
            for (token, log_prob) in &mut top {
                for _ in chosen.iter().filter(|chosen| *chosen == token) {
                    *log_prob -= penalty;
                }
            }
            return Ok(Self::Top(top));
        }
        let logits = step.begin_of(row);
        if !logits.iter().copied().fold(f32::NEG_INFINITY, f32::max).is_finite()
            || logits.iter().any(|x| x.is_nan())
        {
            return Err(no_distribution());
        }
        let mut all = match step.begin {
            // These scores are sums of log-probabilities already.
            Some(_) => logits.to_vec(),
            None => log_softmax(logits),
        };
        for &token in chosen {
            all[token as usize] -= penalty;
        }
        step.process(row, &mut all)?;
        Ok(Self::All(all))
    }

    /// Tokens with their log-probabilities.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, f32)> {
        let (all, top): (&[f32], &[_]) = match self {
            Self::All(all) => (all, &[]),
            Self::Top(top) => (&[], top),
        };
        let top = top.iter().map(|&(token, log_prob)| (token as usize, log_prob));
        all.iter().copied().enumerate().chain(top)
    }

    /// The log-probability of a token; `None` if it is not known.
    pub(super) fn get(&self, token: usize) -> Option<f32> {
        match self {
            Self::All(all) => all.get(token).copied(),
            Self::Top(_) => self.iter().find(|(other, _)| *other == token).map(|(_, log_prob)| log_prob),
        }
    }

    /// The log-probabilities of all tokens, each plus `sum`; empty if they are not known.
    pub(super) fn plus(&self, sum: f32) -> Vec<f32> {
        match self {
            Self::All(all) => all.iter().map(|log_prob| log_prob + sum).collect(),
            Self::Top(_) => Vec::new(),
        }
    }
}
