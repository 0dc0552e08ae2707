//! How a model is run: from a prompt, or from what a sequence holds.

use std::sync::{Arc, atomic::Ordering};

use kiln_core::{Error, Result, batch::Batch, layer::StepShape, model::TokenId, model_cache::ModelCache};
use kiln_generate::{Generation, GenerationConfig, OomPolicy, Options, Settings, TextStream};

use super::Model;
use crate::{
    OnOutOfMemory,
    folder::SMALLEST_CHUNK,
    out_of_memory::{self, OffloadLayers, QuantizeLayers},
    sequence::{Continuation, Reuse, Sequence},
    text::{GeneratedText, RunOptions},
};

impl Model {
    /// Generates from one prompt, or from several of any lengths, token by token.
    ///
    /// `wanted` overrides what the folder says, field by field. Where `cache` holds something already, the prompts are what
    /// follows it.
    ///
    /// # Errors
    /// An empty prompt, ids outside the vocabulary, a prompt longer than the model's positions, impossible settings.
    pub fn generate<'a>(
        &'a self,
        cache: &'a mut ModelCache,
        prompts: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Generation<'a>> {
        if cache.seq_len() > 0 && prompts.len() > 1 {
            // The cache does not know how its rows were padded.
            let why =
                "several rows cannot be continued here; use a Sequence, which knows how they were padded";
            return Err(Error::Prompt { why: why.to_owned() });
        }
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let options = self.options(wanted, options, cache, prompts.len(), longest + cache.seq_len())?;
        let batch = self.batch(&prompts, &options.settings, cache)?;
        Generation::new(self.causal(), cache, batch, prompts, options)
    }

    /// Generates from all tokens of one row, or of several; `sequence` is fed those that it does not hold yet.
    ///
    /// Where it holds others, it forgets them first ([`Sequence::rewind_to`]).
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate).
    pub fn continue_from<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        rows: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Continuation<'a>> {
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        let options = self.options(wanted, options, sequence.cache(), rows.len(), longest)?;
        let reuse = sequence.rewind(&rows)?;
        let batch = sequence.rest(&rows, &options.settings, self)?;
        let (cache, held) = sequence.split();
        Ok(Continuation::new(Generation::new(self.causal(), cache, batch, rows, options)?, Some(held), reuse))
    }

    /// [`continue_from`](Self::continue_from), where nothing that is held may be forgotten.
    ///
    /// # Errors
    /// [`Error::NotAContinuation`] where `rows` do not begin with what is held, or do not go on.
    pub fn continue_exactly<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        rows: Vec<Vec<TokenId>>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<Continuation<'a>> {
        sequence.check_continued_by(&rows)?;
        self.continue_from(sequence, rows, wanted, options)
    }

    /// Feeds `rows` to `sequence` and generates nothing: the cache is ready for what follows them.
    ///
    /// Their last tokens are kept for the next generation, whose first token is chosen by them.
    ///
    /// # Errors
    /// Those of [`generate`](Self::generate); [`Error::Prompt`] for rows of one token, of which nothing would be fed.
    pub fn feed(
        &self,
        sequence: &mut Sequence,
        rows: Vec<Vec<TokenId>>,
        options: RunOptions,
    ) -> Result<Reuse> {
        let all_but_last = rows.iter().map(|row| row[..row.len().saturating_sub(1)].to_vec()).collect();
        if rows.iter().any(|row| row.len() < 2) {
            let why = "a prompt of one token leaves nothing to cache; give a longer one".to_owned();
            return Err(Error::Prompt { why });
        }
        // The token that is chosen is not fed, and is dropped.
        let one = GenerationConfig::new().max_new_tokens(1).do_sample(false).repetition_penalty(1.0);
        let mut generation = self.continue_from(sequence, all_but_last, &one, options)?;
        let reuse = generation.reuse();
        generation.try_for_each(|step| step.map(drop))?;
        drop(generation);
        sequence.hold(rows);
        Ok(reuse)
    }

    /// How to generate, once the cache holds `tokens` tokens of `rows` rows.
    fn options(
        &self,
        wanted: &GenerationConfig,
        options: RunOptions,
        cache: &ModelCache,
        rows: usize,
        tokens: usize,
    ) -> Result<Options> {
        let wanted = wanted.clone().merged_over(&self.generation);
        let mut settings = wanted.resolve()?;
        self.name_what_is_not_applied(&wanted, settings.do_sample);
        settings.max_new_tokens = settings.new_tokens(tokens)?;
        // The last token is not fed; without a limit nobody knows how many will be.
        let reaches = tokens.saturating_add(settings.max_new_tokens.unwrap_or(1).saturating_sub(1));
        let step = StepShape {
            rows,
            tokens: 0,
            element: self.dtype.size(),
            last: settings.max_new_tokens.is_some(),
        };
        out_of_memory::check_buffers(cache, reaches, &step, options.on_oom)?;
        let fits = |chunk: usize| {
            let working = self.causal.working_bytes(rows, chunk);
            out_of_memory::check(cache, reaches, &step, working, options.on_oom)
        };
        let prefill_chunk = match options.prefill_chunk {
            Some(chunk) => chunk,
            // As large as there is memory for beside the whole sequence.
            None => std::iter::successors(Some(self.largest_chunk(rows)), |chunk| Some(chunk / 2))
                .find(|&chunk| chunk <= SMALLEST_CHUNK || fits(chunk).is_ok())
                .map_or(SMALLEST_CHUNK, |chunk| chunk.max(SMALLEST_CHUNK)),
        };
        fits(prefill_chunk.min(SMALLEST_CHUNK))?;
        if let Some(room) = self.room(cache, tokens)? {
            match settings.max_new_tokens {
                None => settings.max_new_tokens = Some(room),
                // A cache that is too small is refused, not warned of.
                Some(asked) if asked > self.sizes.positions.saturating_sub(tokens) => {
                    tracing::warn!(asked, room, "generating beyond the positions the model was made for");
                }
                Some(_) => {}
            }
        }
        let oom_policy: Option<Arc<dyn OomPolicy>> = match options.on_oom {
            OnOutOfMemory::Fail => None,
            OnOutOfMemory::Offload => Some(Arc::new(OffloadLayers::new(self.device()))),
            OnOutOfMemory::Quantize => {
                Some(Arc::new(QuantizeLayers::new(self.causal.needs(), &self.kernels, self.device())))
            }
        };
        Ok(Options {
            oom_policy,
            settings,
            prefill_chunk: Some(prefill_chunk),
            lookahead: self.device.is_asynchronous(),
            keep_logits: options.keep_logits,
            keep_scores: options.keep_scores,
            kernels: Some(self.kernels.clone()),
            compile: self.device.is_asynchronous() && options.compile.unwrap_or(true),
        })
    }

    /// Warns of settings that change tokens in transformers and not here, once.
    fn name_what_is_not_applied(&self, wanted: &GenerationConfig, sampling: bool) {
        let names = wanted.not_applied(sampling);
        if !names.is_empty() && !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "kiln::generation",
                "not applied yet, so the tokens may differ from transformers': {}",
                names.join(", ")
            );
        }
    }

    /// The prompts of a new sequence. Shorter ones are padded, as transformers pads them; for a cache that takes no padding,
    /// rows are of different lengths.
    pub(crate) fn batch(
        &self,
        rows: &[Vec<TokenId>],
        settings: &Settings,
        cache: &ModelCache,
    ) -> Result<Batch> {
        let fill = self.padding(settings);
        match cache.admits(0, true) {
            Ok(()) => Batch::left_padded(rows, fill, self.device()),
            Err(_) => Batch::ragged(rows, fill, self.device()),
        }
    }

    /// Padding is hidden or skipped, so any id of the vocabulary does.
    pub(crate) fn padding(&self, settings: &Settings) -> TokenId {
        settings.pad_token_id.filter(|&id| (id as usize) < self.sizes.vocab).unwrap_or(0)
    }

    /// Tokens that may follow `held` tokens in `cache`; `None`: any number, positions stay below a bound.
    pub(crate) fn room(&self, cache: &ModelCache, held: usize) -> Result<Option<usize>> {
        if cache.is_endless() {
            return Ok(None);
        }
        let positions = self.sizes.positions;
        if held >= positions {
            return Err(Error::Prompt {
                why: format!(
                    "the prompt has {held} tokens and the model {positions} positions; shorten it by at least {}, or \
                     use a sink cache",
                    held + 1 - positions
                ),
            });
        }
        // The last token is not fed.
        let capacity = cache.capacity().map_or(usize::MAX, |capacity| capacity + 1);
        match capacity.checked_sub(held) {
            None | Some(0) => Err(Error::Full { capacity: capacity - 1, needed: held }),
            Some(left) => Ok(Some(left.min(positions - held))),
        }
    }

    /// Prompt tokens of `rows` rows that a forward pass takes within 32 MiB of activations, so that a long prompt needs
    /// hardly more memory than its keys and values.
    pub fn largest_chunk(&self, rows: usize) -> usize {
        const ACTIVATIONS: usize = 32 << 20;

        let a_token = self.sizes.token_bytes(self.dtype.size());
        let bytes = rows.max(1).saturating_mul(a_token).max(1);
        (ACTIVATIONS / bytes).clamp(16, 2048)
    }

    /// Generates text from one prompt, piece by piece; stop strings end it.
    pub fn generate_text<'a>(
        &'a self,
        cache: &'a mut ModelCache,
        prompt: Vec<TokenId>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<GeneratedText<'a>> {
        let stream = TextStream::after(self.tokenizer()?, &prompt)?;
        let generation = self.generate(cache, vec![prompt], wanted, options)?;
        let fed = generation.stats().prompt_tokens;
        GeneratedText::new(Continuation::new(generation, None, Reuse { fed, ..Reuse::default() }), stream)
    }

    /// The text of [`continue_from`](Self::continue_from) for one row, piece by piece; stop strings end it.
    pub fn continue_text<'a>(
        &'a self,
        sequence: &'a mut Sequence,
        ids: Vec<TokenId>,
        wanted: &GenerationConfig,
        options: RunOptions,
    ) -> Result<GeneratedText<'a>> {
        let stream = TextStream::after(self.tokenizer()?, &ids)?;
        GeneratedText::new(self.continue_from(sequence, vec![ids], wanted, options)?, stream)
    }
}
