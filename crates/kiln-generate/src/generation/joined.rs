//! Steps whose passes are shared with other generations: the engine computes the logits.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor};
use kiln_core::{Error, Result, model::CausalModel, model_cache::ModelCache, read_back::ReadBack};

use super::{Generation, Next, on_host::Scores, search::Search, step::Step};
use crate::{OomPolicy, chooser::Chosen, decode::Wanted};

/// A step whose logits are there, on its way to the host.
#[derive(Debug)]
pub(crate) enum Reading {
    /// Tokens that the device chose.
    Chosen(ReadBack),
    Scores(Box<Scores>),
}

/// The rows of a generation, while a cache of the engine holds them.
#[derive(Debug)]
pub(crate) struct JoiningRows {
    pub(crate) cache: ModelCache,
    pub(crate) left_pad: Vec<usize>,
    pub(crate) capture: bool,
}

impl Generation<'_> {
    /// Whether the next step is one token of each row, fed after the row's own tokens, and nothing else.
    pub(crate) fn can_join(&self) -> bool {
        let one_pass_a_step =
            self.guidance.is_none() && self.assisted.is_none() && self.contrastive.is_none();
        one_pass_a_step
            && !self.over
            && self.ahead.is_none()
            && self.delivered > 0
            && self.feeder.remembers()
            && matches!(self.search, Search::EachRow(_))
            && matches!(self.feeder.running.wanted, Wanted::Last)
            && matches!(self.next, Next::Tokens(_, None))
    }

    /// Number of rows that a pass of this generation has.
    pub(crate) fn fed_rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether every row has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.rows.iter().all(super::Row::finished)
    }

    pub(crate) fn model(&self) -> &Arc<dyn CausalModel> {
        &self.feeder.running.model
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Empties the cache. [`resume`](Self::resume) fills it again.
    pub(crate) fn give_up_cache(&mut self) {
        self.ahead = None;
        self.feeder.start_over();
    }

    /// Reads each step before the next one is launched, so that the rows can join others after any step.
    pub(crate) fn stop_looking_ahead(&mut self) {
        self.options.lookahead = false;
    }

    /// Leaves the answer to an error of memory to the engine, or takes it back.
    pub(crate) fn oom_policy_mut(&mut self) -> &mut Option<Arc<dyn OomPolicy>> {
        &mut self.feeder.oom_policy
    }

    /// Gives the cache away, until [`take_back`](Self::take_back).
    pub(crate) fn give_rows(&mut self) -> JoiningRows {
        let capture = self.options.compile;
        let running = self.feeder.leave_to_others();
        let cache = std::mem::replace(&mut *running.cache, ModelCache::new(Vec::new()));
        JoiningRows { cache, left_pad: running.left_pad.clone(), capture }
    }

    /// Takes the rows back.
    pub(crate) fn take_back(&mut self, cache: ModelCache) {
        *self.feeder.running.cache = cache;
    }

    /// The token of each row that is fed next, `[rows, 1]`.
    pub(crate) fn next_tokens(&self) -> Result<Tensor<2, Int>> {
        match &self.next {
            Next::Tokens(tokens, None) => Ok(tokens.clone()),
            _ => Err(Error::Execution("a row that shares passes has no next token".into())),
        }
    }

    /// Takes the logits `[rows, 1, vocab]` of a shared pass, and starts to read what the next tokens are
    /// chosen by.
    pub(crate) fn start_step(&mut self, logits: Tensor<3>) -> Result<Reading> {
        self.over = true;
        self.clock.start();
        let Some(chooser) = &mut self.feeder.chooser else {
            return Ok(Reading::Scores(Box::new(self.read_scores(logits, None))));
        };
        let Chosen { next, to_read } = chooser.choose(logits)?;
        self.next = Next::Tokens(next, None);
        self.launched += 1;
        Ok(Reading::Chosen(to_read.start_reading()))
    }

    /// Chooses the next token of each row.
    pub(crate) async fn finish_step(&mut self, reading: Reading) -> Result<Step> {
        let chosen = match reading {
            Reading::Chosen(reading) => self.choose_launched(reading).await?,
            Reading::Scores(scores) => self.choose_scored(*scores).await?,
        };
        let step = self.deliver(chosen)?;
        self.over = step.finished.iter().all(|&finished| finished);
        Ok(step)
    }

    /// Feeds again what the cache has lost. Returns a step where none was delivered before.
    ///
    /// # Errors
    /// `error`, where the cache cannot be filled again; then the generation is over.
    pub(crate) async fn resume(&mut self, error: Error) -> Result<Option<Step>> {
        self.over = true;
        self.begin_again(error, false).await?;
        self.over = false;
        if self.delivered > 0 { Ok(None) } else { self.continue_alone().await }
    }

    /// A step in passes of its own; `None` where the generation is over.
    pub(crate) async fn continue_alone(&mut self) -> Result<Option<Step>> {
        self.make_step().await.transpose()
    }
}
