//! Choosing the tokens of a step on the host, from the logits of all rows.

use kiln_core::{Result, model::TokenId};

use super::{
    Options,
    beams::Beams,
    rows::{Row, Stopping},
};
use crate::{
    completion::Completion,
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
    pub(super) options: &'a Options,
    pub(super) rows: &'a [Row],
    /// Tokens of each row that were generated.
    pub(super) generated: usize,
    /// Tokens that may be generated in all.
    pub(super) limit: Option<usize>,
    /// `[rows, vocab]`
    pub(super) logits: &'a [f32],
    pub(super) vocab: usize,
}

impl Scored<'_> {
    pub(super) fn logits_of(&self, row: usize) -> &[f32] {
        self.logits.get(row * self.vocab..(row + 1) * self.vocab).unwrap_or_default()
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
        for (i, (logits, row)) in step.logits.chunks_exact(step.vocab).zip(step.rows).enumerate() {
            if row.finished() {
                choice.tokens.push(settings.padding(step.vocab));
                choice.logits.push(Vec::new());
                choice.scores.push(Vec::new());
                continue;
            }
            let state = row.state(step.generated, step.limit);
            let mut scores = logits.to_vec();
            settings.processors.apply(&state, &mut scores)?;
            let token = match &mut self.sampler {
                Some(sampler) => sampler.sample(i, &scores),
                None => greedy(&scores).ok_or_else(sampler::no_distribution),
            };
            choice
                .tokens
                .push(token.map_err(|error| settings.processors.emptied(&state, logits).unwrap_or(error))?);
            if *keep_logits {
                choice.logits.push(logits.to_vec());
            }
            choice.scores.push(scores);
        }
        Ok(choice)
    }
}
