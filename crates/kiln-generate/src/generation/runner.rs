//! Runs the model: feeds the tokens of each step, and reads the results.

use std::{iter, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::Batch,
    device_state::DeviceState,
    model::{CausalModel, TokenId},
    model_cache::{CacheState, ModelCache},
    read_back::{self, ReadBack},
};

use super::{Options, guidance::Guidance, next::Next, rows::Rows, scores::Scores};
use crate::{
    OomPolicy,
    cache_handle::CacheHandle,
    chooser::Chosen,
    feeder::{Feeder, Output, Wanted},
    logprobs::PromptLogprobs,
};

/// Feeds the model of a generation. Knows what is fed next, and which step the device is at.
#[derive(Debug)]
pub(crate) struct Runner<'a> {
    pub(super) feeder: Feeder<'a>,
    guidance: Option<Guidance>,
    pub(super) next: Next,
    /// A step that was launched before the step before it was delivered.
    ahead: Option<Result<ReadBack>>,
    /// Number of steps whose tokens the device chose, or is choosing.
    launched: usize,
    /// Whether a step is launched before the step before it is read.
    lookahead: bool,
    /// Prompt tokens of each row that are fed at a time; `None`: all.
    chunk: Option<usize>,
    /// The token that fills columns without a token.
    pub(super) any: TokenId,
    pub(super) device: Device,
}

/// A step on its way to the host.
#[derive(Debug)]
pub(crate) enum Reading {
    /// The choice of the device: tokens, or candidates of beams.
    Chosen(ReadBack),
    Scores(Box<Scores>),
}

/// The rows of a generation, while a cache of the engine holds them.
#[derive(Debug)]
pub(crate) struct JoiningRows {
    pub(crate) cache: ModelCache,
    pub(crate) left_pad: Vec<usize>,
}

impl<'a> Runner<'a> {
    /// Prepares to feed `batch`.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::Prompt`] and [`Error::Full`] for settings that do not go with the model,
    /// the cache or the prompt.
    pub(super) fn new(
        model: Arc<dyn CausalModel>,
        cache: CacheHandle<'a>,
        batch: Batch,
        rows: &Rows,
        options: &Options,
    ) -> Result<Self> {
        let settings = &options.settings;
        let device = batch.tokens.device();
        let any = settings.padding(model.vocab());
        let guidance = Guidance::new(&model, &cache, rows, options, &device)?;
        let wanted = match &settings.dola_layers {
            Some(layers) => Wanted::Early(layers.of(&*model)?),
            None if settings.is_contrastive() => Wanted::Hidden,
            None if options.prompt_logprobs.is_some() => Wanted::PromptLogprobs,
            None => Wanted::Last,
        };
        // A recorded step is of no use if the rows of the cache are moved before each.
        let capture = options.compile && !settings.is_contrastive();
        let mut feeder = Feeder::new(model, cache, batch.left_pad.clone(), capture, &device);
        feeder.features = batch.features.clone();
        if let (Wanted::PromptLogprobs, Some(top)) = (&wanted, options.prompt_logprobs) {
            let prompt = rows.list.first().map_or_else(Vec::new, |row| row.ids.clone());
            feeder.prompt_logprobs = Some(PromptLogprobs::new(prompt, top));
        }
        feeder.wanted = wanted;
        // Groups of beams wait for the host: it knows which are done, and their tokens change the scores of
        // others.
        let groups = settings.beams.as_ref().map_or(1, |beams| beams.num_beam_groups);
        Ok(Self {
            feeder,
            guidance,
            next: Next::Prompt(batch),
            ahead: None,
            launched: 0,
            lookahead: options.lookahead && groups == 1,
            chunk: options.prefill_chunk,
            any,
            device,
        })
    }

    /// Tells the cache how long the rows will be, and how many tokens it must be able to forget.
    ///
    /// # Errors
    /// [`Error::Full`] for rows that exceed the cache or the positions of the model.
    pub(super) fn reserve(&mut self, rows: &Rows, options: &Options) -> Result<()> {
        let Options { settings, oom_policy, .. } = options;
        let cache = &mut self.feeder.cache;
        if let Some(limit) = rows.limit {
            let reaches = rows.prompt_end() + settings.fed(limit);
            let capacities = cache.capacity().into_iter().chain(self.feeder.model.max_positions());
            if let Some(capacity) = capacities.min().filter(|&capacity| capacity < reaches) {
                return Err(Error::Full { capacity, needed: reaches });
            }
            self.feeder.reserve(reaches);
        }
        if self.looks_ahead() || settings.is_contrastive() || oom_policy.is_some() {
            self.feeder.cache.keep_history(1);
        }
        self.feeder.oom_policy.clone_from(oom_policy);
        Ok(())
    }

    pub(crate) fn model(&self) -> &Arc<dyn CausalModel> {
        &self.feeder.model
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn cache(&self) -> &ModelCache {
        &self.feeder.cache
    }

    /// The kind of output that a pass gives.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.feeder.wanted
    }

    pub(super) fn vocab(&self) -> usize {
        self.feeder.model.vocab()
    }

    fn looks_ahead(&self) -> bool {
        self.lookahead && self.feeder.chooser.is_some()
    }

    /// Feeds what is next to the model.
    pub(super) async fn feed(&mut self, width: usize) -> Result<Output> {
        let next = std::mem::replace(&mut self.next, Next::Nothing);
        next.feed(&mut self.feeder, width, self.chunk).await
    }

    /// Makes a step, and starts to read its result. Launches the next step if the device chooses tokens.
    pub(super) async fn start_step(&mut self, rows: &Rows, options: &Options) -> Result<Reading> {
        if self.feeder.chooser.is_some() {
            let reading = match self.ahead.take() {
                Some(started) => started?,
                None => self.launch(rows.width).await?,
            };
            // A step that fails ahead of time is reported in its own turn.
            if self.looks_ahead() && rows.limit.is_none_or(|limit| self.launched < limit) {
                self.ahead = Some(self.launch(rows.width).await);
            }
            return Ok(Reading::Chosen(reading));
        }
        let negative = match &mut self.guidance {
            Some(guidance) => {
                let logits = guidance.feed(&self.next, rows.width, self.chunk).await?;
                Some(read_back::start(logits))
            }
            None => None,
        };
        let Output::Logits(logits) = self.feed(rows.width).await? else {
            return Err(Error::Execution("a step kept its scores on the device".into()));
        };
        Ok(Reading::Scores(Box::new(Scores::start(logits, negative, options))))
    }

    /// Starts to read the result of a step whose logits `[rows, 1, vocab]` the engine computed.
    pub(super) fn start_shared_step(&mut self, logits: Tensor<3>, options: &Options) -> Result<Reading> {
        match self.feeder.chooser {
            Some(_) => self.choose_on_device(logits).map(Reading::Chosen),
            None => Ok(Reading::Scores(Box::new(Scores::start(logits, None, options)))),
        }
    }

    /// Launches a step whose tokens the device chooses, and starts to read them.
    async fn launch(&mut self, width: usize) -> Result<ReadBack> {
        match self.feed(width).await? {
            Output::Chosen(chosen) => {
                self.next = Next::OnDevice;
                self.launched += 1;
                Ok(chosen.to_read.start_reading())
            }
            Output::Logits(logits) => self.choose_on_device(logits),
        }
    }

    fn choose_on_device(&mut self, logits: Tensor<3>) -> Result<ReadBack> {
        let Some(chooser) = &mut self.feeder.chooser else {
            return Err(Error::Execution("nothing chooses tokens on the device".into()));
        };
        let Chosen { next, to_read } = chooser.choose(logits)?;
        self.next = Next::Tokens(next, None);
        self.launched += 1;
        Ok(to_read.start_reading())
    }

    /// Feeds `tokens` with the next step, each after the row in `parents`; `None`: after its own row.
    pub(super) fn feed_next(&mut self, tokens: &[TokenId], parents: Option<&[usize]>) {
        let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
        let tokens = TensorData::new(ids, [tokens.len(), 1]);
        let moves = |parents: &&[usize]| !parents.iter().copied().eq(0..parents.len());
        let parents = parents.filter(moves).map(<[usize]>::to_vec);
        self.next = Next::Tokens(Tensor::from_data(tokens, &self.device), parents);
    }

    /// Feeds the last token of each row with the next step, if a pass that verified drafts was the last.
    pub(super) fn feed_last(&mut self, rows: &Rows) {
        if matches!(self.next, Next::Nothing) {
            self.next = Next::Tokens(rows.last_tokens(&self.device), None);
        }
    }

    /// Finishes the reading of a tensor. If it fails, the contents of the cache may never have been written.
    pub(super) async fn read(&mut self, reading: ReadBack) -> Result<TensorData> {
        let read = reading.finish().await;
        if read.is_err() {
            self.poison();
        }
        read
    }

    /// Marks the contents of the cache as not to be trusted.
    pub(super) fn poison(&mut self) {
        self.feeder.cache.poison();
    }

    /// Finishes the reading of a float tensor.
    pub(super) async fn read_floats(&mut self, reading: ReadBack) -> Result<Vec<f32>> {
        self.read(reading).await?.try_into_vec().map_err(|e| Error::Execution(e.to_string()))
    }

    /// Moves the scores away from the scores after the negative prompt, if there is guidance.
    pub(super) fn guided(&self, logits: &[f32], negative: &[f32], vocab: usize) -> Option<Vec<f32>> {
        self.guidance.as_ref().map(|guidance| guidance.scores(logits, negative, vocab))
    }

    /// # Errors
    /// The error of the device if it refused an allocation since the last step.
    pub(super) fn none_refused(&self) -> Result<()> {
        self.feeder.refusals.none_since()
    }

    /// Whether a step was lost together with its recording.
    pub(super) fn is_lost(&self) -> bool {
        self.feeder.lost || self.guidance.as_ref().is_some_and(Guidance::is_lost)
    }

    /// Empties the cache after an error that leaves nothing to trust in it.
    pub(super) fn start_over(&mut self) {
        self.ahead = None;
        self.next = Next::Nothing;
        // Errors of work that is still under way belong to the step that is given up.
        let further = self.feeder.model.further_devices();
        let devices: Vec<_> = iter::once(&self.device).chain(&further).map(DeviceState::of).collect();
        devices.iter().for_each(|device| _ = device.sync());
        self.feeder.start_over();
        self.guidance.iter_mut().for_each(Guidance::start_over);
        devices.iter().for_each(DeviceState::give_back);
    }

    /// Prepares to feed the rows in smaller chunks, or to a cache that takes less memory.
    ///
    /// # Errors
    /// `error`, if nothing can be done about it.
    pub(super) fn make_room(&mut self, error: Error, rows: &Rows) -> Result<()> {
        /// Prompt tokens of a row per chunk, from the second attempt on.
        const CHUNK: usize = 128;

        let prompt = rows.prompt_end();
        let held = prompt + rows.delivered;
        let chunk = self.chunk.unwrap_or(held);
        self.chunk = Some(chunk.min(CHUNK));
        if chunk.min(prompt) <= CHUNK || self.feeder.oom_policy.is_none() {
            // For as many rows as the cache had.
            self.feeder.free_memory(error, held, chunk.min(CHUNK))?;
        }
        Ok(())
    }

    /// Feeds an empty cache the prompt next.
    pub(super) fn feed_prompt(&mut self, rows: &Rows) {
        self.feeder.left_pad = rows.prompts().map(|row| row.left_pad).collect();
        self.launched = 0;
        self.next = Next::Prompt(rows.prompt_batch(self.any, &self.device));
    }

    /// Feeds an empty cache all tokens of `rows` but the last of each.
    pub(super) async fn feed_again(&mut self, rows: &Rows) -> Result<()> {
        self.feeder.left_pad = rows.prompts().map(|row| row.left_pad).collect();
        self.launched = rows.delivered;
        if rows.delivered == 0 {
            self.feed_prompt(rows);
            return Ok(());
        }
        if let Some(guidance) = &mut self.guidance {
            guidance.feed_again(rows, self.chunk).await?;
        }
        let last = rows.feed_again(&mut self.feeder, self.chunk, self.any, &self.device).await?;
        self.next = Next::Tokens(last, None);
        Ok(())
    }

    /// Empties the cache if the device refused a part of its contents, or gave it up. Returns whether it did.
    pub(super) fn forget_refused(&mut self) -> bool {
        let refused = self.none_refused().is_err() || self.feeder.lost;
        if refused {
            self.feeder.start_over();
        }
        refused
    }

    /// Drops the step that was launched ahead.
    pub(super) fn drop_ahead(&mut self) {
        self.ahead = None;
    }

    /// Truncates the cache to all tokens that were delivered but the last.
    pub(super) fn forget_undelivered(&mut self, rows: &Rows) -> Result<()> {
        self.feeder.cache.truncate_rows(&rows.ends())
    }

    /// Truncates a cache that outlives the generation to the prompts.
    pub(super) fn keep_prompts(&mut self, rows: &Rows) {
        let ends: Vec<usize> = rows.prompts().map(|row| row.prompt_end).collect();
        if matches!(self.feeder.cache, CacheHandle::Borrowed(_))
            && (self.feeder.narrow(ends.len()).is_err() || self.feeder.cache.truncate_rows(&ends).is_err())
        {
            self.feeder.cache.reset();
        }
    }
}

/// The part that the engine uses.
impl Runner<'_> {
    /// Reads each step before the next one is launched, so that the rows can join others after any step.
    pub(crate) fn prepare_to_join(&mut self) {
        self.lookahead = false;
        self.feeder.prepare_to_give();
    }

    /// The answer to an error of memory, which the engine may keep for itself.
    pub(crate) fn oom_policy_mut(&mut self) -> &mut Option<Arc<dyn OomPolicy>> {
        &mut self.feeder.oom_policy
    }

    /// Whether a prompt is fed next, to an empty cache and nothing else.
    pub(super) fn is_unfed(&self) -> bool {
        self.guidance.is_none()
            && self.feeder.features.is_none()
            && self.feeder.cache.rows().is_none()
            && matches!(self.feeder.wanted, Wanted::Last)
            && matches!(self.next, Next::Prompt(_))
    }

    /// Fills the empty cache with `state`, keeps the first `tokens` tokens of it, and feeds the rest of the
    /// prompt next. Returns whether that was possible.
    pub(super) fn begin_after(
        &mut self,
        tokens: usize,
        state: CacheState,
        rows: &Rows,
        options: &Options,
    ) -> bool {
        let Next::Prompt(batch) = &self.next else { return false };
        let rest = batch.slice(tokens..batch.len());
        // The engine may keep the answer to errors of memory for itself.
        let policy = self.feeder.oom_policy.take();
        let filled = self.feeder.fill(tokens, state) && self.reserve(rows, options).is_ok();
        if !filled {
            self.feeder.cache.discard();
            _ = self.reserve(rows, options);
        }
        self.feeder.oom_policy = policy;
        if !filled {
            return false;
        }
        self.next = Next::Prompt(rest);
        true
    }

    /// Empties the cache. [`Generation::resume`](super::Generation::resume) fills it again.
    pub(crate) fn give_up_cache(&mut self) {
        self.ahead = None;
        self.feeder.start_over();
        self.feeder.prepare_to_give();
    }

    /// Whether the next step is one token of each row, fed after the row's own tokens, and nothing else.
    pub(super) fn can_join(&self, rows: &Rows) -> bool {
        let feeds_last = match &self.next {
            Next::Tokens(_, parents) => parents.is_none(),
            // After a pass that verified drafts, the cache may lack more than the last token.
            Next::Nothing => self.feeder.cache.seq_lens(rows.len()) == rows.ends(),
            Next::Prompt(_) | Next::OnDevice => false,
        };
        feeds_last
            && self.guidance.is_none()
            && self.ahead.is_none()
            && self.feeder.remembers()
            && matches!(self.feeder.wanted, Wanted::Last)
    }

    /// Gives the cache away, until [`take_back`](Self::take_back).
    pub(super) fn give_rows(&mut self) -> JoiningRows {
        JoiningRows { cache: self.feeder.give_cache(), left_pad: self.feeder.left_pad.clone() }
    }

    /// Takes the rows back.
    pub(crate) fn take_back(&mut self, cache: ModelCache) {
        self.feeder.take_back(cache);
    }

    /// The token of each row that is fed next, `[rows, 1]`.
    pub(crate) fn next_tokens(&self) -> Result<Tensor<2, Int>> {
        match &self.next {
            Next::Tokens(tokens, None) => Ok(tokens.clone()),
            _ => Err(Error::Execution("a row that shares passes has no next token".into())),
        }
    }
}
