//! Assisted decoding: tokens are proposed cheaply, and the model checks many of them in one pass. (transformers'
//! `_assisted_decoding`, and speculative decoding)
//!
//! The tokens are those that the model would choose alone. A pass over several tokens takes hardly longer than one over one
//! token, because its weights are read once.

mod draft_model;
mod prompt_lookup;
mod round;
mod settings;
mod verify;

use std::collections::VecDeque;

use kiln_core::{Error, Result, model::TokenId};

pub use self::{
    draft_model::DraftModel,
    settings::{AssistedSettings, PromptLookup, Schedule},
};
use self::{draft_model::uneven, round::Round, settings::MOST};
use super::{
    Generation, Options,
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
pub(super) struct Assisted<'a> {
    drafter: Drafter<'a>,
    rows: Vec<Ahead>,
}

#[derive(Debug)]
enum Drafter<'a> {
    PromptLookup(PromptLookup),
    Model(Box<DraftModel<'a>>),
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

impl Drafter<'_> {
    async fn propose(
        &mut self,
        asked: &[Asked<'_>],
        settings: &Settings,
        vocab: usize,
    ) -> Result<Vec<Proposal>> {
        match self {
            Self::PromptLookup(lookup) => Ok(asked
                .iter()
                .map(|row| match row.most {
                    0 => Proposal::default(),
                    _ => lookup.propose(row, settings, vocab),
                })
                .collect()),
            Self::Model(draft) => draft.propose(asked, settings).await,
        }
    }
}

impl<'a> Assisted<'a> {
    fn new(drafter: Drafter<'a>, settings: &AssistedSettings, rows: usize) -> Self {
        let proposes = match &drafter {
            Drafter::PromptLookup(lookup) => lookup.num_tokens,
            Drafter::Model(_) => settings.num_assistant_tokens,
        };
        let rows = (0..rows).map(|_| Ahead { accepted: VecDeque::new(), proposes }).collect();
        Self { drafter, rows }
    }

    /// Forgets what the draft model was fed: it cannot be trusted.
    pub(super) fn start_over(&mut self) {
        if let Drafter::Model(draft) = &mut self.drafter {
            draft.start_over();
        }
    }

    /// Whether a row waits for tokens.
    fn is_behind(&self, rows: &[Row]) -> bool {
        self.rows.iter().zip(rows).any(|(ahead, row)| ahead.accepted.is_empty() && !row.finished())
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

impl Ahead {
    /// Changes how many tokens are proposed next.
    fn learn(&mut self, drafter: &Drafter<'_>, settings: &AssistedSettings, same: usize, proposed: usize) {
        if proposed == 0
            || settings.schedule == Schedule::Constant
            || matches!(drafter, Drafter::PromptLookup(_))
        {
            return;
        }
        self.proposes = match same == proposed {
            true => (self.proposes + 2).min(MOST),
            false => self.proposes.saturating_sub(1).max(1),
        };
    }
}

impl<'a> Generation<'a> {
    /// Has `draft` propose tokens. To be called before the first step.
    ///
    /// # Errors
    /// [`Error::Setting`] for a draft model of another vocabulary, where the settings ask for prompt lookup or several rows of a prompt,
    /// and for a cache that cannot forget tokens.
    pub fn with_draft(mut self, mut draft: DraftModel<'a>) -> Result<Self> {
        const NAME: &str = "draft";

        let vocab = self.feeder.running.model.vocab();
        if self.options.settings.assisted.prompt_lookup.is_some() {
            let why = "goes with no other proposals; leave out either it or `prompt_lookup_num_tokens`";
            return Err(setting(NAME, why));
        }
        if draft.vocab() != vocab {
            return Err(setting(
                NAME,
                format!(
                    "has a vocabulary of {} tokens and the model one of {vocab}; use a draft model with the same tokenizer",
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

    /// Has what the settings ask for propose tokens.
    pub(super) fn assist_as_asked(&mut self) -> Result<()> {
        match self.options.settings.assisted.prompt_lookup {
            Some(lookup) => self.assist("prompt_lookup_num_tokens", Drafter::PromptLookup(lookup)),
            None => Ok(()),
        }
    }

    fn assist(&mut self, name: &'static str, drafter: Drafter<'a>) -> Result<()> {
        if self.width > 1 {
            let which =
                if self.options.settings.beams.is_some() { "num_beams" } else { "num_return_sequences" };
            let why = format!("goes with one sequence of each prompt; set {which} to 1");
            return Err(setting(name, why));
        }
        let Options { settings, grammar, .. } = &self.options;
        let other = grammar.as_ref().map(Matcher::name).or_else(|| settings.on_host().first().copied());
        if let Some(other) = other {
            let why = format!("does not go with `{other}` yet; leave one of the two out");
            return Err(setting(name, why));
        }
        if let Some(layer) = self.feeder.running.cache.cannot_rewind() {
            let why = format!(
                "proposals that are wrong must be forgotten, which the {layer} cache cannot do; use another"
            );
            return Err(setting(name, why));
        }
        // Scores are compared with what was proposed, on the host.
        self.feeder.device_sampler = None;
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
        let result = if assisted.is_behind(&self.rows) {
            let round = Round {
                options: &self.options,
                rows: &self.rows,
                generated: self.delivered,
                limit: self.limit,
                stopping: Stopping { options: &self.options, out_of_time: false },
                device: &self.device,
            };
            assisted.round(&round, &mut self.feeder, &mut self.search, &mut self.stats).await
        } else {
            Ok(())
        };
        let result = result.and_then(|()| self.feeder.refusals.none_since());
        let any = self.options.settings.padding(self.feeder.running.model.vocab());
        let choice = result.map(|()| assisted.next(&self.rows, any));
        self.assisted = Some(assisted);
        choice
    }
}

#[cfg(test)]
mod tests;
