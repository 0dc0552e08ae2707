//! What the generation loop knows about a model.

use std::{fmt, ops::Range};

use burn::tensor::{Device, Tensor};

use crate::{Result, batch::Batch, model_cache::ModelCache, need::LayerNeed};

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

    /// Logits `[rows, 1 or tokens, vocab]` in float32, after feeding `batch`.
    ///
    /// # Errors
    /// Those of the cache; nothing else is checked here, and a failed step leaves the cache unusable but for `reset`.
    fn forward(&self, batch: &Batch, logits: Logits, cache: &mut ModelCache) -> Result<Tensor<3>>;
}
