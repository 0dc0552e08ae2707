//! Assisted decoding: tokens are proposed cheaply, and the model checks many of them in one pass. (transformers'
//! `_assisted_decoding`, and speculative decoding)
//!
//! The tokens are those that the model would choose alone. A pass over several tokens takes hardly longer than one over one
//! token, because its weights are read once.

mod constraint;
mod draft_model;
mod prompt_lookup;
mod round;
mod settings;
mod translation;
mod verify;

use std::collections::VecDeque;

use burn::tensor::{Tensor, TensorData};
use kiln_core::{Error, Result, model::TokenId};

use self::{constraint::Constraint, draft_model::uneven, round::Round, settings::MOST};
pub use self::{
    draft_model::DraftModel,
    settings::{AssistedSettings, PromptLookup, Schedule},
};
use super::{
    Generation, Next, Options,
    rows::{Row, Stopping},
    search::{Choice, Search},
};
use crate::{
    decode::Running,
    grammar::Matcher,
    processors::RowState,
    sampler::Sampler,
    settings::{Settings, setting},
    stopping::StopReason,
};

/// What proposes tokens, and what of them was accepted and not delivered yet.
#[derive(Debug)]
pub(super) struct Assisted {
    /// `None`: only what a grammar forces is proposed.
    drafter: Option<Drafter>,
    rows: Vec<Ahead>,
}

#[derive(Debug)]
enum Drafter {
    PromptLookup(PromptLookup),
    Model(Box<DraftModel>),
}

/// A row, beside the tokens that were delivered.
#[derive(Debug)]
struct Ahead {
    accepted: VecDeque<Accepted>,
    /// Tokens that are proposed next, at most.
    proposes: usize,
}

/// A token that follows a row, with what it was chosen by where that is kept.
#[derive(Debug)]
struct Accepted {
    token: TokenId,
    logits: Vec<f32>,
    scores: Vec<f32>,
    /// Why the row ends with it; `None`: it goes on.
    stopped: Option<StopReason>,
}

/// A row that tokens are proposed for.
#[derive(Clone, Copy, Debug)]
struct Asked<'a> {
    state: RowState<'a>,
    /// Tokens that are of use; 0 also for rows that are not checked in this pass.
    most: usize,
}

/// Tokens that are proposed for a row.
#[derive(Debug, Default)]
struct Proposal {
    tokens: Vec<TokenId>,
    /// The probabilities `[vocab]` that each was drawn with; empty where they were not drawn.
    drawn_from: Vec<Vec<f64>>,
}

impl Drafter {
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

impl Assisted {
    fn new(drafter: Option<Drafter>, settings: &AssistedSettings, rows: usize) -> Self {
        let proposes = match &drafter {
            Some(Drafter::PromptLookup(lookup)) => lookup.num_tokens,
            Some(Drafter::Model(_)) => settings.num_assistant_tokens,
            None => 0,
        };
        let rows = (0..rows).map(|_| Ahead { accepted: VecDeque::new(), proposes }).collect();
        Self { drafter, rows }
    }

    /// Forgets what the draft model was fed: it cannot be trusted.
    pub(super) fn start_over(&mut self) {
        if let Some(Drafter::Model(draft)) = &mut self.drafter {
            draft.start_over();
        }
    }

    /// Which rows wait for tokens.
    fn waiting(&self, rows: &[Row]) -> Vec<bool> {
        let waits = |(ahead, row): (&Ahead, &Row)| ahead.accepted.is_empty() && !row.finished();
        self.rows.iter().zip(rows).map(waits).collect()
    }

    /// Changes how many tokens are proposed next for a row.
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
    fn next(&mut self, rows: &[Row], any: TokenId) -> Choice {
        let mut choice = Choice { stopped: Some(Vec::new()), ..Choice::default() };
        for (ahead, row) in self.rows.iter_mut().zip(rows) {
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

impl Generation<'_> {
    /// Has `draft` propose tokens. To be called before the first step.
    ///
    /// # Errors
    /// [`Error::Setting`] for a draft model of another vocabulary whose tokenizer is not known, where the settings ask for prompt
    /// lookup or several rows of a prompt, and for a cache that cannot forget tokens.
    pub fn with_draft(mut self, mut draft: DraftModel) -> Result<Self> {
        const NAME: &str = "draft";

        let vocab = self.feeder.running.model.vocab();
        if self.options.settings.assisted.prompt_lookup.is_some() {
            let why = "goes with no other proposals; leave out either it or `prompt_lookup_num_tokens`";
            return Err(setting(NAME, why));
        }
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
        if let Some(seed) = self.stats.seed {
            draft.draws(seed);
        }
        self.assist(NAME, Drafter::Model(Box::new(draft)))?;
        Ok(self)
    }

    /// Has what the settings ask for propose tokens, and what a grammar forces.
    pub(super) fn assist_as_asked(&mut self) -> Result<()> {
        if let Some(lookup) = self.options.settings.assisted.prompt_lookup {
            return self.assist("prompt_lookup_num_tokens", Drafter::PromptLookup(lookup));
        }
        let Options { settings, grammar, fast_forward, .. } = &self.options;
        let cache = &self.feeder.running.cache;
        let changes_nothing = cache.cannot_rewind().is_none() && !cache.is_by_pass();
        if *fast_forward
            && grammar.as_ref().is_some_and(Matcher::can_rewind)
            && changes_nothing
            && self.width == 1
            && !settings.needs_host()
        {
            self.assist_with(None)?;
        }
        Ok(())
    }

    fn assist(&mut self, name: &'static str, drafter: Drafter) -> Result<()> {
        if self.width > 1 {
            let which =
                if self.options.settings.beams.is_some() { "num_beams" } else { "num_return_sequences" };
            let why = format!("goes with one sequence of each prompt; set {which} to 1");
            return Err(setting(name, why));
        }
        let Options { settings, grammar, .. } = &self.options;
        if let Some(other) = settings.on_host().first() {
            let why = format!("does not go with `{other}` yet; leave one of the two out");
            return Err(setting(name, why));
        }
        if grammar.as_ref().is_some_and(|grammar| !grammar.can_rewind()) {
            let why =
                "does not go with a grammar that has `stop=` or `max_tokens=`; leave one of the two out";
            return Err(setting(name, why));
        }
        if let Some(layer) = self.feeder.running.cache.cannot_rewind() {
            let why = format!(
                "proposals that are wrong must be forgotten, which the {layer} cache cannot do; use another"
            );
            return Err(setting(name, why));
        }
        self.assist_with(Some(drafter))
    }

    fn assist_with(&mut self, drafter: Option<Drafter>) -> Result<()> {
        // Scores are compared with what was proposed, on the host.
        self.feeder.chooser = None;
        if let Search::EachRow(each) = &mut self.search
            && let Some(seed) = self.stats.seed
            && each.sampler.is_none()
        {
            each.sampler = Some(Sampler::new(Some(seed))?);
        }
        let assisted = Assisted::new(drafter, &self.options.settings.assisted, self.rows.len());
        let most = assisted.rows.iter().map(|row| row.proposes).max().unwrap_or(0);
        self.feeder.running.cache.keep_history(most + 1);
        self.assisted = Some(assisted);
        Ok(())
    }

    /// Feeds what was accepted and not delivered to a cache that holds what was delivered, but for the last token.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        let Some(assisted) = &self.assisted else { return Ok(()) };
        let new: Vec<Vec<TokenId>> = self
            .rows
            .iter()
            .zip(&assisted.rows)
            .map(|(row, ahead)| {
                let tokens =
                    row.ids.last().copied().into_iter().chain(ahead.accepted.iter().map(|next| next.token));
                tokens.take(ahead.accepted.len()).collect()
            })
            .collect();
        if new.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let Running { cache, left_pad, .. } = &mut self.feeder.running;
        let batch = uneven(&new, &cache.seq_lens(new.len()), left_pad, &self.device);
        cache.keep_history(batch.len() + 1);
        self.next = Next::Nothing;
        self.feeder.check(&batch).map(drop)
    }

    pub(super) async fn choose_assisted(&mut self) -> Result<Choice> {
        // The prompt comes first.
        if self.delivered == 0 {
            return self.choose_on_host().await;
        }
        let Some(mut assisted) = self.assisted.take() else {
            return Err(Error::Execution("nothing proposes tokens".into()));
        };
        let result = if assisted.waiting(&self.rows).contains(&true) {
            let round = Round {
                options: &self.options,
                rows: &self.rows,
                generated: self.delivered,
                limit: self.limit,
                stopping: Stopping { options: &self.options, out_of_time: false },
                device: &self.device,
            };
            let (feeder, search) = (&mut self.feeder, &mut self.search);
            assisted.round(&round, feeder, search, self.masks.as_mut(), &mut self.stats).await
        } else {
            Ok(true)
        };
        let result = result.and_then(|made| self.feeder.refusals.none_since().map(|()| made));
        if let Ok(false) = result {
            self.assisted = Some(assisted);
            if matches!(self.next, Next::Nothing) {
                self.next = self.last_tokens();
            }
            return self.choose_on_host().await;
        }
        let any = self.options.settings.padding(self.feeder.running.model.vocab());
        let choice = result.map(|_| assisted.next(&self.rows, any));
        self.assisted = Some(assisted);
        // The last tokens are not those that a step chose.
        self.next = Next::Nothing;
        choice
    }

    /// The last token of each row, to be fed.
    fn last_tokens(&self) -> Next {
        let tokens: Vec<i32> =
            self.rows.iter().map(|row| row.ids.last().map_or(0, |&id| id as i32)).collect();
        let tokens = TensorData::new(tokens, [self.rows.len(), 1]);
        Next::Tokens(Tensor::from_data(tokens, &self.device), None)
    }
}

#[cfg(test)]
mod tests;
