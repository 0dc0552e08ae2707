//! How the next tokens are chosen.

use kiln_core::Result;

use super::{
    DraftModel, Options,
    assisted::{self, Assisted, Drafter},
    beams::Beams,
    choice::Choice,
    contrastive::Contrastive,
    each_row::EachRow,
    rows::{Row, Rows, Stopping},
    runner::Runner,
    step::StepState,
};
use crate::{
    chooser::Chooser, completion::Completion, grammar::Masks, processors::RowState, sampler::Sampler,
    stopping::StopReason,
};

/// How the next tokens are chosen.
#[derive(Debug)]
pub(super) enum Search {
    EachRow(EachRow),
    Beams(Box<Beams>),
    Assisted(Assisted),
    Contrastive(Box<Contrastive>),
}

impl Default for Search {
    fn default() -> Self {
        Self::EachRow(EachRow::default())
    }
}

impl Search {
    /// The search that the settings ask for. `sampler`: `None` if the likeliest tokens are taken.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for a grammar whose masks cannot be computed, and for
    /// drafts that do not go with other settings or the cache.
    pub(super) fn new(
        runner: &mut Runner<'_>,
        rows: &Rows,
        options: &Options,
        sampler: Option<Sampler>,
    ) -> Result<Self> {
        let masks = options.grammar.as_ref().map(|grammar| Masks::new(vec![grammar.clone(); rows.len()]));
        let masks = masks.transpose()?;
        let drafter = Drafter::from_settings(runner, rows, options)?
            .or_else(|| Drafter::that_changes_nothing(runner, rows, options));
        if let Some(settings) = options.settings.contrastive {
            return Ok(Self::Contrastive(Box::new(Contrastive::new(settings, masks))));
        }
        if let Some(settings) = &options.settings.beams {
            let beams = Beams::new(settings.clone(), rows.prompts().len(), sampler, masks);
            return Ok(Self::Beams(Box::new(beams)));
        }
        let each = EachRow { sampler, masks };
        Ok(if drafter.is_some() || assisted::fast_forwards(runner, rows, options) {
            Self::Assisted(Assisted::new(each, drafter, runner, rows, options))
        } else {
            Self::EachRow(each)
        })
    }

    /// Makes `draft` draft tokens. `seed`: `None` without sampling.
    ///
    /// # Errors
    /// See [`Generation::with_draft`](super::Generation::with_draft).
    pub(super) fn with_draft(
        &mut self,
        draft: DraftModel,
        seed: Option<u64>,
        runner: &mut Runner<'_>,
        rows: &Rows,
        options: &Options,
    ) -> Result<()> {
        let drafter = Drafter::from_model(draft, seed, runner, rows, options)?;
        // Scores are compared with the drafts on the host.
        runner.feeder.chooser = None;
        let each = match std::mem::take(self) {
            Self::EachRow(each) => each,
            Self::Assisted(assisted) => assisted.into_each_row(),
            // `Drafter::from_model` rejected these.
            other @ (Self::Beams(_) | Self::Contrastive(_)) => {
                *self = other;
                return Ok(());
            }
        };
        *self = Self::Assisted(Assisted::new(each, Some(drafter), runner, rows, options));
        Ok(())
    }

    /// The chooser on the device, after the steps that `rows` have taken; `None`: the host chooses.
    ///
    /// # Errors
    /// Errors of [`Sampler::new`].
    pub(super) fn chooser(
        &self,
        runner: &Runner<'_>,
        rows: &Rows,
        options: &Options,
    ) -> Result<Option<Chooser>> {
        match self {
            Self::EachRow(each) => each.chooser(runner, rows, options),
            Self::Beams(beams) => Ok(beams.chooser(runner, rows, options)),
            Self::Assisted(_) | Self::Contrastive(_) => Ok(None),
        }
    }

    /// Makes a step.
    pub(super) async fn choose(&mut self, state: &mut StepState<'_, '_>) -> Result<Choice> {
        match self {
            Self::EachRow(each) => each.choose(state).await,
            Self::Beams(beams) => beams.choose(state).await,
            Self::Assisted(assisted) => assisted.choose(state).await,
            Self::Contrastive(contrastive) => contrastive.choose(state).await,
        }
    }

    /// The reason for which `row` ended with the token that was chosen last, which `state` has; `None`: it
    /// goes on.
    pub(super) fn stopped(
        &self,
        row: usize,
        state: &RowState<'_>,
        stopping: Stopping<'_>,
    ) -> Option<StopReason> {
        match self {
            Self::Beams(beams) => beams.stopped(row),
            Self::EachRow(_) | Self::Assisted(_) | Self::Contrastive(_) => stopping.reason(state),
        }
    }

    /// Whether the next token of each row can be chosen by the scores after its last one, and by nothing
    /// else. Rows can share passes then.
    pub(super) fn is_by_row(&self) -> bool {
        match self {
            Self::EachRow(_) => true,
            Self::Assisted(assisted) => assisted.may_pause(),
            Self::Beams(_) | Self::Contrastive(_) => false,
        }
    }

    /// The choice for each row; `None` unless it is [by row](Self::is_by_row).
    pub(super) fn each_row(&mut self) -> Option<&mut EachRow> {
        match self {
            Self::EachRow(each) => Some(each),
            Self::Assisted(assisted) if assisted.may_pause() => Some(assisted.each_row()),
            Self::Assisted(_) | Self::Beams(_) | Self::Contrastive(_) => None,
        }
    }

    /// Whether tokens are drafted, and need not be.
    pub(super) fn may_draft(&self) -> bool {
        matches!(self, Self::Assisted(assisted) if assisted.may_pause())
    }

    /// The sequences of each prompt.
    pub(super) fn completions(&self, rows: &Rows) -> Vec<Vec<Completion>> {
        match self {
            Self::Beams(beams) => beams.completions(rows),
            Self::EachRow(_) | Self::Assisted(_) | Self::Contrastive(_) => {
                let prompts = rows.list.chunks(rows.width.max(1));
                prompts.map(|rows| rows.iter().map(Row::completion).collect()).collect()
            }
        }
    }

    /// Forgets what was fed: the cache is empty.
    pub(super) fn start_over(&mut self) {
        match self {
            Self::EachRow(_) | Self::Beams(_) => {}
            Self::Assisted(assisted) => assisted.start_over(),
            Self::Contrastive(contrastive) => contrastive.start_over(),
        }
    }

    /// Feeds the cache again what it held beside the delivered tokens.
    pub(super) fn catch_up(&mut self, runner: &mut Runner<'_>, rows: &Rows) -> Result<()> {
        match self {
            Self::Assisted(assisted) => assisted.catch_up(runner, rows),
            Self::EachRow(_) | Self::Beams(_) | Self::Contrastive(_) => Ok(()),
        }
    }

    /// Makes the cache forget what was fed ahead of the delivered tokens.
    pub(super) fn settle(&mut self, runner: &mut Runner<'_>, rows: &Rows) {
        match self {
            _ if rows.width > 1 => runner.keep_prompts(rows),
            Self::Contrastive(contrastive) => contrastive.keep_chosen(runner, rows),
            Self::Assisted(_) => Assisted::forget_accepted(runner, rows),
            // If a cache cannot be truncated, its `seq_len` tells.
            Self::EachRow(_) | Self::Beams(_) => _ = runner.forget_undelivered(rows),
        }
    }
}
