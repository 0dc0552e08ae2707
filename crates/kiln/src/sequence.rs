//! A cache that knows which tokens it holds, so that a conversation feeds only new ones.

use std::{iter::FusedIterator, path::Path, sync::Arc};

use futures_util::stream::{self, Stream};
use kiln_cache::Plan;
use kiln_core::{Error, Result, batch::Batch, model::TokenId, model_cache::ModelCache, read_back};
use kiln_generate::{
    Completion, Generating, Generation, Logprobs, Settings, Stats, Step, StopReason, Tokenizer,
};

use crate::{Model, saved::SavedCache, text};

/// The cache of one sequence, or of several that are continued together, with the tokens that were fed.
///
/// A [request](crate::Request::sequence) has all tokens every time, as `generate` of Transformers with a
/// cache, and computes only those that are not held. The tokens are kept here and never read from the cache,
/// which may have forgotten most of them.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{Model, Sequence};
///
/// let model = Model::load(folder)?;
/// let mut sequence = Sequence::new(&model, model.plan())?;
/// let first = model.generate("ROMEO:").max_new_tokens(9).sequence(&mut sequence).text()?;
///
/// // The longer prompt begins with what the sequence holds, so only the rest is computed.
/// let mut longer = sequence.tokens()[0].clone();
/// longer.extend(model.encode_more("\n\nJULIET:")?);
/// let second = model.generate(longer).max_new_tokens(9).sequence(&mut sequence).stream()?;
/// println!("{first} .. {} tokens reused", second.reuse().reused);
/// # Ok::<(), kiln::Error>(())
/// ```
#[derive(Debug)]
pub struct Sequence {
    cache: ModelCache,
    held: Held,
}

/// The tokens that a cache was fed, and those that it is about to be fed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Held {
    /// The tokens of each row without padding, in the order of feeding; the cache's `seq_lens` has the number
    /// of fed ones. A row that has ended is fed meaningless tokens, which are not included.
    rows: Vec<Vec<TokenId>>,
    left_pad: Vec<usize>,
}

/// How much of the requested tokens was reused. Padding is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reuse {
    /// Number of tokens that the cache held.
    pub reused: usize,
    /// Number of tokens that are fed.
    pub fed: usize,
    /// Number of tokens that the cache held and had to forget.
    pub forgotten: usize,
    /// Whether the cache was emptied because it could not forget only the tokens that differ.
    pub reset: bool,
}

impl Sequence {
    /// Creates an empty sequence for `model`.
    ///
    /// # Errors
    /// The errors of [`Model::cache`].
    pub fn new(model: &Model, plan: &Plan) -> Result<Self> {
        Ok(Self { cache: model.cache(plan)?, held: Held::default() })
    }

    /// A copy that costs nothing until one of the two continues: one prompt serves many continuations.
    pub fn snapshot(&self) -> Self {
        Self { cache: self.cache.snapshot(), held: self.held.clone() }
    }

    /// Writes the cache and its tokens to a file. `plan`: the plan that created the cache.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// # let file = tempfile::NamedTempFile::new().map_err(|e| kiln::Error::Execution(e.to_string()))?;
    /// # let path = file.path();
    /// use kiln::{Model, Sequence};
    ///
    /// let model = Model::load(folder)?;
    /// let mut sequence = Sequence::new(&model, model.plan())?;
    /// model.generate("Friends, Romans, countrymen").sequence(&mut sequence).prefill()?;
    /// sequence.save(&model, model.plan(), path)?;
    ///
    /// // In another program: nothing of the prompt but its last token is computed again.
    /// let mut sequence = Sequence::load(&model, model.plan(), path)?;
    /// let prompt = sequence.tokens()[0].clone();
    /// let text = model.generate(prompt).sequence(&mut sequence).max_new_tokens(9).text()?;
    /// # assert!(!text.is_empty());
    /// # Ok::<(), kiln::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Prompt`] for an empty sequence; the errors of [`Model::save_cache`].
    pub fn save(&mut self, model: &Model, plan: &Plan, path: &Path) -> Result<()> {
        if self.is_empty() {
            return Err(Error::Prompt { why: "nothing is held yet, so there is nothing to save".to_owned() });
        }
        model.save_cache(path, plan, &mut self.cache, &self.held.rows, &self.held.left_pad)
    }

    /// Reads a file of [`save`](Self::save).
    ///
    /// # Errors
    /// The errors of [`Model::load_cache`].
    pub fn load(model: &Model, plan: &Plan, path: &Path) -> Result<Self> {
        let SavedCache { cache, tokens, left_pad } = model.load_cache(path, plan)?;
        Ok(Self { cache, held: Held { rows: tokens, left_pad } })
    }

    /// All tokens of each row, including those that were chosen last and are not held yet.
    pub fn tokens(&self) -> &[Vec<TokenId>] {
        &self.held.rows
    }

    /// The tokens that are held, row by row; none if the cache remembers nothing.
    pub fn ids(&self) -> Vec<&[TokenId]> {
        (0..self.held.rows.len()).map(|row| self.row(row)).collect()
    }

    /// Number of tokens of the longest row that were fed, padding included, whether or not the cache still
    /// has them all.
    pub fn len(&self) -> usize {
        self.cache.seq_len()
    }

    /// Whether nothing was fed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The cache, read-only.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.cache.reset();
        self.held = Held::default();
    }

    /// Number of slots of each row that were fed, padding included.
    fn lens(&self) -> Vec<usize> {
        self.cache.seq_lens(self.held.rows.len())
    }

    fn row(&self, row: usize) -> &[TokenId] {
        let fed = self.lens().get(row).copied().unwrap_or(0);
        let fed = fed.saturating_sub(self.held.left_pad.get(row).copied().unwrap_or(0));
        self.held.rows.get(row).map_or(&[], |ids| ids.get(..fed).unwrap_or(ids))
    }

    /// Number of slots of each row that can stay if `rows` are to be held: those before the first token that
    /// differs, and at most all but one of `rows`.
    fn common(&self, rows: &[Vec<TokenId>]) -> Vec<usize> {
        let (pads, lens) = (&self.held.left_pad, self.lens());
        let ends: Vec<usize> = rows.iter().zip(pads).map(|(row, pad)| row.len() + pad).collect();
        let alike = |numbers: &[usize]| numbers.windows(2).all(|pair| pair[0] == pair[1]);
        if self.is_empty() || rows.len() != pads.len() {
            return vec![0; rows.len()];
        }
        let common = rows.iter().zip(pads).enumerate().map(|(i, (row, pad))| {
            let same = self.row(i).iter().zip(row).take_while(|(held, asked)| held == asked).count();
            (pad + same.min(row.len().saturating_sub(1))).min(lens[i])
        });
        let common: Vec<usize> = common.collect();
        // Rows stay at one length if they can: they are fed together.
        match alike(&lens) && alike(&ends) {
            true => vec![common.iter().min().copied().unwrap_or(0); rows.len()],
            false => common,
        }
    }

    /// Forgets the tokens that are not the beginning of `rows`, and at least their last token. Returns the
    /// number of tokens of the longest row that stay, padding included.
    ///
    /// A cache that cannot forget so much and no more forgets more, or everything.
    ///
    /// # Errors
    /// [`Error::Prompt`] for no row, or an empty row.
    pub fn rewind_to(&mut self, rows: &[Vec<TokenId>]) -> Result<usize> {
        self.rewind(rows, true).map(|_| self.len())
    }

    /// `keeps`: whether the held beginning of `rows` stays. If not, everything is forgotten.
    pub(crate) fn rewind(&mut self, rows: &[Vec<TokenId>], keeps: bool) -> Result<Reuse> {
        if rows.is_empty() || rows.iter().any(Vec::is_empty) {
            return Err(Error::Prompt { why: "the prompt is empty; give at least one token".into() });
        }
        let asked = rows.iter().map(Vec::len).sum::<usize>();
        let tokens = |sequence: &Self| sequence.ids().iter().map(|row| row.len()).sum::<usize>();
        let common = if keeps { self.common(rows) } else { vec![0; rows.len()] };
        let before = tokens(self);
        let stay: Vec<usize> = self.cache.rewind_points(&common);
        let reset = stay.iter().all(|&stay| stay == 0);
        if reset {
            self.reset();
        } else {
            self.cache.truncate_rows(&stay)?;
            for ((row, pad), stay) in self.held.rows.iter_mut().zip(&self.held.left_pad).zip(stay) {
                row.truncate(stay.saturating_sub(*pad));
            }
        }
        let reused = tokens(self);
        Ok(Reuse {
            reused,
            fed: asked - reused,
            forgotten: before - reused,
            reset: reset && common.iter().any(|&common| common > 0),
        })
    }

    /// # Errors
    /// [`Error::NotAContinuation`] unless `rows` begin with all held tokens and continue them.
    pub fn check_continued_by(&self, rows: &[Vec<TokenId>]) -> Result<()> {
        let held = self.lens();
        let differs = self.common(rows).into_iter().zip(&held).find(|(common, held)| common != *held);
        match differs {
            _ if rows.len() != held.len() && !self.is_empty() => {
                Err(Error::NotAContinuation { common: 0, held: self.len() })
            }
            Some((common, &held)) => Err(Error::NotAContinuation { common, held }),
            None => Ok(()),
        }
    }

    /// The tokens of `rows` that are not held, after [`rewind`](Self::rewind). From here on they count as
    /// fed.
    pub(crate) fn rest(
        &mut self,
        rows: &[Vec<TokenId>],
        settings: &Settings,
        model: &Model,
    ) -> Result<Batch> {
        if self.is_empty() {
            let batch = model.batch(rows, settings, &self.cache)?;
            self.held = Held { rows: rows.to_vec(), left_pad: batch.left_pad.clone() };
            return Ok(batch);
        }
        let fill = model.padding(settings);
        let rest = |((row, left), stay): ((&Vec<TokenId>, &usize), usize)| {
            let padding = std::iter::repeat_n(fill, left.saturating_sub(stay));
            padding.chain(row.iter().copied().skip(stay.saturating_sub(*left))).collect()
        };
        let rest: Vec<Vec<TokenId>> =
            rows.iter().zip(&self.held.left_pad).zip(self.lens()).map(rest).collect();
        self.held.rows = rows.to_vec();
        Ok(Batch { left_pad: self.held.left_pad.clone(), ..Batch::ragged(&rest, fill, model.device())? })
    }

    /// Sets the tokens of the sequence: the fed ones, and one more of each row.
    pub(crate) fn hold(&mut self, rows: Vec<Vec<TokenId>>) {
        self.held.rows = rows;
    }

    pub(crate) fn split(&mut self) -> (&mut ModelCache, &mut Held) {
        (&mut self.cache, &mut self.held)
    }
}

/// The steps of a generation: one token of each row at a time.
///
/// The iterator blocks; [`into_stream`](Self::into_stream) does not. A sequence that was given records the
/// chosen tokens, and stays valid if the steps are dropped at any time.
#[derive(Debug)]
pub struct Steps<'a> {
    generation: Generation<'a>,
    held: Option<&'a mut Held>,
    reuse: Reuse,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl<'a> Steps<'a> {
    pub(crate) fn new(
        generation: Generation<'a>,
        held: Option<&'a mut Held>,
        reuse: Reuse,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Self {
        // If a prompt has several rows, the sequence keeps the prompt alone.
        let held = held.filter(|_| generation.settings().width() == 1);
        Self { generation, held, reuse, tokenizer }
    }

    /// Makes the next step; `None` after the last, and after an error.
    ///
    /// Dropping the future in the middle of a step ends the generation.
    pub async fn next_step(&mut self) -> Option<Result<Step>> {
        let step = self.generation.next_step().await;
        if let Some(Ok(step)) = &step {
            self.hold_chosen(step);
        }
        step
    }

    /// Records the chosen tokens in the sequence.
    pub(crate) fn hold_chosen(&mut self, step: &Step) {
        for (row, token) in self.held.iter_mut().flat_map(|held| &mut held.rows).zip(&step.tokens) {
            row.extend(token);
        }
    }

    /// The steps as a [`Stream`] for async programs. It blocks its thread for one step at most.
    pub fn into_stream(self) -> impl Stream<Item = Result<Step>> + Send + Unpin + use<'a> {
        Box::pin(stream::unfold(self, async |mut steps| {
            let step = steps.next_step().await?;
            Some((step, steps))
        }))
    }

    /// The sequences of each prompt so far: `num_return_sequences` of them, the best first if there is a beam
    /// search.
    ///
    /// # Errors
    /// [`Error::Prompt`] if the tokenizer cannot decode.
    pub fn completions(&self) -> Result<Vec<Vec<Completion>>> {
        let mut completions = self.generation.completions();
        let Some(tokenizer) = &self.tokenizer else { return Ok(completions) };
        let settings = self.settings();
        for (prompt, completions) in completions.iter_mut().enumerate() {
            let row = self.tokens(prompt * settings.width()).unwrap_or_default();
            let before = &row[..row.len().saturating_sub(self.generation.generated())];
            for completion in completions {
                completion.text =
                    Some(text::of_completion(tokenizer, before, completion, settings.stop_strings())?);
            }
        }
        Ok(completions)
    }

    /// The best sequence of the first prompt.
    pub(crate) fn best(&self) -> Option<Completion> {
        self.generation.completions().into_iter().flatten().next()
    }

    /// The tokens after the first prompt that will not change any more; of a beam search, the common
    /// beginning of all sequences.
    pub fn agreed(&self) -> Vec<TokenId> {
        self.generation.agreed()
    }

    /// How much of the prompt was reused from the cache.
    pub fn reuse(&self) -> Reuse {
        self.reuse
    }

    /// Counts and times so far.
    pub fn stats(&self) -> Stats {
        self.generation.stats()
    }

    /// The settings of the generation, complete with defaults.
    pub fn settings(&self) -> &Settings {
        self.generation.settings()
    }

    /// The reason for which a row ended; `None` while it goes on, and if there is no such row.
    pub fn stop_reason(&self, row: usize) -> Option<StopReason> {
        self.generation.stop_reason(row)
    }

    /// The settings that the device has no kernel for, so that the scores of each step are read back. Always
    /// empty on the CPU.
    pub fn processed_on_host(&self) -> Vec<&'static str> {
        self.generation.processed_on_host()
    }

    /// The cache, read-only. It may be a step ahead.
    pub fn cache(&self) -> &ModelCache {
        self.generation.cache()
    }

    /// The prompt and the tokens so far of a row, without padding; `None` if there is no such row.
    pub fn tokens(&self, row: usize) -> Option<&[TokenId]> {
        self.generation.tokens(row)
    }

    pub(crate) fn take_prompt_logprobs(&mut self) -> Vec<Option<Logprobs>> {
        self.generation.take_prompt_logprobs()
    }
}

/// The tokens of a request in an engine.
impl Generating for Steps<'static> {
    type Output = Step;

    fn generation(&mut self) -> &mut Generation<'static> {
        &mut self.generation
    }

    fn take(&mut self, step: Step) -> Result<Option<Step>> {
        self.hold_chosen(&step);
        Ok(Some(step))
    }
}

/// Blocks until the next step is there. Native only.
impl Iterator for Steps<'_> {
    type Item = Result<Step>;

    fn next(&mut self) -> Option<Self::Item> {
        read_back::wait(async { self.next_step().await.transpose() }).transpose()
    }
}

impl FusedIterator for Steps<'_> {}
