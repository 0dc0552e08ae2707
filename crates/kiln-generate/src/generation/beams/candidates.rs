//! Continuations of the beams of a group.

use std::{
    cmp::{Ordering, Reverse},
    collections::BinaryHeap,
};

use kiln_core::{Result, model::TokenId};

use super::{super::scores::Continuation, LogProbs, Open, Scored, Stopping};
use crate::{
    sampler::{Sampler, no_distribution},
    stopping::StopReason,
};

/// A beam, continued by a token.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// The row of the beam.
    pub(super) row: usize,
    pub(super) token: TokenId,
    /// The log-probability of the token, after processors.
    pub(super) score: f32,
    /// The sum of the log-probabilities of the beam and of the token.
    pub(super) sum: f32,
    /// The reason for which the sequence ends with the token; `None`: it goes on.
    pub(super) stops: Option<StopReason>,
}

impl Candidate {
    /// A candidate that the device found for the prompt whose rows begin at `first`.
    pub(super) fn of(found: Continuation, first: usize) -> Self {
        let Continuation { row, token, log_prob, sum } = found;
        Self { row: first + row, token, score: log_prob, sum, stops: None }
    }

    /// The reason for which the sequence ends with its token.
    pub(super) fn reason(&self, step: &Scored<'_>, stopping: Stopping<'_>) -> Option<StopReason> {
        let mut row = step.rows.list.get(self.row)?.clone();
        row.ids.push(self.token);
        stopping.reason(&row.state(step.rows.delivered + 1, step.rows.limit))
    }
}

/// All continuations of the beams of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates<'a> {
    /// The row of the first beam.
    pub(super) first: usize,
    /// Log-probabilities of each beam's next token.
    pub(super) scores: &'a [LogProbs],
    pub(super) open: &'a [Open],
}

/// Orders by sum. Of equals, the first in the order of beams and tokens is the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ranked {
    sum: f32,
    beam: usize,
    token: usize,
}

impl Eq for Ranked {}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |ranked: &Self| (ranked.beam, ranked.token);
        self.sum.total_cmp(&other.sum).then_with(|| place(other).cmp(&place(self)))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Candidates<'_> {
    /// The best `most` candidates, the best first.
    pub(super) fn best(self, most: usize) -> Vec<Candidate> {
        self.best_but(most, &[]).into_iter().map(|ranked| self.candidate(ranked)).collect()
    }

    /// Samples `most` candidates, none twice, in the order of sampling. If fewer are possible, the best
    /// follow.
    pub(super) fn drawn(self, most: usize, stream: usize, sampler: &mut Sampler) -> Result<Vec<Candidate>> {
        let largest = self.all().map(|ranked| ranked.sum).fold(f32::NEG_INFINITY, f32::max);
        let weight = |ranked: Ranked| (ranked, (f64::from(ranked.sum) - f64::from(largest)).exp());
        let mut weights: Vec<(Ranked, f64)> =
            self.all().map(weight).filter(|(_, weight)| *weight > 0.0).collect();
        if !largest.is_finite() || weights.iter().any(|(_, weight)| weight.is_nan()) {
            return Err(no_distribution());
        }
        let mut drawn = Vec::with_capacity(most);
        while drawn.len() < most && !weights.is_empty() {
            let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
            let target = f64::from(sampler.word(stream)) / f64::from(1 << 24) * total;
            let mut cumulative = 0.0;
            let at = weights.iter().position(|(_, weight)| {
                cumulative += weight;
                cumulative > target
            });
            drawn.push(weights.remove(at.unwrap_or(weights.len() - 1)).0);
        }
        if drawn.len() < most {
            drawn.extend(self.best_but(most - drawn.len(), &drawn));
        }
        Ok(drawn.into_iter().map(|ranked| self.candidate(ranked)).collect())
    }

    fn all(self) -> impl Iterator<Item = Ranked> {
        let beams = self.scores.iter().zip(self.open).enumerate();
        beams.flat_map(|(beam, (scores, open))| {
            let ranked = move |(token, score)| Ranked { sum: score + open.sum, beam, token };
            scores.iter().map(ranked)
        })
    }

    /// The best `most` candidates that are not among `others`, the best first.
    fn best_but(self, most: usize, others: &[Ranked]) -> Vec<Ranked> {
        let mut best = BinaryHeap::with_capacity(most + 1);
        for ranked in self.all().filter(|ranked| !others.contains(ranked)) {
            if best.len() < most {
                best.push(Reverse(ranked));
            } else if let Some(mut worst) = best.peek_mut()
                && ranked > worst.0
            {
                *worst = Reverse(ranked);
            }
        }
        best.into_sorted_vec().into_iter().map(|Reverse(ranked)| ranked).collect()
    }

    fn candidate(self, Ranked { sum, beam, token }: Ranked) -> Candidate {
        let score = self.scores[beam].get(token).unwrap_or(f32::NEG_INFINITY);
        Candidate { row: self.first + beam, token: token as TokenId, score, sum, stops: None }
    }
}
