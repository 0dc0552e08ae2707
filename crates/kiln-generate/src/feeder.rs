//! Feeding tokens to a model.

mod chunks;
mod decode;

use std::{iter, ops::Range, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::Batch,
    device_state::Refusals,
    layer::StepShape,
    model::{CausalModel, Logits},
    model_cache::{CacheState, ModelCache},
    read_back,
};

pub(crate) use self::decode::{Output, Wanted};
use self::{chunks::Remaining, decode::DecodeLoop};
use crate::{OomPolicy, cache_handle::CacheHandle, chooser::Chooser, engine::Kept, logprobs::PromptLogprobs};

/// The smallest number of prompt tokens of a row that is fed at a time, however little memory there is.
const SMALLEST_CHUNK: usize = 16;

/// Feeds `batch` to `model`, `chunk` tokens of each row at a time, or all at once. Returns the logits `[rows,
/// 1, vocab]` of the last tokens.
///
/// Chunks bound the memory that a long prompt takes while it is fed. They do not change the result: rotary
/// frequencies that depend on the length are chosen for the whole prompt, after the contents of `cache`. (A
/// Mamba-2 mixer whose steps have limits ignores them in a chunk of one token, as Transformers does.) A cache
/// that remembers nothing is fed everything with the last chunk.
///
/// # Errors
/// [`Error::Setting`] for chunks of 0 tokens; the errors of [`CausalModel::forward`].
pub async fn prefill(
    model: Arc<dyn CausalModel>,
    cache: &mut ModelCache,
    batch: &Batch,
    chunk: Option<usize>,
) -> Result<Tensor<3>> {
    checked_chunk(chunk)?;
    let device = batch.tokens.device();
    Feeder::new(model, cache, batch.left_pad.clone(), false, &device).prefill(batch, chunk).await
}

pub(crate) fn checked_chunk(chunk: Option<usize>) -> Result<()> {
    match chunk {
        Some(0) => Err(Error::Setting { name: "prefill_chunk", why: "is 0, must be at least 1".into() }),
        _ => Ok(()),
    }
}

/// A model and the cache of one batch, with the tokens that the cache did not keep.
#[derive(Debug)]
pub(crate) struct Feeder<'a> {
    pub(crate) model: Arc<dyn CausalModel>,
    pub(crate) cache: CacheHandle<'a>,
    /// Number of padding slots at the start of each row.
    pub(crate) left_pad: Vec<usize>,
    /// The kind of output that a pass gives.
    pub(crate) wanted: Wanted,
    /// The log-probabilities of the prompt, if they are [`Wanted`] or were.
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
    /// The latest fed tokens, if the cache does not hold them. They are fed again, before new ones.
    unseen: Option<Unseen>,
    /// The decode steps; `None` before the first.
    decode: Option<DecodeLoop>,
    /// Whether steps are captured.
    capture: bool,
    /// The chooser on the device; `None`: the host chooses.
    pub(crate) chooser: Option<Chooser>,
    /// The answer to an error of memory; `None`: the error ends the step.
    pub(crate) oom_policy: Option<Arc<dyn OomPolicy>>,
    /// Input of an encoder whenever the cache is empty.
    pub(crate) features: Option<Tensor<3>>,
    /// An empty cache of the same strategies, for when the cache is given away.
    spare: Option<ModelCache>,
    /// Numbers of tokens of a prompt at which the cache is copied, and the copies.
    pub(crate) keeps: Vec<usize>,
    pub(crate) kept: Vec<Kept>,
    /// Number of tokens that the sequence will reach, as the cache was told.
    reaches: usize,
    /// Numbers of allocations that devices had refused when the cache was last complete.
    pub(crate) refusals: Refusals,
    /// Whether a step was given up with its recording, and with it the contents of the cache.
    pub(crate) lost: bool,
}

impl<'a> Feeder<'a> {
    pub(crate) fn new(
        model: Arc<dyn CausalModel>,
        cache: impl Into<CacheHandle<'a>>,
        left_pad: Vec<usize>,
        capture: bool,
        device: &Device,
    ) -> Self {
        let refusals = Refusals::of_all(iter::once(device).chain(&model.further_devices()));
        Self {
            model,
            cache: cache.into(),
            left_pad,
            wanted: Wanted::Last,
            prompt_logprobs: None,
            unseen: None,
            decode: None,
            capture,
            chooser: None,
            oom_policy: None,
            features: None,
            spare: None,
            keeps: Vec::new(),
            kept: Vec::new(),
            reaches: 0,
            refusals,
            lost: false,
        }
    }

    /// Tells the cache that the sequence will reach `tokens` tokens.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.reaches = tokens;
        self.cache.reserve(tokens);
    }

    /// Forgets everything. The contents of the cache cannot be trusted, because the device refused an
    /// allocation or gave up a recording.
    pub(crate) fn start_over(&mut self) {
        (self.unseen, self.decode) = (None, None);
        self.keeps.clear();
        self.cache.discard();
        self.cache.keep_history(1);
        self.cache.reserve(self.reaches);
        self.refusals.forgive();
        // It may be given up again, for the same reason.
        self.capture &= !std::mem::take(&mut self.lost);
    }

    /// Fills the empty cache with `state`, and keeps the first `tokens` tokens of it. Returns whether that
    /// was possible; if not, the contents of the cache cannot be used.
    pub(crate) fn fill(&mut self, tokens: usize, state: CacheState) -> bool {
        let cache = &mut *self.cache;
        if cache.restore(state).is_err() || cache.rewind_point(tokens) != tokens {
            return false;
        }
        if cache.seq_len() == tokens {
            return true;
        }
        // Buffers are then as long as they are without the tokens that were forgotten.
        cache.truncate(tokens).and_then(|()| cache.save()).and_then(|state| cache.restore(state)).is_ok()
    }

    /// Copies the cache if it is to be kept at its length. A copy that fails is only missing.
    async fn keep(&mut self) {
        let tokens = self.cache.seq_len();
        if let Some(at) = self.keeps.iter().position(|&keep| keep == tokens) {
            self.keeps.swap_remove(at);
            // Boxed, because it is rare, and the compiler gives up on futures that are too deep.
            let copy = Box::pin(self.copy()).await;
            self.kept.extend(copy);
        }
    }

    /// Copies the cache; `None` if it holds nothing, cannot be copied, or may not have been written.
    pub(crate) async fn copy(&mut self) -> Option<Kept> {
        let tokens = self.cache.seq_len();
        // `fill` waits for the device where it goes back.
        let rewinds = read_back::CAN_WAIT && self.cache.rewind_point(1) == 1;
        let copy = self.cache.save_async().await.ok();
        let copy = copy.filter(|_| tokens > 0 && self.refusals.none_since().is_ok());
        copy.map(|state| Kept { tokens, state, rewinds })
    }

    /// Whether the cache holds all that was fed.
    pub(crate) fn remembers(&self) -> bool {
        self.unseen.is_none()
    }

    /// Keeps an empty cache of the same strategies, to begin again with if the cache that is given away is
    /// lost. There is none if the cache holds tokens, which could not be fed again.
    pub(crate) fn prepare_to_give(&mut self) {
        let is_empty = self.cache.rows().is_none() && !self.cache.is_conditioned();
        self.spare = is_empty.then(|| self.cache.snapshot());
    }

    /// Gives the cache away, until [`take_back`](Self::take_back). The feeder keeps an empty one.
    pub(crate) fn give_cache(&mut self) -> ModelCache {
        self.decode = None;
        let spare = self.spare.take().unwrap_or_else(|| ModelCache::new(Vec::new()));
        std::mem::replace(&mut *self.cache, spare)
    }

    /// Takes the cache back.
    pub(crate) fn take_back(&mut self, cache: ModelCache) {
        self.spare = Some(std::mem::replace(&mut *self.cache, cache));
    }

    /// Appends the rows of another cache, which holds all that they were fed.
    pub(crate) fn join(&mut self, cache: ModelCache, left_pad: Vec<usize>) -> Result<()> {
        self.decode = None;
        self.cache.join(cache)?;
        self.left_pad.extend(left_pad);
        Ok(())
    }

    /// Removes rows that follow each other, and returns them as a cache of their own.
    pub(crate) fn leave(&mut self, rows: Range<usize>) -> Result<ModelCache> {
        self.decode = None;
        let mut left = self.cache.leave(rows.start)?;
        self.left_pad.remove(rows.start);
        for _ in 1..rows.len() {
            let row = self.cache.leave(rows.start);
            self.left_pad.remove(rows.start);
            left.join(row?)?;
        }
        Ok(left)
    }

    /// Repeats each row of the cache `width` times, one after the other.
    pub(crate) fn widen(&mut self, width: usize) -> Result<()> {
        if width == 1 {
            return Ok(());
        }
        let rows = self.left_pad.len();
        if rows > 1 {
            self.cache.separate_rows(rows)?;
        }
        let parents: Vec<usize> = (0..rows).flat_map(|row| std::iter::repeat_n(row, width)).collect();
        self.reorder(&parents)
    }

    /// Keeps the first row of each of `prompts` prompts, which have equally many rows.
    pub(crate) fn narrow(&mut self, prompts: usize) -> Result<()> {
        let rows = self.left_pad.len();
        let firsts: Vec<usize> = (0..rows).step_by((rows / prompts.max(1)).max(1)).collect();
        if firsts.len() == rows { Ok(()) } else { self.reorder(&firsts) }
    }

    /// Rebuilds the batch: new row `i` is old row `parents[i]`.
    pub(crate) fn reorder(&mut self, parents: &[usize]) -> Result<()> {
        let Self { cache, left_pad, unseen, decode, .. } = self;
        cache.reorder(parents)?;
        let same_rows = parents.len() == left_pad.len();
        *left_pad = parents.iter().map(|&parent| left_pad[parent]).collect();
        if let Some(Unseen { tokens, skip }) = unseen {
            let rows: Vec<i32> = parents.iter().map(|&parent| parent as i32).collect();
            let rows = Tensor::from_data(TensorData::new(rows, [parents.len()]), &tokens.device());
            *tokens = tokens.clone().select(0, rows);
            *skip = parents.iter().map(|&parent| skip[parent]).collect();
        }
        match decode {
            // The buffers of the cache were replaced.
            Some(decode) if same_rows => decode.record_again(),
            decode => *decode = None,
        }
        Ok(())
    }

    /// See [`prefill`]; `chunk` is not 0. If hidden states are [`Wanted`], returns those of the whole batch,
    /// `[rows, tokens, hidden]`. Other tasks of an async runtime run between chunks.
    pub(crate) async fn prefill(&mut self, batch: &Batch, chunk: Option<usize>) -> Result<Tensor<3>> {
        let len = batch.len();
        self.cache.check_rows(batch.rows())?;
        if batch.skip.iter().any(|&skip| skip >= len) {
            return Err(Error::Prompt { why: "a row of the prompt has no token; give at least one".into() });
        }
        let began = self.cache.seq_lens(batch.rows());
        let mut chunk = chunk.unwrap_or(len);
        let all = matches!(self.wanted, Wanted::Hidden);
        let mut left = Remaining::new(batch, all);
        // A cache that remembers nothing is fed all earlier tokens again, so chunks save nothing.
        let mut at_once = self.unseen.is_some();
        loop {
            let limits = self.cache.at_once_by_row(batch.rows());
            let limit = |limit: usize| if at_once { len } else { limit.min(chunk).max(1) };
            let next = left.next(limits.into_iter().map(limit));
            let n = next.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
            let mut piece = batch.columns(&next);
            piece.horizon = began.iter().zip(&batch.skip).map(|(began, skip)| began + len - skip).collect();
            match self.feed(piece) {
                Ok(output) => {
                    self.keep().await;
                    let output = match &mut self.prompt_logprobs {
                        Some(logprobs) if matches!(self.wanted, Wanted::PromptLogprobs) => {
                            let end = next[0].end - batch.skip[0];
                            logprobs.take(output, end, &*self.model).await?
                        }
                        _ => output,
                    };
                    if let Some(output) = left.fed(next, output) {
                        if matches!(self.wanted, Wanted::PromptLogprobs) {
                            self.wanted = Wanted::Last;
                        }
                        return Ok(output);
                    }
                    if self.unseen.is_some() && !at_once {
                        (self.unseen, left, at_once) = (None, Remaining::new(batch, all), true);
                    }
                    read_back::yield_now().await;
                }
                Err(error) if self.can_answer(&error) => {
                    // The chunks are not those of other prompts any more.
                    self.keeps.clear();
                    if self.cache.is_poisoned() {
                        if began.iter().any(|&began| began > 0) {
                            return Err(error);
                        }
                        // The cache was empty before the prompt, so the prompt can be fed again.
                        self.cache.reset();
                        self.cache.reserve(self.reaches);
                        (self.unseen, left) = (None, Remaining::new(batch, all));
                    }
                    let may_shrink =
                        !at_once && self.unseen.is_none() && self.oom_policy.is_some() && n > SMALLEST_CHUNK;
                    match error {
                        Error::OutOfMemory { .. } if may_shrink => chunk = (n / 2).max(SMALLEST_CHUNK),
                        error => {
                            self.free_memory(error, n, n).map_err(|error| match self.smaller_chunk(n) {
                                Some(chunk) => error.advised(format!(
                                    "feed {chunk} prompt tokens at a time (`prefill_chunk`)"
                                )),
                                None => error,
                            })?
                        }
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The largest half, quarter and so on of `n` prompt tokens that there is memory for; `None` if there is
    /// none.
    fn smaller_chunk(&mut self, n: usize) -> Option<usize> {
        let Self { model, cache, left_pad, .. } = self;
        let mut fits = |chunk: &usize| {
            let step = StepShape {
                rows: left_pad.len(),
                tokens: *chunk,
                element: model.element_bytes(),
                last: false,
            };
            cache.make_room(&step, model.working_bytes(step.rows, *chunk)).is_ok()
        };
        let chunk = std::iter::successors(Some(n / 2), |chunk| Some(chunk / 2))
            .take_while(|&chunk| chunk > 0)
            .find(|chunk| fits(chunk));
        cache.recount();
        chunk
    }

    /// Whether the cache takes too much memory, and its contents are complete.
    fn can_answer(&self, error: &Error) -> bool {
        let too_much = matches!(error, Error::OutOfMemory { .. } | Error::BufferTooLarge { .. });
        too_much && self.refusals.none_since().is_ok()
    }

    /// Makes the cache take less memory, so that `n` tokens that did not fit can be fed again, `chunk` at a
    /// time.
    ///
    /// # Errors
    /// `error`, if nothing can be done about it.
    pub(crate) fn free_memory(&mut self, error: Error, n: usize, chunk: usize) -> Result<()> {
        let Some(policy) = self.oom_policy.clone() else { return Err(error) };
        let Self { model, cache, left_pad, .. } = self;
        let step = StepShape { rows: left_pad.len(), tokens: n, element: model.element_bytes(), last: false };
        let shrunk = policy.shrink(cache, &step, model.working_bytes(step.rows, chunk));
        if shrunk.is_err() {
            cache.poison();
        }
        match shrunk? {
            true => {
                cache.recount();
                Ok(())
            }
            false => Err(error),
        }
    }

    /// Feeds a token to every row. `tokens`: `[rows, 1]`; `None`: the tokens that the device chose in the
    /// step before.
    ///
    /// If the cache keeps nothing, the output is logits even if there is a chooser.
    pub(crate) fn step(&mut self, tokens: Option<Tensor<2, Int>>) -> Result<Output> {
        if let (Some(_), Some(tokens)) = (&self.unseen, &tokens) {
            return self
                .feed(Batch { horizon: Vec::new(), ..Batch::new(tokens.clone()) })
                .map(Output::Logits);
        }
        let mut decode = match (self.decode.take(), tokens) {
            (Some(mut decode), Some(tokens)) => {
                decode.give(tokens);
                decode
            }
            (Some(decode), None) => decode,
            (None, Some(tokens)) => DecodeLoop::new(&tokens, self),
            (None, None) => {
                return Err(Error::Execution("a step was asked for before a token was fed".into()));
            }
        };
        loop {
            let before = self.cache.seq_lens(self.left_pad.len());
            match decode.step(self) {
                Err(error) if self.can_answer(&error) => {
                    // A step may fail after its pass, when it is recorded.
                    if self.cache.truncate_rows(&before).is_err() {
                        return Err(error);
                    }
                    // A recording would hold on to buffers that are to be given up.
                    let tokens = decode.into_tokens();
                    self.free_memory(error, 1, 1)?;
                    decode = DecodeLoop::new(&tokens, self);
                }
                output => {
                    self.lost |= decode.is_lost();
                    self.decode = Some(decode);
                    return output;
                }
            }
        }
    }

    /// Feeds tokens after the prompt to a cache that remembers them. Returns the logits `[rows, tokens,
    /// vocab]` of all.
    pub(crate) fn check(&mut self, batch: &Batch) -> Result<Tensor<3>> {
        self.decode = None;
        loop {
            let Self { model, cache, .. } = self;
            match model.forward(batch, Logits::All, cache) {
                Err(error) if self.can_answer(&error) && !self.cache.is_poisoned() => {
                    self.free_memory(error, batch.len(), batch.len())?;
                }
                logits => return logits,
            }
        }
    }

    /// Feeds new tokens. Returns the logits `[rows, 1, vocab]` of the last, or other outputs that are
    /// [`Wanted`]. Hidden states are those of all tokens that were fed, including the unseen ones.
    fn feed(&mut self, new: Batch) -> Result<Tensor<3>> {
        let Self { model, cache, left_pad, wanted, .. } = self;
        let (tokens, skip) = match &self.unseen {
            Some(Unseen { tokens, skip }) => {
                let skip = skip.iter().zip(&new.skip).map(|(unseen, new)| unseen + new).collect();
                (Tensor::cat(vec![tokens.clone(), new.tokens], 1), skip)
            }
            None => (new.tokens, new.skip),
        };
        let features = self.features.clone().filter(|_| !cache.is_conditioned());
        let batch =
            Batch { tokens, skip, left_pad: left_pad.clone(), horizon: new.horizon, steps: None, features };
        let before = cache.seq_lens(batch.rows());
        let logits = model.forward(&batch, wanted.logits(), cache)?;
        let Batch { tokens, skip, .. } = batch;
        // The length of a cache that remembers nothing does not change.
        let remembered = cache.seq_lens(before.len()) != before;
        self.unseen = (!remembered).then_some(Unseen { tokens, skip });
        Ok(logits)
    }
}

/// Tokens that were fed to a cache that remembers nothing.
#[derive(Debug)]
struct Unseen {
    /// `[rows, tokens]`
    tokens: Tensor<2, Int>,
    /// Number of columns of each row that are not tokens.
    skip: Vec<usize>,
}
