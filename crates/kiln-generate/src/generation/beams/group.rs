//! The beams of a group, step by step.

use super::{BeamSettings, Candidate, EarlyStopping, LogProbs, NEVER, Open, Scored, Stopping, Words};
use crate::{completion::Completion, stopping::StopReason};

/// A group of beams of one prompt.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Ended sequences, no more than there are beams; the best first in a search of transformers 5.
    pub(super) finished: Vec<Completion>,
    pub(super) done: bool,
}

/// The inputs of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct At<'a> {
    pub(super) settings: &'a BeamSettings,
    /// Number of beams of a group.
    pub(super) of_group: usize,
    pub(super) step: &'a Scored<'a>,
    pub(super) words: Option<&'a Words>,
    pub(super) stopping: Stopping<'a>,
}

impl At<'_> {
    /// Number of tokens of each sequence, including that of this step.
    fn len(&self) -> usize {
        self.step.rows.delivered + 1
    }

    /// The best score that a sequence of this sum can reach.
    fn attainable(&self, sum: f32) -> f32 {
        let longest = match self.settings.early_stopping == EarlyStopping::Never
            && self.settings.length_penalty > 0.0
        {
            true => self.step.rows.limit.unwrap_or(usize::MAX),
            false => self.len(),
        };
        self.settings.normalized(sum, longest)
    }

    /// The sequence of a candidate that ends here.
    fn completion(&self, candidate: &Candidate, open: &[Open], reason: StopReason) -> Completion {
        let row = &self.step.rows.list[candidate.row];
        let begin = row.ids.len().saturating_sub(self.step.rows.delivered);
        let (path, last) = (&open[candidate.row].path, (candidate.row, candidate.score));
        let path = || path.iter().chain([&last]);
        Completion {
            tokens: row.ids[begin..].iter().copied().chain([candidate.token]).collect(),
            text: None,
            stop_reason: Some(reason),
            score: Some(self.settings.normalized(candidate.sum, self.len())),
            token_scores: path().map(|(_, score)| *score).collect(),
            beam_indices: path().map(|(row, _)| *row).collect(),
        }
    }
}

impl Group {
    /// Ends the candidates that end, and returns the others. `scores`: of all tokens of each beam; `open`:
    /// all rows.
    pub(super) fn advance(
        &mut self,
        candidates: Vec<Candidate>,
        scores: &[LogProbs],
        open: &[Open],
        at: &At<'_>,
    ) -> Vec<Candidate> {
        match at.settings.is_vectorised() {
            true => self.advance_vectorised(candidates, open, at),
            false => self.advance_scored(candidates, scores, open, at),
        }
    }

    /// The rule of `_beam_search` of transformers 5.
    fn advance_vectorised(
        &mut self,
        candidates: Vec<Candidate>,
        open: &[Open],
        at: &At<'_>,
    ) -> Vec<Candidate> {
        for candidate in candidates.iter().take(at.of_group) {
            if let Some(reason) = candidate.stops {
                self.finished.push(at.completion(candidate, open, reason));
            }
        }
        self.finished.sort_by(|a, b| score(b).total_cmp(&score(a)));
        self.finished.truncate(at.of_group);
        let all_stop = candidates.iter().all(|candidate| candidate.stops.is_some());
        let mut next = candidates;
        for candidate in next.iter_mut().filter(|candidate| candidate.stops.is_some()) {
            candidate.sum += NEVER;
        }
        next.sort_by(|a, b| b.sum.total_cmp(&a.sum));
        next.truncate(at.of_group);
        let full = self.finished.len() == at.of_group;
        let worst = self.finished.last().filter(|_| full).map_or(NEVER, score);
        let best = next.first().map_or(NEVER, |best| at.attainable(best.sum));
        let early = full && at.settings.early_stopping == EarlyStopping::Always;
        self.done = all_stop || early || best <= worst;
        next
    }

    /// The rule of `BeamSearchScorer` of transformers 4.47, and with forced words of
    /// `ConstrainedBeamSearchScorer`.
    fn advance_scored(
        &mut self,
        candidates: Vec<Candidate>,
        scores: &[LogProbs],
        open: &[Open],
        at: &At<'_>,
    ) -> Vec<Candidate> {
        let holds_words = |row: usize, token| {
            at.words.is_none_or(|words| words.are_in(at.step.rows.list[row].ids.iter().copied().chain(token)))
        };
        let best = candidates.iter().map(|candidate| candidate.sum).fold(f32::NEG_INFINITY, f32::max);
        let mut next = Vec::with_capacity(at.of_group);
        for (rank, candidate) in candidates.into_iter().enumerate() {
            if next.len() == at.of_group {
                break;
            }
            match candidate.stops {
                Some(reason @ StopReason::EndOfText) => {
                    if rank < at.of_group && holds_words(candidate.row, None) {
                        self.add(at.completion(&candidate, open, reason), at.of_group);
                    }
                }
                _ => next.push(candidate),
            }
        }
        if let Some(words) = at.words {
            next = words.preferred(next, scores, open, at.step);
            for candidate in &mut next {
                candidate.stops = candidate.reason(at.step, at.stopping);
            }
        }
        let full = self.finished.len() == at.of_group;
        let worst = self.finished.iter().map(score).fold(f32::INFINITY, f32::min);
        let early = at.settings.early_stopping == EarlyStopping::Always;
        self.done = full && (early || worst >= at.attainable(best));
        if !self.done && next.iter().all(|candidate| candidate.stops.is_some()) {
            self.done = true;
            let (with, without): (Vec<&Candidate>, Vec<&Candidate>) =
                next.iter().partition(|candidate| holds_words(candidate.row, Some(candidate.token)));
            // Sequences that lack words are better than none.
            let without = if with.len() < at.settings.num_return_sequences { without } else { Vec::new() };
            for candidate in with.into_iter().chain(without) {
                let reason = candidate.stops.unwrap_or(StopReason::Length);
                self.add(at.completion(candidate, open, reason), at.of_group);
            }
        }
        next
    }

    /// The sequence with the best score.
    pub(super) fn best(&self) -> Option<&Completion> {
        self.finished.iter().max_by(|a, b| score(a).total_cmp(&score(b)))
    }

    /// Keeps the best `most` sequences.
    fn add(&mut self, completion: Completion, most: usize) {
        let worst = self.finished.iter().map(score).fold(f32::INFINITY, f32::min);
        if self.finished.len() < most {
            self.finished.push(completion);
        } else if score(&completion) > worst {
            self.finished.push(completion);
            let first = self.finished.iter().position(|completion| score(completion) == worst);
            first.map(|first| self.finished.remove(first));
        }
    }
}

fn score(completion: &Completion) -> f32 {
    completion.score.unwrap_or(f32::NEG_INFINITY)
}
