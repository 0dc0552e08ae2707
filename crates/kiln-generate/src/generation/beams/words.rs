//! Words that every sequence must contain.

use kiln_core::model::TokenId;

use super::{Candidate, LogProbs, Open, Scored};

/// Words, each with the ways to write it.
#[derive(Debug)]
pub(super) struct Words {
    words: Vec<Vec<Vec<TokenId>>>,
    /// Number of tokens of the longest way to write a word.
    longest: usize,
}

impl Words {
    /// Returns `None` without words.
    pub(super) fn new(words: Vec<Vec<Vec<TokenId>>>) -> Option<Self> {
        let longest = words.iter().flatten().map(Vec::len).max()?;
        Some(Self { words, longest })
    }

    /// Whether these tokens contain all words.
    pub(super) fn are_in(&self, tokens: impl IntoIterator<Item = TokenId>) -> bool {
        self.progress(tokens).is_complete()
    }

    /// Selects, from the best candidates and from those that begin or continue a word, as many as there are
    /// beams: in turn the best with the most tokens of words, the best with one token less, and so on.
    pub(super) fn preferred(
        &self,
        best: Vec<Candidate>,
        scores: &[LogProbs],
        open: &[Open],
        step: &Scored<'_>,
    ) -> Vec<Candidate> {
        let Some(first) = best.iter().map(|candidate| candidate.row).min() else { return best };
        let first = first - first % scores.len();
        let beams = best.len();
        let ids = |row: usize, token| step.rows.list[row].ids.iter().copied().chain([token]);
        let mut all: Vec<(usize, Candidate)> = best
            .into_iter()
            .map(|candidate| (self.bank(&self.progress(ids(candidate.row, candidate.token))), candidate))
            .collect();
        for (row, scores) in (first..).zip(scores) {
            let progress = self.progress(step.rows.list[row].ids.iter().copied());
            for token in progress.next_tokens() {
                let is_known = |(_, other): &(usize, Candidate)| {
                    other.token == token && step.rows.list[other.row].ids == step.rows.list[row].ids
                };
                let Some(score) = scores.get(token as usize) else { continue };
                if all.iter().any(is_known) {
                    continue;
                }
                let mut progress = progress.clone();
                progress.add(token);
                let sum = score + open[row].sum;
                all.push((self.bank(&progress), Candidate { row, token, score, sum, stops: None }));
            }
        }
        if all.len() > beams {
            let key = |(bank, candidate): &(usize, Candidate)| (bank * 100) as f32 + candidate.sum;
            all.sort_by(|a, b| key(b).total_cmp(&key(a)));
            let mut turns: Vec<(usize, usize)> = Vec::with_capacity(all.len());
            for (i, (bank, _)) in all.iter().enumerate() {
                let turn = match i.checked_sub(1) {
                    Some(before) if all[before].0 == *bank => turns[before].0 + 1,
                    _ => 0,
                };
                turns.push((turn, i));
            }
            turns.sort_unstable();
            all = turns.into_iter().take(beams).map(|(_, i)| all[i].clone()).collect();
        }
        all.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// The progress of a sequence, in tokens of words.
    fn bank(&self, progress: &Progress<'_>) -> usize {
        let remaining = |word: usize, written: usize| {
            self.words[word].iter().map(Vec::len).max().unwrap_or(0).saturating_sub(written)
        };
        let current = progress.current.as_ref();
        let begun = current.map_or(0, |(word, written)| self.longest - remaining(*word, written.len()));
        progress.complete * self.longest + begun
    }

    fn progress(&self, tokens: impl IntoIterator<Item = TokenId>) -> Progress<'_> {
        let mut progress = Progress {
            words: &self.words,
            complete: 0,
            pending: (0..self.words.len()).collect(),
            current: None,
        };
        tokens.into_iter().for_each(|token| progress.add(token));
        progress
    }
}

/// The words that a sequence contains. (`ConstraintListState`)
#[derive(Clone, Debug)]
struct Progress<'a> {
    words: &'a [Vec<Vec<TokenId>>],
    /// Words that are complete.
    complete: usize,
    /// Words that have not begun.
    pending: Vec<usize>,
    /// The word that has begun, and its tokens so far.
    current: Option<(usize, Vec<TokenId>)>,
}

impl Progress<'_> {
    fn is_complete(&self) -> bool {
        self.complete == self.words.len()
    }

    /// Tokens that begin a word, or continue the one that has begun.
    fn next_tokens(&self) -> Vec<TokenId> {
        match &self.current {
            Some((word, written)) => self.after(*word, written),
            None => self.pending.iter().flat_map(|&word| self.after(word, &[])).collect(),
        }
    }

    /// Tokens that continue a word; none if it is complete.
    fn after(&self, word: usize, written: &[TokenId]) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        for way in &self.words[word] {
            if let Some(&[token, ..]) = way.strip_prefix(written)
                && !tokens.contains(&token)
            {
                tokens.push(token);
            }
        }
        tokens
    }

    fn add(&mut self, token: TokenId) {
        if self.is_complete() {
            return;
        }
        let (word, mut written) = match self.current.take() {
            Some((word, written)) if self.after(word, &written).contains(&token) => (word, written),
            Some((word, _)) => return self.pending.push(word),
            None => {
                let begins = |word: &usize| self.after(*word, &[]).contains(&token);
                let Some(at) = self.pending.iter().position(begins) else { return };
                (self.pending.remove(at), Vec::new())
            }
        };
        written.push(token);
        match self.after(word, &written).is_empty() {
            true => self.complete += 1,
            false => self.current = Some((word, written)),
        }
    }
}
