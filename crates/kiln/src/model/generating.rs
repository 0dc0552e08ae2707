//! The parameters of a generation: settings completed from the model folder, chunks that fit into memory,
//! padding.

use std::sync::{Arc, PoisonError, atomic::Ordering};

use kiln_core::{Error, Result, batch::Batch, layer::StepShape, model::TokenId, model_cache::ModelCache};
use kiln_generate::{GenerationConfig, OomPolicy, Options, Settings, TokenTable};
use kiln_kernels::device::{DeviceClass, Opened};

use super::Model;
use crate::{
    OnOutOfMemory,
    folder::SMALLEST_CHUNK,
    out_of_memory::{self, OffloadLayers, QuantizeLayers},
};

impl Model {
    /// Completes `options` for `rows` rows of `tokens` tokens each in `cache`, with the limits that follow
    /// from them and the properties of the model and its device.
    ///
    /// # Errors
    /// [`Error::TooLong`] and [`Error::Full`] for rows that are too long; [`Error::OutOfMemory`] and
    /// [`Error::BufferTooLarge`] if the sequence cannot fit.
    pub(crate) fn fitted(
        &self,
        options: Options,
        on_oom: OnOutOfMemory,
        cache: &ModelCache,
        rows: usize,
        tokens: usize,
    ) -> Result<Options> {
        let Options { mut settings, .. } = options;
        let limit = settings.new_tokens(tokens)?;
        // Prompts are computed once, however many rows each of them becomes.
        let width = settings.fed_rows();
        // Without a limit, the number of tokens is unknown.
        let reaches = tokens.saturating_add(settings.fed(limit.unwrap_or(1)));
        let step = StepShape {
            rows: rows.saturating_mul(width),
            tokens: 0,
            element: self.loaded.dtype.size(),
            last: limit.is_some(),
        };
        out_of_memory::check_buffers(cache, reaches, &step, on_oom)?;
        let fits = |chunk: usize| {
            let causal = &self.loaded.causal;
            let working = causal.working_bytes(rows, chunk).max(causal.working_bytes(step.rows, 1));
            out_of_memory::check(cache, reaches, &step, working, on_oom)
        };
        let prefill_chunk = match options.prefill_chunk {
            Some(chunk) => chunk,
            // The largest chunk for which there is memory next to the whole sequence.
            None => std::iter::successors(Some(self.largest_chunk(rows)), |chunk| Some(chunk / 2))
                .find(|&chunk| chunk <= SMALLEST_CHUNK || fits(chunk).is_ok())
                .map_or(SMALLEST_CHUNK, |chunk| chunk.max(SMALLEST_CHUNK)),
        };
        fits(prefill_chunk.min(SMALLEST_CHUNK))?;
        let room = self.room(cache, tokens)?.map(|room| match cache.capacity() {
            Some(capacity) if settings.is_contrastive() => room.min(capacity.saturating_sub(tokens)).max(1),
            _ => room,
        });
        if let (Some(asked), Some(room)) = (limit, room)
            // A cache that is too small is an error, not a warning.
            && asked > self.loaded.sizes.positions.saturating_sub(tokens)
        {
            tracing::warn!(asked, room, "generating beyond the positions the model was made for");
        }
        if let Some(limit) = limit.or(room) {
            settings.set_max_new_tokens(limit);
        }
        let oom_policy: Option<Arc<dyn OomPolicy>> = match on_oom {
            OnOutOfMemory::Fail => None,
            OnOutOfMemory::Offload => Some(Arc::new(OffloadLayers::new(self.loaded.placement.clone()))),
            OnOutOfMemory::Quantize => {
                let needs = self.loaded.causal.needs();
                Some(Arc::new(QuantizeLayers::new(needs, self.loaded.placement.clone())))
            }
        };
        let is_asynchronous = self.opened().is_asynchronous();
        Ok(Options {
            settings,
            prefill_chunk: Some(prefill_chunk),
            oom_policy,
            lookahead: is_asynchronous,
            compile: options.compile && self.loaded.captures && is_asynchronous,
            kernels: Some(self.kernels().clone()),
            ..options
        })
    }

    /// The table of the tokenizer that grammars need, for texts that end with one of these tokens. The table
    /// is kept for the next request.
    ///
    /// # Errors
    /// [`Error::Prompt`] without a tokenizer; [`Error::Setting`] for a tokenizer that grammars do not
    /// support, and if no token ends a text.
    pub(crate) fn token_table(&self, eos: &[TokenId]) -> Result<Arc<TokenTable>> {
        let tokenizer = self.tokenizer()?;
        if eos.is_empty() {
            let why =
                "is not known, and a text that matches a grammar ends with such a token; set it".to_owned();
            return Err(Error::Setting { name: "eos_token_id", why });
        }
        let mut kept = self.loaded.token_table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = kept.as_ref().filter(|table| table.eos() == eos) {
            return Ok(table.clone());
        }
        let table = Arc::new(TokenTable::new(tokenizer.clone(), self.loaded.sizes.vocab, eos)?);
        *kept = Some(table.clone());
        Ok(table)
    }

    /// Warns once about settings that change tokens in transformers but not here.
    pub(crate) fn name_what_is_not_applied(&self, wanted: &GenerationConfig) {
        let names = wanted.not_applied();
        if !names.is_empty() && !self.loaded.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "kiln::generation",
                "not applied yet, so the tokens may differ from transformers': {}",
                names.join(", ")
            );
        }
    }

    /// The batch of prompts for a new sequence. Shorter prompts are padded, as in transformers; if the cache
    /// does not support padding, rows have different lengths.
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

    /// Padding is hidden or skipped, so any token of the vocabulary serves.
    pub(crate) fn padding(&self, settings: &Settings) -> TokenId {
        settings.pad_token_id().filter(|&id| (id as usize) < self.loaded.sizes.vocab).unwrap_or(0)
    }

    /// Maximum number of tokens after `held` tokens in `cache`; `None`: no limit, because positions stay
    /// below a bound.
    pub(crate) fn room(&self, cache: &ModelCache, held: usize) -> Result<Option<usize>> {
        if cache.is_endless() {
            return Ok(None);
        }
        let positions = self.loaded.sizes.positions;
        if held >= positions {
            return Err(Error::TooLong {
                why: format!(
                    "{held} tokens and the model {positions} positions; shorten it by at least {}, or \
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

    /// Maximum number of prompt tokens per forward pass of `rows` rows. Activations take at most 32 MiB on a
    /// CPU, 128 MiB on an integrated GPU and 256 MiB on another: GPUs need many rows to be busy, and unpack
    /// packed weights once for all of them. A long prompt needs little more memory than its keys and values.
    /// From 128 tokens on, it is a multiple of 128.
    pub fn largest_chunk(&self, rows: usize) -> usize {
        /// Rows of the tiles in which GPUs multiply.
        const TILE: usize = 128;

        let of_stage = |(device, _): &(Opened, _)| {
            let mebibytes = match device.info.class {
                DeviceClass::Cpu | DeviceClass::Software => 32,
                DeviceClass::Integrated => 128,
                DeviceClass::Discrete | DeviceClass::Virtual => 256,
            };
            // One of the activations may have most of the bytes.
            device.info.largest_binding.min(mebibytes << 20)
        };
        let activations = self.loaded.stages.iter().map(of_stage).min().unwrap_or(32 << 20);
        let a_token = self.loaded.sizes.token_bytes(self.loaded.dtype.size());
        let bytes = rows.max(1).saturating_mul(a_token).max(1);
        let chunk = (activations / bytes).clamp(16, 2048);
        if chunk < TILE { chunk } else { chunk / TILE * TILE }
    }
}
