//! The loop: a prompt goes in, tokens come out one step at a time (transformers' `_sample`).
//!
//! There are two ways to choose a token. Where nobody wants to see the scores, the device chooses it and feeds it on by
//! itself; the host only reads along, at will one step behind, so that the device never waits. Otherwise, and where the
//! device has no kernel that draws, the scores come to the host, and the token goes back. Both give the same tokens, but
//! for a draw that falls on a rounding (see [`crate::sampler`]).

mod assisted;
mod beams;
mod contrastive;
mod dola;
mod guidance;
mod joined;
mod on_device;
mod on_host;
mod options;
mod refused;
mod rows;
mod search;
mod step;

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor};
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, TokenId},
    model_cache::ModelCache,
    read_back::{self, ReadBack},
};

pub(crate) use self::joined::{JoiningRows, Reading};
use self::{
    assisted::Assisted,
    beams::Beams,
    contrastive::Contrastive,
    guidance::Guidance,
    on_device::{device_beams, device_sampler},
    rows::{Row, Stopping, longest_prompt},
    search::{Choice, EachRow, Search},
};
pub use self::{
    assisted::{AssistedSettings, DraftModel, PromptLookup, Schedule},
    beams::{BeamSettings, EarlyStopping, ForceWord},
    contrastive::ContrastiveSettings,
    dola::DolaLayers,
    options::Options,
    step::Step,
};
use crate::{
    cache_handle::CacheHandle,
    chooser::Chooser,
    completion::Completion,
    decode::{Output, Wanted},
    grammar::{Masks, Matcher},
    prefill::{Feeder, checked_chunk},
    sampler::Sampler,
    settings::{Settings, setting},
    stats::{Clock, Stats},
    stopping::StopReason,
};

/// A generation under way.
///
/// It ends when every row has ended ([`StopReason`]). The cache then holds the sequence
/// without its last token, which was never fed, as transformers leaves it; the next prompt begins with that token. This
/// also holds when the generation is dropped earlier. If a look ahead fed a token too many and the cache cannot be
/// truncated, it holds that token, too. After an unrecoverable out-of-memory error the cache is empty. Check `seq_len`
/// before feeding more.
///
/// Rows that have ended go on being computed, with tokens that mean nothing.
///
/// Where prompts have several rows, the cache holds the prompts alone at the end, or nothing if it cannot return to them.
#[derive(Debug)]
pub struct Generation<'a> {
    feeder: Feeder<'a>,
    guidance: Option<Guidance>,
    options: Options,
    search: Search,
    /// Which tokens may follow, where there is a grammar.
    masks: Option<Masks>,
    /// What proposes tokens; `None`: nothing does.
    assisted: Option<Assisted>,
    /// Contrastive search; `None`: tokens are chosen by their scores alone.
    contrastive: Option<Contrastive>,
    /// Rows of each prompt.
    width: usize,
    rows: Vec<Row>,
    next: Next,
    /// A step that the device is at, though the one before it was not delivered.
    ahead: Option<Result<ReadBack>>,
    device: Device,
    /// Whether the rows are all that was fed, so that it can be fed again.
    whole: bool,
    /// Steps that may be made, were started on the device, were delivered.
    limit: Option<usize>,
    launched: usize,
    delivered: usize,
    /// Also while a step is made, so that one that was given up is the last.
    over: bool,
    stats: Stats,
    clock: Clock,
}

/// What is fed next.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
enum Next {
    Prompt(Batch),
    /// `[rows, 1]`, behind the rows that they continue; `None`: behind their own.
    Tokens(Tensor<2, Int>, Option<Vec<usize>>),
    /// What the step before chose; it is there already.
    OnDevice,
    Nothing,
}

impl<'a> Generation<'a> {
    /// Prepares to continue `batch`. Nothing is computed yet.
    ///
    /// `cache` is borrowed, or given to the generation. It may hold the beginning of the rows; then `batch` is only what
    /// follows, and its `left_pad` still counts the padding of the whole rows. `prompts` are the whole rows on the host, padding
    /// left out: processors look at them.
    ///
    /// # Errors
    /// [`Error::Prompt`] for an empty prompt, for rows that do not fit each other, and for ids that are not in the
    /// vocabulary; [`Error::Setting`] for settings that do not go with the model, the cache or the prompt.
    pub fn new(
        model: Arc<dyn CausalModel>,
        cache: impl Into<CacheHandle<'a>>,
        batch: Batch,
        prompts: Vec<Vec<TokenId>>,
        options: Options,
    ) -> Result<Self> {
        checked_chunk(options.prefill_chunk)?;
        let cache = cache.into();
        batch.check_features(model.features(), &cache)?;
        let settings = &options.settings;
        settings.processors.check(model.vocab())?;
        settings.beams.as_ref().map_or(Ok(()), |beams| beams.check_vocabulary(model.vocab()))?;
        let before = cache.seq_lens(batch.rows());
        let contrastive = settings.contrastive.map(Contrastive::new);
        if contrastive.is_some() && before.iter().any(|&before| before > 0) {
            let why = "needs the hidden states of all tokens, and the cache holds tokens already; give all tokens and an empty \
                       cache, or use a Sequence";
            return Err(setting("penalty_alpha", why));
        }
        let rows = Row::of(&batch, prompts, &before, model.vocab())?;
        let device = batch.tokens.device();
        let mut guidance = Guidance::new(&model, &cache, &rows, &options, &device)?;
        let width = settings.width();
        let rows: Vec<Row> = rows.into_iter().flat_map(|row| std::iter::repeat_n(row, width)).collect();
        let prompt_end = longest_prompt(&rows);
        let limit = settings.new_tokens(prompt_end)?;
        if let (Some(guidance), Some(limit)) = (&mut guidance, limit) {
            guidance.reserve(limit)?;
        }
        let mut sampler = settings.do_sample.then(|| Sampler::new(settings.seed)).transpose()?;
        let padding = |(pad, before): (&usize, &usize)| pad.saturating_sub(*before);
        let padding: usize = batch.left_pad.iter().zip(&before).map(padding).sum();
        let skipped: usize = batch.skip.iter().sum();
        let stats = Stats {
            rows: rows.len(),
            prompt_tokens: batch.rows() * batch.len() - padding - skipped,
            seed: sampler.as_ref().map(Sampler::seed),
            ..Stats::default()
        };
        // A recorded step is of no use where the rows of the cache are moved before each.
        let capture = options.compile && contrastive.is_none();
        let mut feeder = Feeder::new(model.clone(), cache, batch.left_pad.clone(), capture, &device);
        feeder.features = batch.features.clone();
        let device_sampler = device_sampler(&options, &mut sampler, &rows, model.vocab(), &device);
        feeder.chooser = device_sampler.map(Chooser::Sampler);
        let masks = options.grammar.as_ref().map(|grammar| Masks::new(vec![grammar.clone(); rows.len()]));
        let masks = masks.transpose()?;
        if let Some(layers) = &settings.dola_layers {
            feeder.running.wanted = Wanted::Early(layers.of(&*model)?);
        }
        if contrastive.is_some() {
            feeder.running.wanted = Wanted::Hidden;
        }
        let search = match &settings.beams {
            Some(beams) => Search::Beams(Box::new(Beams::new(beams.clone(), batch.rows(), sampler))),
            None => Search::EachRow(EachRow { sampler }),
        };
        if let Search::Beams(beams) = &search {
            feeder.chooser =
                device_beams(&options, beams, &feeder.running.cache, model.vocab(), 0).map(Chooser::Beams);
        }
        let mut generation = Self {
            device,
            whole: rows.iter().all(|row| row.ids.len() + row.left_pad == row.prompt_end),
            search,
            masks,
            assisted: None,
            contrastive,
            width,
            feeder,
            guidance,
            options,
            rows,
            next: Next::Prompt(batch),
            ahead: None,
            limit,
            launched: 0,
            delivered: 0,
            over: false,
            stats,
            clock: Clock::default(),
        };
        generation.assist_as_asked()?;
        let looks_ahead = generation.looks_ahead();
        let oom_policy = generation.options.oom_policy.clone();
        let feeder = &mut generation.feeder;
        if let Some(limit) = limit {
            let reaches = prompt_end + generation.options.settings.fed(limit);
            let capacities = feeder.running.cache.capacity().into_iter().chain(model.max_positions());
            if let Some(capacity) = capacities.min().filter(|&capacity| capacity < reaches) {
                return Err(Error::Full { capacity, needed: reaches });
            }
            feeder.reserve(reaches);
        }
        if looks_ahead || generation.contrastive.is_some() || oom_policy.is_some() {
            feeder.running.cache.keep_history(1);
        }
        feeder.oom_policy = oom_policy;
        Ok(generation)
    }

    /// The next step; `None` after the last, and after an error.
    ///
    /// A future that is dropped in the middle of a step ends the generation.
    pub async fn next_step(&mut self) -> Option<Result<Step>> {
        if self.over {
            return None;
        }
        read_back::yield_now().await;
        self.make_step().await
    }

    /// See [`next_step`](Self::next_step). Other tasks run only where a step is made in several pieces.
    async fn make_step(&mut self) -> Option<Result<Step>> {
        if self.over {
            return None;
        }
        self.over = true;
        self.clock.start();
        let mut emptied = false;
        let chosen = loop {
            let chosen = match self.assisted {
                Some(_) => self.choose_assisted().await,
                None if self.contrastive.is_some() => self.choose_contrastive().await,
                None if self.on_device() => self.choose_on_device().await,
                None => self.choose_on_host().await,
            };
            let lost = self.feeder.lost || self.guidance.as_ref().is_some_and(Guidance::is_lost);
            match (chosen, self.feeder.refusals.none_since()) {
                (Err(error), Err(refused)) if !matches!(error, Error::DeviceLost(_)) => {
                    if let Err(error) = self.begin_again(refused, true).await {
                        break Err(error);
                    }
                }
                (Err(error), Ok(())) if lost && !matches!(error, Error::DeviceLost(_)) => {
                    if let Err(error) = self.begin_again(error, false).await {
                        emptied = true;
                        break Err(error);
                    }
                }
                (chosen, _) => break chosen,
            }
        };
        let step = chosen.and_then(|chosen| self.deliver(chosen));
        match &step {
            Ok(step) if step.finished.iter().all(|&finished| finished) => self.settle(),
            Ok(_) => self.over = false,
            Err(error) => {
                if matches!(error, Error::Execution(_) | Error::DeviceLost(_)) && !emptied {
                    self.feeder.running.cache.poison();
                }
                self.forget_what_was_refused();
            }
        }
        Some(step)
    }

    pub fn settings(&self) -> &Settings {
        &self.options.settings
    }

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Settings that the device has no kernel for. The scores of each step are read back for them; empty where the device
    /// chooses the tokens, and on the CPU.
    pub fn processed_on_host(&self) -> Vec<&'static str> {
        let Options { settings, kernels, grammar, .. } = &self.options;
        match kernels.as_ref().is_some_and(|kernels| kernels.path().is_on_gpu()) {
            true if self.options.likeliest_wanted().is_some() => Vec::new(),
            true if settings.needs_host() || grammar.is_some() => {
                settings.on_host().into_iter().chain(grammar.as_ref().map(Matcher::name)).collect()
            }
            true => settings.processors.on_device(settings.do_sample).err().unwrap_or_default(),
            false => Vec::new(),
        }
    }

    /// The cache, for questions about it. It may be a step ahead.
    pub fn cache(&self) -> &ModelCache {
        &self.feeder.running.cache
    }

    /// The prompt of a row and the tokens so far, without padding; `None` where there is no such row.
    pub fn tokens(&self, row: usize) -> Option<&[TokenId]> {
        self.rows.get(row).map(|row| &row.ids[..])
    }

    /// Tokens of each row that were generated.
    pub fn generated(&self) -> usize {
        self.delivered
    }

    /// Why a row ended; `None` while it goes on, and where there is no such row.
    pub fn stop_reason(&self, row: usize) -> Option<StopReason> {
        self.rows.get(row)?.stopped
    }

    /// The sequences of each prompt so far: those to be returned, of a beam search the best first.
    pub fn completions(&self) -> Vec<Vec<Completion>> {
        let mut completions = self.search.completions(&self.rows, self.delivered, self.width);
        completions.iter_mut().for_each(|all| all.truncate(self.options.settings.num_return_sequences));
        completions
    }

    /// The tokens behind the first prompt that will not change any more. Of a beam search, those that all its sequences
    /// begin with.
    pub fn agreed(&self) -> Vec<TokenId> {
        let all = self.search.completions(&self.rows, self.delivered, self.width);
        let mut all = all.into_iter().next().unwrap_or_default().into_iter().map(|one| one.tokens);
        let first = all.next().unwrap_or_default();
        all.fold(first, |mut agreed, tokens| {
            let same = agreed.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
            agreed.truncate(same);
            agreed
        })
    }

    /// What was read. Where the device failed, what the cache holds may never have been written.
    fn trusted<T>(&mut self, read: Result<T>) -> Result<T> {
        if read.is_err() {
            self.feeder.running.cache.poison();
        }
        read
    }

    async fn feed(&mut self) -> Result<Output> {
        match std::mem::replace(&mut self.next, Next::Nothing) {
            Next::Prompt(batch) => {
                let logits = self.feeder.prefill(&batch, self.options.prefill_chunk).await?;
                self.feeder.widen(self.width)?;
                Ok(Output::Logits(repeated(logits, self.width)))
            }
            Next::Tokens(tokens, parents) => {
                parents.map_or(Ok(()), |parents| self.feeder.reorder(&parents))?;
                self.feeder.step(Some(tokens))
            }
            Next::OnDevice => self.feeder.step(None),
            Next::Nothing => {
                Err(Error::Execution("the generation was given up in the middle of a step".into()))
            }
        }
    }

    /// Ends the rows that chose to end.
    fn deliver(&mut self, chosen: Choice) -> Result<Step> {
        if chosen.tokens.len() != self.rows.len() {
            let (rows, got) = (self.rows.len(), chosen.tokens.len());
            return Err(Error::Execution(format!(
                "the model gave logits for {got} rows where {rows} were fed"
            )));
        }
        let tokens =
            chosen.tokens.into_iter().zip(&self.rows).map(|(id, row)| (!row.finished()).then_some(id));
        let tokens: Vec<Option<TokenId>> = tokens.collect();
        self.delivered += 1;
        if let Some(parents) = &chosen.parents {
            self.rows = parents.iter().map(|&parent| self.rows[parent].clone()).collect();
        }
        let out_of_time = self.clock.is_past(self.options.settings.max_time);
        let stopping = Stopping { options: &self.options, out_of_time };
        for (i, (token, row)) in tokens.iter().zip(&mut self.rows).enumerate() {
            if let Some(id) = token {
                row.ids.push(*id);
                self.stats.generated += 1;
                let state = row.state(self.delivered, self.limit);
                row.stopped = match &chosen.stopped {
                    Some(known) => known[i].or(out_of_time.then_some(StopReason::Time)),
                    None => self.search.stopped(i, &state, stopping),
                };
            }
        }
        self.clock.chosen(&mut self.stats);
        let finished = self.rows.iter().map(Row::finished).collect();
        let logits = self.options.keep_logits.then_some(chosen.logits);
        let scores = self.options.keep_scores.then_some(chosen.scores);
        Ok(Step { tokens, finished, parents: chosen.parents, logits, scores })
    }

    /// Has the cache forget what was fed ahead of what was delivered.
    fn settle(&mut self) {
        self.ahead = None;
        if self.forget_what_was_refused() {
            return;
        }
        if self.width > 1 {
            return self.keep_prompts();
        }
        if self.options.settings.contrastive.is_some() {
            return self.keep_chosen();
        }
        // Where a cache cannot be truncated, its `seq_len` tells.
        _ = self.forget_ahead();
    }

    /// Has the cache hold all that was delivered, but for the last token.
    fn forget_ahead(&mut self) -> Result<()> {
        let delivered = self.delivered.saturating_sub(1);
        let ends: Vec<usize> = self.rows.iter().map(|row| row.prompt_end + delivered).collect();
        let cache = &mut self.feeder.running.cache;
        // Tokens that were accepted and not delivered are forgotten in any case.
        let ends = if self.assisted.is_some() { cache.rewind_points(&ends) } else { ends };
        cache.truncate_rows(&ends)
    }
}

impl Generation<'_> {
    /// Has a cache that outlives the generation hold the prompts alone.
    fn keep_prompts(&mut self) {
        let ends: Vec<usize> = self.rows.iter().step_by(self.width).map(|row| row.prompt_end).collect();
        if matches!(self.feeder.running.cache, CacheHandle::Borrowed(_))
            && (self.feeder.narrow(ends.len()).is_err()
                || self.feeder.running.cache.truncate_rows(&ends).is_err())
        {
            self.feeder.running.cache.reset();
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Steps, as an iterator that blocks.
#[cfg(not(target_family = "wasm"))]
impl Iterator for Generation<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::block_on(self.next_step())
    }
}

#[cfg(not(target_family = "wasm"))]
impl std::iter::FusedIterator for Generation<'_> {}

/// Logits of each row, `width` times.
fn repeated(logits: Tensor<3>, width: usize) -> Tensor<3> {
    let [rows, one, vocab] = logits.dims();
    match width {
        1 => logits,
        _ => logits.reshape([rows, 1, one * vocab]).repeat_dim(1, width).reshape([rows * width, one, vocab]),
    }
}

#[cfg(test)]
pub(crate) mod tests;
