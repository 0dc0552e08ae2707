//! How a model is run: from a prompt, or from what a sequence holds.

use std::sync::Arc;

use kiln_core::{Error, Result, batch::Batch, layer::Feed, model::TokenId, model_cache::ModelCache};
use kiln_generate::{Generation, GenerationConfig, Options, Rescue, Settings, TextStream};

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
        let batch = Batch::left_padded(&prompts, self.padding(&options.settings), self.device())?;
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
        let batch = sequence.rest(&rows, self.padding(&options.settings), self)?;
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

    /// How to generate, once the cache holds `tokens` tokens of `rows` rows.
    fn options(
        &self,
        wanted: &GenerationConfig,
        options: RunOptions,
        cache: &ModelCache,
        rows: usize,
        tokens: usize,
    ) -> Result<Options> {
        let mut settings = wanted.clone().merged_over(&self.generation).resolve()?;
        settings.max_new_tokens = settings.new_tokens(tokens)?;
        let prefill_chunk = options.prefill_chunk.unwrap_or_else(|| self.largest_chunk(rows));
        // The last token is not fed; without a limit nobody knows how many will be.
        let reaches = tokens.saturating_add(settings.max_new_tokens.unwrap_or(1).saturating_sub(1));
        let (element, fewest) = (self.dtype.size(), prefill_chunk.min(SMALLEST_CHUNK));
        let feed = Feed { rows, tokens: 0, element, last: settings.max_new_tokens.is_some() };
        out_of_memory::check_buffers(cache, reaches, &feed, options.on_oom)?;
        out_of_memory::check(cache, reaches, &feed, self.causal.working_bytes(rows, fewest), options.on_oom)?;
        if let Some(room) = self.room(cache, tokens)? {
            match settings.max_new_tokens {
                None => settings.max_new_tokens = Some(room),
                Some(asked) if asked > room => {
                    tracing::warn!(asked, room, "generating beyond the positions the model was made for");
                }
                Some(_) => {}
            }
        }
        let rescue: Option<Arc<dyn Rescue>> = match options.on_oom {
            OnOutOfMemory::Fail => None,
            OnOutOfMemory::Offload => Some(Arc::new(OffloadLayers::new(self.device()))),
            OnOutOfMemory::Quantize => {
                Some(Arc::new(QuantizeLayers::new(self.causal.needs(), &self.kernels, self.device())))
            }
        };
        Ok(Options {
            rescue,
            settings,
            prefill_chunk: Some(prefill_chunk),
            lookahead: self.device.is_asynchronous(),
            keep_logits: options.keep_logits,
            keep_scores: options.keep_scores,
            kernels: Some(self.kernels.clone()),
            compile: self.device.is_asynchronous() && options.compile.unwrap_or(true),
        })
    }

    /// Padding is hidden, so any id of the vocabulary does.
    fn padding(&self, settings: &Settings) -> TokenId {
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
