//! Choosing the tokens of a step on the host, from the logits of all rows.

use kiln_core::{Result, model::TokenId};

use super::{
    Options,
    beams::Beams,
    rows::{Row, Stopping},
};
use crate::{
    completion::Completion,
    grammar::{Advance, Mask},
    processors::RowState,
    sampler::{self, Sampler, greedy},
    stopping::StopReason,
};

/// How tokens are chosen.
#[derive(Debug)]
pub(super) enum Search {
    EachRow(EachRow),
    Beams(Box<Beams>),
}

impl Search {
    pub(super) fn choose(&mut self, step: &Scored<'_>, stopping: Stopping<'_>) -> Result<Choice> {
        match self {
            Self::EachRow(each) => each.choose(step),
            Self::Beams(beams) => beams.choose(step, stopping),
        }
    }

    /// What draws the tokens of rows that are continued by themselves; `None` where the likeliest are taken.
    pub(super) fn sampler(&mut self) -> Option<&mut Sampler> {
        match self {
            Self::EachRow(each) => each.sampler.as_mut(),
            Self::Beams(_) => None,
        }
    }

    /// Why `row` ended with the token that was chosen last, which `state` has; `None`: it goes on.
    pub(super) fn stopped(
        &self,
        row: usize,
        state: &RowState<'_>,
        stopping: Stopping<'_>,
    ) -> Option<StopReason> {
        match self {
            Self::EachRow(_) => stopping.reason(state),
            Self::Beams(beams) => beams.stopped(row),
        }
    }

    /// The sequences of each prompt, which has `width` rows.
    pub(super) fn completions(&self, rows: &[Row], generated: usize, width: usize) -> Vec<Vec<Completion>> {
        match self {
            Self::EachRow(_) => {
                rows.chunks(width.max(1)).map(|rows| rows.iter().map(Row::completion).collect()).collect()
            }
            Self::Beams(beams) => beams.completions(rows, generated),
        }
    }
}

/// A step whose tokens are to be chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored<'a> {
    /// The tokens that a grammar allows in each row; empty where there is none.
    pub(super) masks: &'a [Mask],
    pub(super) options: &'a Options,
    pub(super) rows: &'a [Row],
    /// Tokens of each row that were generated.
    pub(super) generated: usize,
    /// Tokens that may be generated in all.
    pub(super) limit: Option<usize>,
    /// `[rows, vocab]`
    pub(super) logits: &'a [f32],
    /// What processors begin with instead of the logits, `[rows, vocab]`.
    pub(super) begin: Option<&'a [f32]>,
    /// The likeliest tokens, where they are all that is wanted. There are no logits then.
    pub(super) top: Option<&'a Top>,
    /// The best continuations of beams, where the device chose among them. There are no logits then.
    pub(super) found: Option<&'a Found>,
    pub(super) vocab: usize,
}

/// The likeliest tokens of each row, which the device found.
#[derive(Debug)]
pub(super) struct Top {
    /// `[rows, most]`, the likeliest first; -1 where a row is no distribution.
    pub(super) tokens: Vec<i64>,
    /// `[rows, most]`
    pub(super) log_probs: Vec<f32>,
    pub(super) most: usize,
}

impl Top {
    /// The tokens of a row with their log-probabilities; `None` where it is no distribution.
    pub(super) fn of(&self, row: usize) -> Option<Vec<(TokenId, f32)>> {
        let own = row * self.most..(row + 1) * self.most;
        let pairs = self.tokens.get(own.clone())?.iter().zip(self.log_probs.get(own)?);
        pairs.map(|(&token, &log_prob)| Some((TokenId::try_from(token).ok()?, log_prob))).collect()
    }
}

/// The best continuations of each group of beams, which the device found.
#[derive(Debug)]
pub(super) struct Found {
    /// See [`candidates`](kiln_kernels::Beams::candidates).
    pub(super) numbers: Vec<f32>,
}

/// A beam, continued by a token: numbers of [`Found`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Continuation {
    /// Among the rows of the prompt.
    pub(super) row: usize,
    pub(super) token: TokenId,
    pub(super) log_prob: f32,
    pub(super) sum: f32,
}

impl Found {
    /// Those of a group, counted over all prompts, which are `most`; `None` where a row of it is no distribution.
    pub(super) fn of(&self, group: usize, most: usize) -> Option<Vec<Continuation>> {
        let own = self.numbers.get(group * 4 * most..(group + 1) * 4 * most)?;
        let one = |numbers: &[f32; 4]| {
            let &[row, token, log_prob, sum] = numbers;
            (token >= 0.0).then_some(Continuation {
                row: row as usize,
                token: token as TokenId,
                log_prob,
                sum,
            })
        };
        own.as_chunks().0.iter().map(one).collect()
    }
}

impl Scored<'_> {
    pub(super) fn logits_of(&self, row: usize) -> &[f32] {
        self.of(row, self.logits)
    }

    /// What processors begin with.
    pub(super) fn begin_of(&self, row: usize) -> &[f32] {
        self.of(row, self.begin.unwrap_or(self.logits))
    }

    fn of<'b>(&self, row: usize, all: &'b [f32]) -> &'b [f32] {
        all.get(row * self.vocab..(row + 1) * self.vocab).unwrap_or_default()
    }

    /// Removes the tokens that the grammar does not allow, and applies the processors.
    pub(super) fn process(&self, row: usize, scores: &mut [f32]) -> Result<()> {
        let Some(state) = self.rows.get(row).map(|row| row.state(self.generated, self.limit)) else {
            return Ok(());
        };
        let processors = &self.options.settings.processors;
        if let Some(mask) = self.masks.get(row) {
            mask.apply(scores);
        }
        let allowed = scores.to_vec();
        processors.apply(&state, scores)?;
        match scores.iter().any(|score| *score > f32::NEG_INFINITY || score.is_nan()) {
            true => Ok(()),
            false => Err(processors.emptied(&state, &allowed).unwrap_or_else(sampler::no_distribution)),
        }
    }

    /// How the rows go on for the grammar. Where no token was possible, a row stays where it is.
    pub(super) fn accepted(&self, choice: &Choice) -> Vec<Advance> {
        let rows = choice.tokens.iter().enumerate().map(|(row, &token)| {
            let parent = choice.parents.as_ref().map_or(row, |parents| parents[row]);
            let ends = self.rows[row].finished() || !self.masks[parent].allows(token);
            Advance { parent, tokens: if ends { Vec::new() } else { vec![token] }, ..Advance::default() }
        });
        rows.collect()
    }
}

/// What a step chose, with the numbers it was chosen by where they are kept.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// The next token of each row; rows that have ended have any.
    pub(super) tokens: Vec<TokenId>,
    /// The row that each row continues; `None`: each continues itself.
    pub(super) parents: Option<Vec<usize>>,
    /// `[row][vocab]`; empty for rows that had ended.
    pub(super) logits: Vec<Vec<f32>>,
    pub(super) scores: Vec<Vec<f32>>,
    /// Why each row ends with its token; `None` where that is still to be asked.
    pub(super) stopped: Option<Vec<Option<StopReason>>>,
}

/// Chooses for each row alone: the likeliest token, or one that is drawn. (transformers' `_sample`)
#[derive(Debug)]
pub(super) struct EachRow {
    /// `None`: the likeliest token, or the device draws.
    pub(super) sampler: Option<Sampler>,
}

impl EachRow {
    pub(super) fn choose(&mut self, step: &Scored<'_>) -> Result<Choice> {
        let Options { settings, keep_logits, .. } = step.options;
        let mut choice = Choice::default();
        for (i, row) in step.rows.iter().enumerate().take(step.logits.len() / step.vocab) {
            if row.finished() {
                choice.tokens.push(settings.padding(step.vocab));
                choice.logits.push(Vec::new());
                choice.scores.push(Vec::new());
                continue;
            }
            let mut scores = step.begin_of(i).to_vec();
            step.process(i, &mut scores)?;
            let token = match &mut self.sampler {
                Some(sampler) => sampler.sample(i, &scores),
                None => greedy(&scores).ok_or_else(sampler::no_distribution),
            };
            choice.tokens.push(token?);
            if *keep_logits {
                choice.logits.push(step.logits_of(i).to_vec());
            }
            choice.scores.push(scores);
        }
        Ok(choice)
    }
}
