//! Assisted decoding: tokens are drafted cheaply, and the model verifies many of them in one pass.
//! (transformers' `_assisted_decoding`, and speculative decoding)
//!
//! The tokens are those that the model would choose alone. A pass over several tokens takes hardly longer
//! than a pass over one, because its weights are read once.

mod constraint;
mod draft_model;
mod prompt_lookup;
mod round;
mod settings;
mod translation;
mod verify;

use std::collections::VecDeque;

use kiln_core::{Result, model::TokenId};
use kiln_kernels::INVARIANT_UP_TO;

use self::{constraint::Constraint, draft_model::uneven, settings::MOST};
pub use self::{
    draft_model::DraftModel,
    settings::{AssistedSettings, PromptLookup, Schedule},
};
use super::{
    Options,
    choice::Choice,
    each_row::EachRow,
    next::Next,
    rows::{Row, Rows},
    runner::Runner,
    step::StepState,
};
use crate::{
    feeder::Feeder,
    grammar::Matcher,
    processors::RowState,
    settings::{Settings, setting},
    stopping::StopReason,
};

/// Assisted decoding: the drafts, and the choice for each row that verifies them.
#[derive(Debug)]
pub(super) struct Assisted {
    drafts: Drafts,
    each: EachRow,
}

/// The drafter, and the tokens that were accepted and not delivered yet.
#[derive(Debug)]
struct Drafts {
    /// `None`: only tokens that a grammar forces are drafted.
    drafter: Option<Drafter>,
    /// Whether tokens are the same without drafts. Drafts that the settings ask for may change what a cache
    /// packs or evicts in a pass, and those of a model how tokens are drawn.
    are_optional: bool,
    rows: Vec<Ahead>,
}

/// The source of drafts.
#[derive(Debug)]
pub(super) enum Drafter {
    PromptLookup(PromptLookup),
    Model(Box<DraftModel>),
}

/// The state of a row, beside the delivered tokens.
#[derive(Debug)]
struct Ahead {
    accepted: VecDeque<Accepted>,
    /// The most tokens that are drafted next.
    proposes: usize,
}

/// A token that follows a row, with the numbers that it was chosen by if they are kept.
#[derive(Debug)]
struct Accepted {
    token: TokenId,
    logits: Vec<f32>,
    scores: Vec<f32>,
    /// The reason for which the row ends with the token; `None`: it goes on.
    stopped: Option<StopReason>,
}

/// A row that needs drafted tokens.
#[derive(Clone, Copy, Debug)]
struct Asked<'a> {
    state: RowState<'a>,
    /// The most tokens that are of use; 0 for rows that are not verified in this pass.
    most: usize,
}

/// The drafted tokens of a row.
#[derive(Debug, Default)]
struct Proposal {
    tokens: Vec<TokenId>,
    /// The probabilities `[vocab]` that each token was sampled from; empty if the tokens were not sampled.
    drawn_from: Vec<Vec<f64>>,
}

impl Drafter {
    /// Prompt lookup, if the settings ask for it.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for other settings, or a cache, that drafts do not go
    /// with.
    pub(super) fn from_settings(runner: &Runner<'_>, rows: &Rows, options: &Options) -> Result<Option<Self>> {
        let Some(lookup) = options.settings.assisted.prompt_lookup else { return Ok(None) };
        check("prompt_lookup_num_tokens", runner, rows, options)?;
        Ok(Some(Self::PromptLookup(lookup)))
    }

    /// Prompt lookup that changes no token, if the options ask for it.
    pub(super) fn that_changes_nothing(runner: &Runner<'_>, rows: &Rows, options: &Options) -> Option<Self> {
        // Few enough that no number of a pass differs from that of single steps.
        let num_tokens = options.lookup_drafts?.min(INVARIANT_UP_TO - 1);
        let may = rows.len() == 1
            && num_tokens > 0
            && changes_nothing(runner, options)
            && options.grammar.as_ref().is_none_or(Matcher::can_rewind);
        may.then_some(Self::PromptLookup(PromptLookup { num_tokens, max_matching_ngram_size: 2 }))
    }

    /// A draft model. `seed`: `None` without sampling.
    ///
    /// # Errors
    /// See [`Generation::with_draft`](super::Generation::with_draft).
    pub(super) fn from_model(
        mut draft: DraftModel,
        seed: Option<u64>,
        runner: &Runner<'_>,
        rows: &Rows,
        options: &Options,
    ) -> Result<Self> {
        const NAME: &str = "draft";

        if options.settings.assisted.prompt_lookup.is_some() {
            let why = "goes with no other proposals; leave out either it or `prompt_lookup_num_tokens`";
            return Err(setting(NAME, why));
        }
        let vocab = runner.vocab();
        if draft.vocab() != vocab && !draft.is_translated() {
            return Err(setting(
                NAME,
                format!(
                    "has a vocabulary of {} tokens and the model one of {vocab}, which takes the tokenizers of both; use \
                     folders with a tokenizer.json",
                    draft.vocab()
                ),
            ));
        }
        if let Some(seed) = seed {
            draft.draws(seed);
        }
        check(NAME, runner, rows, options)?;
        Ok(Self::Model(Box::new(draft)))
    }

    async fn propose(
        &mut self,
        asked: &[Asked<'_>],
        settings: &Settings,
        vocab: usize,
        constraint: &mut Constraint<'_>,
    ) -> Result<Vec<Proposal>> {
        match self {
            Self::PromptLookup(lookup) => Ok(asked
                .iter()
                .enumerate()
                .map(|(i, row)| match row.most {
                    0 => Proposal::default(),
                    _ => lookup.propose(row, settings, constraint.mask(i, 0), vocab),
                })
                .collect()),
            Self::Model(draft) => draft.propose(asked, settings, constraint).await,
        }
    }
}

impl Drafts {
    fn new(drafter: Option<Drafter>, settings: &AssistedSettings, rows: usize) -> Self {
        let proposes = match &drafter {
            Some(Drafter::PromptLookup(lookup)) => lookup.num_tokens,
            Some(Drafter::Model(_)) => settings.num_assistant_tokens,
            None => 0,
        };
        let are_optional = settings.prompt_lookup.is_none() && !matches!(drafter, Some(Drafter::Model(_)));
        let rows = (0..rows).map(|_| Ahead { accepted: VecDeque::new(), proposes }).collect();
        Self { drafter, are_optional, rows }
    }

    /// Whether each row waits for tokens.
    fn waiting(&self, rows: &Rows) -> Vec<bool> {
        let waits = |(ahead, row): (&Ahead, &Row)| ahead.accepted.is_empty() && !row.finished();
        self.rows.iter().zip(&rows.list).map(waits).collect()
    }

    /// Changes the number of tokens that are drafted next for a row.
    fn learn(&mut self, row: usize, settings: &AssistedSettings, same: usize, proposed: usize) {
        if proposed == 0
            || settings.schedule == Schedule::Constant
            || !matches!(self.drafter, Some(Drafter::Model(_)))
        {
            return;
        }
        let proposes = &mut self.rows[row].proposes;
        *proposes = match same == proposed {
            true => (*proposes + 2).min(MOST),
            false => proposes.saturating_sub(1).max(1),
        };
    }

    /// The next token of each row.
    fn next(&mut self, rows: &Rows, any: TokenId) -> Choice {
        let mut choice = Choice { stopped: Some(Vec::new()), ..Choice::default() };
        for (ahead, row) in self.rows.iter_mut().zip(&rows.list) {
            let accepted = ahead.accepted.pop_front().filter(|_| !row.finished());
            let accepted = accepted.unwrap_or(Accepted {
                token: any,
                logits: Vec::new(),
                scores: Vec::new(),
                stopped: None,
            });
            choice.tokens.push(accepted.token);
            choice.logits.push(accepted.logits);
            choice.scores.push(accepted.scores);
            choice.stopped.get_or_insert_default().push(accepted.stopped);
        }
        choice
    }
}

impl Assisted {
    pub(super) fn new(
        each: EachRow,
        drafter: Option<Drafter>,
        runner: &mut Runner<'_>,
        rows: &Rows,
        options: &Options,
    ) -> Self {
        let drafts = Drafts::new(drafter, &options.settings.assisted, rows.len());
        let most = drafts.rows.iter().map(|row| row.proposes).max().unwrap_or(0);
        runner.feeder.cache.keep_history(most + 1);
        Self { drafts, each }
    }

    /// The choice for each row, without drafts.
    pub(super) fn into_each_row(self) -> EachRow {
        self.each
    }

    /// Whether the next token may be chosen without drafts: that changes no token, and none waits to be
    /// delivered.
    pub(super) fn may_pause(&self) -> bool {
        self.drafts.are_optional && self.drafts.rows.iter().all(|row| row.accepted.is_empty())
    }

    /// The choice for each row, without drafts.
    pub(super) fn each_row(&mut self) -> &mut EachRow {
        &mut self.each
    }

    /// Makes a step.
    pub(super) async fn choose(&mut self, state: &mut StepState<'_, '_>) -> Result<Choice> {
        let Self { drafts, each } = self;
        // The prompt comes first.
        if state.rows.delivered == 0 {
            return each.choose(state).await;
        }
        let made = match drafts.waiting(state.rows).contains(&true) {
            true => drafts.round(each, state).await,
            false => Ok(true),
        };
        let made = made.and_then(|made| state.runner.none_refused().map(|()| made));
        if let Ok(false) = made {
            state.runner.feed_last(state.rows);
            return each.choose(state).await;
        }
        // The last tokens are not those that a step chose.
        state.runner.next = Next::Nothing;
        made.map(|_| drafts.next(state.rows, state.runner.any))
    }

    /// Forgets the tokens of the draft model: its cache cannot be trusted.
    pub(super) fn start_over(&mut self) {
        if let Some(Drafter::Model(draft)) = &mut self.drafts.drafter {
            draft.start_over();
        }
    }

    /// Feeds the accepted tokens that were not delivered to a cache that holds the delivered ones but the
    /// last.
    pub(super) fn catch_up(&mut self, runner: &mut Runner<'_>, rows: &Rows) -> Result<()> {
        let new: Vec<Vec<TokenId>> = rows
            .list
            .iter()
            .zip(&self.drafts.rows)
            .map(|(row, ahead)| {
                let tokens =
                    row.ids.last().copied().into_iter().chain(ahead.accepted.iter().map(|next| next.token));
                tokens.take(ahead.accepted.len()).collect()
            })
            .collect();
        if new.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let Feeder { cache, left_pad, .. } = &mut runner.feeder;
        let batch = uneven(&new, &cache.seq_lens(new.len()), left_pad, &runner.device);
        cache.keep_history(batch.len() + 1);
        runner.next = Next::Nothing;
        runner.feeder.check(&batch).map(drop)
    }

    /// Makes the cache forget the accepted tokens that were not delivered, and more if it cannot be truncated
    /// there.
    pub(super) fn forget_accepted(runner: &mut Runner<'_>, rows: &Rows) {
        let cache = &mut runner.feeder.cache;
        let ends = cache.rewind_points(&rows.ends());
        // If the cache cannot be truncated, its `seq_len` tells.
        _ = cache.truncate_rows(&ends);
    }
}

/// Checks that drafts, which the setting `name` asks for, go with the other settings and the cache.
///
/// # Errors
/// [`Error::Setting`](kiln_core::Error::Setting) for the first that they do not go with.
fn check(name: &'static str, runner: &Runner<'_>, rows: &Rows, options: &Options) -> Result<()> {
    let Options { settings, grammar, .. } = options;
    if rows.width > 1 {
        let which = if settings.beams.is_some() { "num_beams" } else { "num_return_sequences" };
        let why = format!("goes with one sequence of each prompt; set {which} to 1");
        return Err(setting(name, why));
    }
    if let Some(other) = settings.on_host().first() {
        let why = format!("does not go with `{other}` yet; leave one of the two out");
        return Err(setting(name, why));
    }
    if grammar.as_ref().is_some_and(|grammar| !grammar.can_rewind()) {
        let why = "does not go with a grammar that has `stop=` or `max_tokens=`; leave one of the two out";
        return Err(setting(name, why));
    }
    if let Some(layer) = runner.cache().cannot_rewind() {
        let why = format!(
            "proposals that are wrong must be forgotten, which the {layer} cache cannot do; use another"
        );
        return Err(setting(name, why));
    }
    Ok(())
}

/// Whether tokens that a grammar forces are fed in one pass, though there is no drafter.
pub(super) fn fast_forwards(runner: &Runner<'_>, rows: &Rows, options: &Options) -> bool {
    options.fast_forward
        && options.grammar.as_ref().is_some_and(Matcher::can_rewind)
        && rows.width == 1
        && changes_nothing(runner, options)
}

/// Whether the tokens of a row are the same if some of them are fed in one pass.
fn changes_nothing(runner: &Runner<'_>, options: &Options) -> bool {
    let cache = runner.cache();
    cache.cannot_rewind().is_none() && !cache.is_by_pass() && !options.settings.needs_host()
}

#[cfg(test)]
mod tests;
