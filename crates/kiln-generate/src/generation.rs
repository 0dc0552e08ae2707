//! The decode loop: a prompt goes in, tokens come out one step at a time (`_sample`, `_beam_search` and the
//! other loops of transformers' `GenerationMixin`).
//!
//! There are two ways to choose a token. If neither the caller nor a setting needs the scores on the host,
//! the device chooses the token and feeds it to the next step. The host reads the token, with
//! [`lookahead`](Options::lookahead) only after the next step was launched, so that the device never waits.
//! Otherwise, or if the device has no kernel that samples, the scores go to the host and the token goes back.
//! Both ways give the same tokens, unless a random number is within a rounding of the border between two
//! tokens (see [`crate::sampler`]).

mod assisted;
mod beams;
mod choice;
mod contrastive;
mod dola;
mod each_row;
mod guidance;
mod next;
mod options;
mod rows;
mod runner;
mod scores;
mod search;
mod step;

use std::sync::Arc;

use burn::tensor::Tensor;
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, TokenId},
    model_cache::{CacheState, ModelCache},
    read_back,
};

pub(crate) use self::runner::{JoiningRows, Reading};
pub use self::{
    assisted::{AssistedSettings, DraftModel, PromptLookup, Schedule},
    beams::{BeamSettings, EarlyStopping, ForceWord},
    contrastive::ContrastiveSettings,
    dola::DolaLayers,
    options::Options,
    step::Step,
};
use self::{
    choice::Choice,
    rows::{Row, Rows, Stopping},
    runner::Runner,
    search::Search,
    step::StepState,
};
use crate::{
    cache_handle::CacheHandle,
    completion::Completion,
    engine::{Kept, PrefixScope},
    feeder::checked_chunk,
    grammar::Matcher,
    logprobs::Logprobs,
    sampler::Sampler,
    settings::{Settings, setting},
    stats::{Stats, StatsRecorder},
    stopping::StopReason,
};

/// A running generation.
///
/// The generation ends when every row has ended ([`StopReason`]). The cache then holds the sequence without
/// its last token, which was never fed, as in transformers; the next prompt begins with that token. The same
/// is true if the generation is dropped earlier. If [lookahead](Options::lookahead) fed a token too many and
/// the cache cannot be truncated, the cache holds that token, too. After an unrecoverable out-of-memory error
/// the cache is empty. Check `seq_len` before feeding more.
///
/// Rows that have ended are still computed, with meaningless tokens.
///
/// If prompts have several rows (beams, or several sequences of a prompt), the cache holds only the prompts
/// at the end, or nothing if it cannot be truncated to them.
#[derive(Debug)]
pub struct Generation<'a> {
    rows: Rows,
    pub(crate) runner: Runner<'a>,
    search: Search,
    options: Options,
    recorder: StatsRecorder,
    /// Whether no step follows. Also true during a step: if its future is dropped, the generation is over.
    over: bool,
}

impl<'a> Generation<'a> {
    /// Prepares to continue `batch`. Nothing is computed yet.
    ///
    /// `cache` is borrowed or owned. It may hold the beginning of the rows; then `batch` is only the rest,
    /// and its `left_pad` still counts the padding of the whole rows. `prompts` are the whole rows on the
    /// host, without padding, for processors.
    ///
    /// # Errors
    /// [`Error::Prompt`] for an empty prompt, for rows that do not fit each other, and for ids that are not
    /// in the vocabulary; [`Error::Setting`] for settings that the model, the cache or the prompt does not
    /// support.
    pub fn new(
        model: Arc<dyn CausalModel>,
        cache: impl Into<CacheHandle<'a>>,
        batch: Batch,
        prompts: Vec<Vec<TokenId>>,
        mut options: Options,
    ) -> Result<Self> {
        checked_chunk(options.prefill_chunk)?;
        if !model.further_devices().is_empty() {
            // Logits are on another device than tokens, so tokens travel through the host.
            (options.kernels, options.lookahead, options.compile) = (None, false, false);
        }
        let cache = cache.into();
        let (settings, vocab) = (&options.settings, model.vocab());
        batch.check_features(model.features(), &cache)?;
        settings.processors.check(vocab)?;
        settings.beams.as_ref().map_or(Ok(()), |beams| beams.check_vocabulary(vocab))?;
        let before = cache.seq_lens(batch.rows());
        if settings.is_contrastive() && before.iter().any(|&before| before > 0) {
            let why = "needs the hidden states of all tokens, and the cache holds tokens already; give all tokens and an empty \
                       cache, or use a Sequence";
            return Err(setting("penalty_alpha", why));
        }
        if options.prompt_logprobs.is_some() {
            check_prompt_logprobs(&batch, &before, settings)?;
        }
        let rows = Rows::new(&batch, prompts, &before, settings, vocab)?;
        let padding = |(pad, before): (&usize, &usize)| pad.saturating_sub(*before);
        let padding: usize = batch.left_pad.iter().zip(&before).map(padding).sum();
        let skipped: usize = batch.skip.iter().sum();
        let prompt_tokens = batch.rows() * batch.len() - padding - skipped;
        let mut runner = Runner::new(model, cache, batch, &rows, &options)?;
        let sampler = settings.do_sample.then(|| Sampler::new(settings.seed)).transpose()?;
        let seed = sampler.as_ref().map(Sampler::seed);
        let stats = Stats { rows: rows.len(), prompt_tokens, seed, ..Stats::default() };
        let search = Search::new(&mut runner, &rows, &options, sampler)?;
        runner.feeder.chooser = search.chooser(&runner, &rows, &options)?;
        runner.reserve(&rows, &options)?;
        Ok(Self { rows, runner, search, options, recorder: StatsRecorder::new(stats), over: false })
    }

    /// Adds a draft model, for assisted decoding. To be called before the first step.
    ///
    /// # Errors
    /// [`Error::Setting`] for a draft model of another vocabulary whose tokenizer is not known, for settings
    /// that ask for prompt lookup or several rows of a prompt, and for a cache that cannot forget tokens.
    pub fn with_draft(mut self, draft: DraftModel) -> Result<Self> {
        let seed = self.recorder.stats.seed;
        self.search.with_draft(draft, seed, &mut self.runner, &self.rows, &self.options)?;
        Ok(self)
    }

    /// Makes the next step; `None` after the last, and after an error. Other tasks of the async runtime can
    /// run before each step, and between the chunks of a prompt.
    ///
    /// Dropping the future in the middle of a step ends the generation.
    pub async fn next_step(&mut self) -> Option<Result<Step>> {
        if self.over {
            return None;
        }
        read_back::yield_now().await;
        self.make_step().await
    }

    pub fn settings(&self) -> &Settings {
        &self.options.settings
    }

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.recorder.stats
    }

    /// Names of the settings that the device has no kernel for, because of which the scores of each step are
    /// read back. Empty if the device chooses the tokens, on the CPU, and with blocks on several devices.
    pub fn processed_on_host(&self) -> Vec<&'static str> {
        let Options { settings, kernels, grammar, .. } = &self.options;
        match kernels.as_ref().is_some_and(|kernels| kernels.implementation().is_on_gpu()) {
            true if self.options.likeliest_wanted().is_some() => Vec::new(),
            true if settings.needs_host() || grammar.is_some() => {
                settings.on_host().into_iter().chain(grammar.as_ref().map(Matcher::name)).collect()
            }
            true => settings.processors.on_device(settings.do_sample).err().unwrap_or_default(),
            false => Vec::new(),
        }
    }

    /// The cache, read-only. With [lookahead](Options::lookahead) it may already hold the token of the next
    /// step.
    pub fn cache(&self) -> &ModelCache {
        self.runner.cache()
    }

    /// The prompt and the tokens so far of a row, without padding; `None` if there is no such row.
    pub fn tokens(&self, row: usize) -> Option<&[TokenId]> {
        self.rows.list.get(row).map(|row| &row.ids[..])
    }

    /// Number of steps so far: the number of generated tokens of each row that has not ended.
    pub fn generated(&self) -> usize {
        self.rows.delivered
    }

    /// The reason for which a row ended; `None` while it goes on, and if there is no such row.
    pub fn stop_reason(&self, row: usize) -> Option<StopReason> {
        self.rows.list.get(row)?.stopped
    }

    /// Takes the log-probabilities of the tokens of the prompt ([`Options::prompt_logprobs`]). They are there
    /// after the first step; the first token has none, because it follows nothing.
    pub fn take_prompt_logprobs(&mut self) -> Vec<Option<Logprobs>> {
        self.runner.feeder.prompt_logprobs.take().map_or_else(Vec::new, |logprobs| logprobs.found)
    }

    /// The completions of each prompt so far, at most `num_return_sequences` of each. Those of a beam search
    /// are sorted, the best first.
    pub fn completions(&self) -> Vec<Vec<Completion>> {
        let mut completions = self.search.completions(&self.rows);
        completions.iter_mut().for_each(|all| all.truncate(self.options.settings.num_return_sequences));
        completions
    }

    /// The generated tokens of the first prompt that later steps cannot change: the common beginning of its
    /// sequences, of which a beam search may still discard some.
    pub fn agreed(&self) -> Vec<TokenId> {
        let all = self.search.completions(&self.rows);
        let mut all = all.into_iter().next().unwrap_or_default().into_iter().map(|one| one.tokens);
        let first = all.next().unwrap_or_default();
        all.fold(first, |mut agreed, tokens| {
            let same = agreed.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
            agreed.truncate(same);
            agreed
        })
    }
}

/// # Errors
/// [`Error::Setting`] where the log-probabilities of a prompt cannot be told.
fn check_prompt_logprobs(batch: &Batch, before: &[usize], settings: &Settings) -> Result<()> {
    let why = if batch.rows() > 1 || settings.width() > 1 {
        "are told of one prompt and one sequence; give no other prompts, and leave out beams"
    } else if settings.is_contrastive() || settings.dola_layers.is_some() {
        "do not go with `penalty_alpha` and `dola_layers`; leave these out"
    } else if before.iter().any(|&before| before > 0) {
        "need a cache that is empty, and this one holds tokens of the prompt already"
    } else {
        return Ok(());
    };
    Err(setting("prompt_logprobs", why))
}

/// The loop.
impl Generation<'_> {
    /// Makes a step as [`next_step`](Self::next_step) does, but lets other tasks of the async runtime run
    /// only between the chunks of a prompt, not before the step.
    ///
    /// If the device refused an allocation, or lost a step together with its recording (the captured launches
    /// that a replay repeats), feeds the cache again and retries.
    async fn make_step(&mut self) -> Option<Result<Step>> {
        if self.over {
            return None;
        }
        self.over = true;
        self.recorder.start();
        let mut emptied = false;
        let chosen = loop {
            let chosen = self.choose().await;
            match (chosen, self.runner.none_refused()) {
                (Err(error), Err(refused)) if !matches!(error, Error::DeviceLost(_)) => {
                    if let Err(error) = self.begin_again(refused, true).await {
                        break Err(error);
                    }
                }
                (Err(error), Ok(())) if self.runner.is_lost() && !matches!(error, Error::DeviceLost(_)) => {
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
                    self.runner.poison();
                }
                self.runner.forget_refused();
            }
        }
        Some(step)
    }

    async fn choose(&mut self) -> Result<Choice> {
        let Self { rows, runner, search, options, recorder, .. } = self;
        search.choose(&mut StepState { runner, rows, options, recorder }).await
    }

    /// Empties the cache and feeds all tokens again, after an error that leaves nothing to trust in the
    /// cache. `for_memory`: whether the error is a refused allocation; the tokens are then fed in smaller
    /// chunks, or to a cache that takes less memory. Otherwise a recording was lost, and the launches of
    /// later steps are not recorded.
    ///
    /// # Errors
    /// `error`, if the tokens cannot be fed again, or if there is no way to take less memory. The cache is
    /// then empty, and can be used.
    async fn begin_again(&mut self, error: Error, for_memory: bool) -> Result<()> {
        let Self { rows, runner, search, options, .. } = self;
        search.start_over();
        runner.start_over();
        if !rows.complete {
            return Err(error);
        }
        if for_memory {
            runner.make_room(error, rows)?;
        }
        runner.feeder.chooser = search.chooser(runner, rows, options)?;
        runner.feed_again(rows).await?;
        search.catch_up(runner, rows)
    }

    /// Appends the chosen tokens to the rows, marks the rows that are finished, and makes the step for the
    /// caller. In a beam search, each row first becomes a copy of its parent.
    ///
    /// # Errors
    /// [`Error::Execution`] if the number of tokens is not the number of rows.
    fn deliver(&mut self, chosen: Choice) -> Result<Step> {
        let Self { rows, search, options, recorder, .. } = self;
        if chosen.tokens.len() != rows.len() {
            let (rows, got) = (rows.len(), chosen.tokens.len());
            return Err(Error::Execution(format!(
                "the model gave logits for {got} rows where {rows} were fed"
            )));
        }
        let tokens =
            chosen.tokens.into_iter().zip(&rows.list).map(|(id, row)| (!row.finished()).then_some(id));
        let tokens: Vec<Option<TokenId>> = tokens.collect();
        rows.delivered += 1;
        if let Some(parents) = &chosen.parents {
            rows.list = parents.iter().map(|&parent| rows.list[parent].clone()).collect();
        }
        let out_of_time = recorder.is_past(options.settings.max_time);
        let stopping = Stopping { options, out_of_time };
        for (i, (token, row)) in tokens.iter().zip(&mut rows.list).enumerate() {
            if let Some(id) = token {
                row.ids.push(*id);
                recorder.stats.generated += 1;
                let state = row.state(rows.delivered, rows.limit);
                row.stopped = match &chosen.stopped {
                    Some(known) => known[i].or(out_of_time.then_some(StopReason::Time)),
                    None => search.stopped(i, &state, stopping),
                };
            }
        }
        recorder.chosen();
        let finished = rows.list.iter().map(Row::finished).collect();
        let logits = options.keep_logits.then_some(chosen.logits);
        let scores = options.keep_scores.then_some(chosen.scores);
        Ok(Step { tokens, finished, parents: chosen.parents, logits, scores })
    }

    /// Makes the cache forget the tokens that were fed before they were delivered.
    fn settle(&mut self) {
        self.runner.drop_ahead();
        if !self.runner.forget_refused() {
            self.search.settle(&mut self.runner, &self.rows);
        }
    }
}

/// The steps of a generation as the engine calls them: it computes one forward pass for several generations.
impl Generation<'_> {
    /// Whether the next step can share a forward pass with other generations: it feeds one token per row,
    /// after the row's own tokens, and nothing else.
    pub(crate) fn can_join(&self) -> bool {
        !self.over && self.rows.delivered > 0 && self.search.is_by_row() && self.runner.can_join(&self.rows)
    }

    /// Gives the rows to a shared pass, if they [can join](Self::can_join) one.
    pub(crate) fn give_rows(&mut self) -> JoiningRows {
        self.runner.feed_last(&self.rows);
        self.runner.give_rows()
    }

    /// Whether its own passes draft tokens, which changes none of them.
    pub(crate) fn may_draft(&self) -> bool {
        self.search.may_draft()
    }

    /// The prompt, and the scope in which it may begin with another one's cache; `None` if it may not, or is
    /// under way.
    pub(crate) fn sharable_prompt(&self) -> Option<(PrefixScope, Vec<TokenId>)> {
        let is_one = matches!(&self.rows.list[..], [row] if row.left_pad == 0) && self.rows.complete;
        let may = is_one && self.search.is_by_row() && self.runner.is_unfed();
        self.prefix_scope().filter(|_| may && self.rows.delivered == 0)
    }

    /// The prompt, and its scope.
    pub(crate) fn prefix_scope(&self) -> Option<(PrefixScope, Vec<TokenId>)> {
        let Options { prefix_scope: Some(name), prefill_chunk: Some(chunk), .. } = &self.options else {
            return None;
        };
        let row = self.rows.list.first()?;
        Some((PrefixScope { name: name.clone(), chunk: *chunk }, row.ids.get(..row.prompt)?.to_vec()))
    }

    /// Begins with a cache that holds at least the first `tokens` tokens of the prompt. `is_answer`: decode
    /// steps wrote a part of it. Returns whether that is possible; nothing has changed otherwise.
    pub(crate) fn begin_after(&mut self, tokens: usize, state: CacheState, is_answer: bool) -> bool {
        if !self.runner.begin_after(tokens, state, &self.rows, &self.options) {
            return false;
        }
        let stats = &mut self.recorder.stats;
        (stats.prompt_tokens, stats.reused) = (stats.prompt_tokens - tokens, tokens);
        stats.reused_answer = is_answer;
        true
    }

    /// Copies the cache with the prompt and the answer, and tells their tokens and scope; `None` if no prompt
    /// could begin with them, or the cache cannot be copied.
    pub(crate) fn copy_with_answer(&mut self) -> Option<(PrefixScope, Vec<TokenId>, Kept)> {
        let [row] = &self.rows.list[..] else { return None };
        let is_plain = self.search.is_by_row() && row.left_pad == 0;
        let (scope, _) = self.prefix_scope().filter(|_| is_plain)?;
        let kept = read_back::wait(async { Ok(self.runner.feeder.copy().await) }).ok()??;
        Some((scope, row.ids.get(..kept.tokens)?.to_vec(), kept))
    }

    /// Forgets the cache and its beginning, before any token was chosen: the prompt is fed from its first
    /// token.
    pub(crate) fn begin_anew(&mut self) {
        self.runner.give_up_cache();
        self.runner.feed_prompt(&self.rows);
        // The error that led here is answered.
        self.over = false;
        let stats = &mut self.recorder.stats;
        (stats.prompt_tokens, stats.reused) = (stats.prompt_tokens + stats.reused, 0);
        stats.reused_answer = false;
    }

    /// Copies the cache whenever it holds one of these numbers of tokens of the prompt.
    pub(crate) fn keep_beginnings(&mut self, tokens: Vec<usize>) {
        self.runner.feeder.keeps = tokens;
    }

    /// Takes the copies.
    pub(crate) fn take_beginnings(&mut self) -> Vec<Kept> {
        std::mem::take(&mut self.runner.feeder.kept)
    }

    /// Number of rows that a pass of this generation has.
    pub(crate) fn fed_rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether every row has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.rows.finished()
    }

    /// Whether decode steps may be captured.
    pub(crate) fn captures(&self) -> bool {
        self.options.compile
    }

    /// Takes the part of this generation, `[rows, 1, vocab]`, in the logits of a shared pass, and starts to
    /// read the next tokens, or the scores that the host chooses them by.
    pub(crate) fn start_step(&mut self, logits: Tensor<3>) -> Result<Reading> {
        self.over = true;
        self.recorder.start();
        self.runner.start_shared_step(logits, &self.options)
    }

    /// Chooses the next token of each row, after [`start_step`](Self::start_step).
    ///
    /// # Errors
    /// [`Error::Execution`] if this generation is not one that can [share a pass](Self::can_join); errors of
    /// the device.
    pub(crate) async fn finish_step(&mut self, reading: Reading) -> Result<Step> {
        let Self { rows, runner, search, options, recorder, .. } = self;
        let Some(each) = search.each_row() else {
            return Err(Error::Execution("rows of another search share a pass".into()));
        };
        let chosen = each.choose_from(reading, &mut StepState { runner, rows, options, recorder }).await?;
        let step = self.deliver(chosen)?;
        self.over = self.rows.finished();
        Ok(step)
    }

    /// Empties the cache and feeds all tokens again. If no step was delivered before, also makes the first
    /// one and returns it.
    ///
    /// # Errors
    /// `error`, if the cache cannot be filled again; then the generation is over.
    pub(crate) async fn resume(&mut self, error: Error) -> Result<Option<Step>> {
        self.over = true;
        self.begin_again(error, false).await?;
        self.over = false;
        if self.rows.delivered > 0 { Ok(None) } else { self.continue_alone().await }
    }

    /// Makes a step in forward passes of this generation alone; `None` if the generation is over.
    pub(crate) async fn continue_alone(&mut self) -> Result<Option<Step>> {
        self.make_step().await.transpose()
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}

/// Steps, as an iterator that blocks.
impl Iterator for Generation<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::wait(async { self.next_step().await.transpose() }).transpose()
    }
}

impl std::iter::FusedIterator for Generation<'_> {}

#[cfg(test)]
pub(crate) mod tests;
