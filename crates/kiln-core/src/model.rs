//! What the generation loop knows about a model.

use std::{fmt, ops::Range};

use burn::tensor::{Device, Tensor};

use crate::{Result, batch::Batch, layer::Feed, model_cache::ModelCache, need::LayerNeed};

pub type TokenId = u32;

/// Which positions of the batch get logits. Each costs a row of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    Last,
    All,
}

/// A decoder. Weights only: all state lives in the cache, so one model serves many sequences.
pub trait CausalModel: fmt::Debug + Send + Sync {
    /// One entry per block, from the config alone.
    fn needs(&self) -> Vec<LayerNeed>;

    /// Tokens of the vocabulary; ids are below it.
    fn vocab(&self) -> usize;

    /// Bytes of a number of the keys and values that it makes.
    fn element_bytes(&self) -> usize {
        4
    }

    /// Bytes that a forward pass over `tokens` tokens of `rows` rows takes beside weights and cache, at most; an estimate.
    fn working_bytes(&self, _rows: usize, _tokens: usize) -> usize {
        0
    }

    /// Cosines and sines for tokens fed one at a time into `slots`, `[1 or rows, slots, pairs]`, for each kind of rotary
    /// positions that the model has.
    fn rotary_tables(
        &self,
        _slots: Range<usize>,
        _left_pad: &[usize],
        _device: &Device,
    ) -> Vec<(Tensor<3>, Tensor<3>)> {
        Vec::new()
    }

    /// Logits `[rows, 1 or tokens, vocab]` in float32, after feeding `batch`. What that takes is claimed first, in the
    /// cache's budget.
    ///
    /// # Errors
    /// Where the cache or its budget refuses, nothing was changed. After another error the cache can only be taken back
    /// ([`undo_to`](ModelCache::undo_to)) or reset.
    fn forward(&self, batch: &Batch, logits: Logits, cache: &mut ModelCache) -> Result<Tensor<3>> {
        let (rows, tokens) = (batch.rows(), batch.len());
        cache.admits(tokens, batch.left_pad.iter().any(|&pad| pad > 0))?;
        let feed = Feed { rows, tokens, element: self.element_bytes(), last: false };
        // In float32, before and after a softcap.
        let others = match logits {
            Logits::Last => 0,
            Logits::All => 2 * 4 * self.vocab() * rows * tokens.saturating_sub(1),
        };
        cache.make_room(&feed, self.working_bytes(rows, tokens).saturating_add(others))?;
        let logits = self.compute(batch, logits, cache);
        if logits.is_ok() {
            cache.written();
        }
        cache.recount();
        logits
    }

    /// The computation of [`forward`](Self::forward), which has asked whether there is room for it.
    fn compute(&self, batch: &Batch, logits: Logits, cache: &mut ModelCache) -> Result<Tensor<3>>;
}
