//! Feeding tokens to a model.

use burn::tensor::{Int, Tensor};
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, Logits},
    model_cache::ModelCache,
};

/// Feeds `batch` to `model`, `chunk` tokens of each row at a time, or all at once; logits `[rows, 1, vocab]` of the last
/// tokens.
///
/// Chunks bound the memory that a long prompt takes while it is fed. The result is the same: rotary frequencies that
/// depend on the length are chosen for the whole prompt, behind what `cache` holds already. A cache that remembers
/// nothing is fed everything with the last chunk.
///
/// # Errors
/// [`Error::Setting`] for chunks of 0 tokens; those of [`CausalModel::forward`], after which the cache can only be reset.
pub async fn prefill(
    model: &dyn CausalModel,
    cache: &mut ModelCache,
    batch: &Batch,
    chunk: Option<usize>,
) -> Result<Tensor<3>> {
    checked_chunk(chunk)?;
    Feeder::new(model, cache, batch.left_pad.clone()).prefill(batch, chunk)
}

pub(crate) fn checked_chunk(chunk: Option<usize>) -> Result<()> {
    match chunk {
        Some(0) => Err(Error::Setting { name: "prefill_chunk", why: "is 0, must be at least 1".into() }),
        _ => Ok(()),
    }
}

/// A model and the cache of one batch, with what that cache did not keep.
#[derive(Debug)]
pub(crate) struct Feeder<'a> {
    model: &'a dyn CausalModel,
    pub(crate) cache: &'a mut ModelCache,
    left_pad: Vec<usize>,
    /// `[rows, tokens]`: the latest that were fed, where the cache has not seen them. They are fed again, in front.
    unseen: Option<Tensor<2, Int>>,
}

impl<'a> Feeder<'a> {
    pub(crate) fn new(model: &'a dyn CausalModel, cache: &'a mut ModelCache, left_pad: Vec<usize>) -> Self {
        Self { model, cache, left_pad, unseen: None }
    }

    /// See [`prefill`]; `chunk` is not 0.
    pub(crate) fn prefill(&mut self, batch: &Batch, chunk: Option<usize>) -> Result<Tensor<3>> {
        let len = batch.len();
        let horizon = self.cache.seq_len() + len;
        let mut start = 0;
        let mut n = chunk.unwrap_or(len).clamp(1, len);
        loop {
            let logits = self.feed(batch.tokens.clone().narrow(1, start, n), horizon)?;
            start += n;
            if start >= len {
                return Ok(logits);
            }
            // Chunks do not save anything where each would be fed again with the next.
            n = if self.unseen.is_some() { len - start } else { n.min(len - start) };
        }
    }

    /// Feeds `[rows, new]` tokens; logits `[rows, 1, vocab]` of the last. `horizon`: see [`Batch`].
    pub(crate) fn feed(&mut self, tokens: Tensor<2, Int>, horizon: usize) -> Result<Tensor<3>> {
        let tokens = match self.unseen.take() {
            Some(unseen) => Tensor::cat(vec![unseen, tokens], 1),
            None => tokens,
        };
        let batch = Batch { tokens, left_pad: self.left_pad.clone(), horizon };
        let before = self.cache.seq_len();
        let logits = self.model.forward(&batch, Logits::Last, self.cache)?;
        let seen = self.cache.seq_len().saturating_sub(before);
        if let Some(unseen @ 1..) = batch.len().checked_sub(seen) {
            self.unseen = Some(batch.tokens.narrow(1, seen, unseen));
        }
        Ok(logits)
    }
}
