//! Feeding tokens to a model.

use burn::tensor::{Int, Tensor};
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, Logits},
    model_cache::ModelCache,
};

use crate::stepper::{Output, Running, Stepper};

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
    Feeder::new(model, cache, batch.left_pad.clone(), false).prefill(batch, chunk)
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
    pub(crate) running: Running<'a>,
    /// `[rows, tokens]`: the latest that were fed, where the cache has not seen them. They are fed again, in front.
    unseen: Option<Tensor<2, Int>>,
    /// Of the steps behind the prompt.
    stepper: Option<Stepper>,
    /// Whether steps are captured.
    capture: bool,
}

impl<'a> Feeder<'a> {
    pub(crate) fn new(
        model: &'a dyn CausalModel,
        cache: &'a mut ModelCache,
        left_pad: Vec<usize>,
        capture: bool,
    ) -> Self {
        Self { running: Running { model, cache, left_pad }, unseen: None, stepper: None, capture }
    }

    /// See [`prefill`]; `chunk` is not 0.
    pub(crate) fn prefill(&mut self, batch: &Batch, chunk: Option<usize>) -> Result<Tensor<3>> {
        let len = batch.len();
        let horizon = self.running.cache.seq_len() + len;
        let chunk = chunk.unwrap_or(len);
        let mut start = 0;
        loop {
            // Chunks do not save anything where each would be fed again with the next.
            let n = if self.unseen.is_some() { len } else { chunk };
            let n = n.min(self.running.cache.at_once().unwrap_or(len)).clamp(1, len - start);
            let logits = self.feed(batch.tokens.clone().narrow(1, start, n), horizon)?;
            start += n;
            if start >= len {
                return Ok(logits);
            }
        }
    }

    /// Feeds a token to every row. `tokens` `[rows, 1]`; `None`: those that the device chose in the step before.
    ///
    /// Where the cache keeps nothing, the output is logits also if the device was to choose.
    pub(crate) fn step(&mut self, tokens: Option<Tensor<2, Int>>, chooses: bool) -> Result<Output> {
        if let (Some(_), Some(tokens)) = (&self.unseen, &tokens) {
            return self.feed(tokens.clone(), 0).map(Output::Logits);
        }
        if let (Some(stepper), Some(tokens)) = (&mut self.stepper, &tokens) {
            stepper.give(tokens.clone());
        }
        let stepper = match (&mut self.stepper, &tokens) {
            (Some(stepper), _) => stepper,
            (none, Some(tokens)) => none.insert(Stepper::new(tokens, &self.running, chooses, self.capture)),
            (None, None) => {
                return Err(Error::Execution("a step was asked for before a token was fed".into()));
            }
        };
        stepper.step(&mut self.running)
    }

    /// Feeds `[rows, new]` tokens; logits `[rows, 1, vocab]` of the last. `horizon`: see [`Batch`].
    fn feed(&mut self, tokens: Tensor<2, Int>, horizon: usize) -> Result<Tensor<3>> {
        let tokens = match self.unseen.take() {
            Some(unseen) => Tensor::cat(vec![unseen, tokens], 1),
            None => tokens,
        };
        let Running { model, cache, left_pad } = &mut self.running;
        let batch = Batch { tokens, left_pad: left_pad.clone(), horizon, steps: None };
        cache.admits(batch.len())?;
        let before = cache.seq_len();
        let logits = model.forward(&batch, Logits::Last, cache)?;
        let seen = cache.seq_len().saturating_sub(before);
        if let Some(unseen @ 1..) = batch.len().checked_sub(seen) {
            self.unseen = Some(batch.tokens.narrow(1, seen, unseen));
        }
        Ok(logits)
    }
}
