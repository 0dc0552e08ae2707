//! Memory of a single block.

use std::fmt;

use burn::tensor::{Device, Tensor, TensorData};

use crate::{
    Error, Result,
    slot::{AnySlot, checked_rows},
    view::KvView,
};

/// What every memory can do, whatever it holds.
///
/// **Invariant:** an operation that returns `Err` has changed nothing.
pub trait CacheLayer: fmt::Debug + Send {
    /// Name of the strategy, for messages and profiles.
    fn name(&self) -> &'static str;

    /// Tokens seen so far, including those no longer stored.
    fn seq_len(&self) -> usize;

    /// Whether the latest `n` tokens can be forgotten exactly.
    fn can_roll_back(&self, n: usize) -> bool;

    /// Forgets the latest `n` tokens, as if they had never been seen.
    fn roll_back(&mut self, n: usize) -> Result<()>;

    /// Promise: from the next update on, up to `n` tokens can be forgotten. An earlier, larger promise stays.
    fn keep_history(&mut self, n: usize);

    /// Back to the state of a new layer.
    fn reset(&mut self);

    /// Everything this layer stores, always in the same order.
    fn slots(&self) -> Vec<&dyn AnySlot>;
    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot>;

    /// Rebuilds the batch: new row `i` is old row `rows[i]`.
    ///
    /// Beam search permutes and repeats rows, pruning passes fewer, fan-out passes more.
    fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        checked_rows(&self.slots(), rows)?;
        self.slots_mut().into_iter().for_each(|slot| slot.select_rows(rows));
        Ok(())
    }

    /// Moves all tensors to host memory; only [`import`] may change the layer next.
    ///
    /// **Invariant:** every `&self` question but `device_bytes` is answered as before. So layers keep counts, and
    /// never ask a tensor for its shape to answer one.
    ///
    /// [`import`]: CacheLayer::import
    fn export(&mut self) -> Result<Vec<TensorData>> {
        let host = self.read()?;
        self.release();
        Ok(host)
    }

    /// The first half of [`export`](CacheLayer::export): copies all tensors to the host; they stay.
    fn read(&mut self) -> Result<Vec<TensorData>> {
        self.compact();
        let mut host = Vec::new();
        self.slots().into_iter().try_for_each(|slot| slot.read(&mut host))?;
        Ok(host)
    }

    /// The second half: gives up the device's copy of what was read.
    fn release(&mut self) {
        self.slots_mut().into_iter().for_each(|slot| slot.release());
    }

    /// Puts back what [`export`](CacheLayer::export) returned.
    ///
    /// # Errors
    /// What [`check`](CacheLayer::check) says.
    fn import(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()> {
        self.check(&host)?;
        let mut host = host.into_iter();
        self.slots_mut().into_iter().for_each(|slot| slot.import(&mut host, device));
        Ok(())
    }

    /// Whether `host` is what was exported.
    ///
    /// # Errors
    /// [`Error::Import`] where the data are not as many, or not of the shape and type, that were.
    fn check(&self, mut host: &[TensorData]) -> Result<()> {
        self.slots().into_iter().try_for_each(|slot| slot.check(&mut host))?;
        match host.len() {
            0 => Ok(()),
            left => Err(Error::Import { why: format!("{left} tensors are left over") }),
        }
    }

    /// Gives up room that was allocated ahead of need.
    fn compact(&mut self) {}

    /// Bytes held on the device, room allocated ahead of need included.
    fn device_bytes(&self) -> usize {
        self.slots().into_iter().map(AnySlot::device_bytes).sum()
    }

    /// Hint: this layer is used next.
    fn prefetch(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Keys and values of one attention block. Tensors are `[batch, kv_heads, tokens, head_dim]`.
pub trait KvLayer: CacheLayer {
    /// Where the keys returned by an update of `n` tokens will sit in the sequence ("mask sizes").
    fn span(&self, n: usize) -> KvSpan;

    /// Stores `n` new tokens and returns everything attention may look at.
    ///
    /// **Invariant:** the view is exactly `self.span(n)`, asked before the call.
    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<KvView>;
}

/// Keys and values an encoder wrote once; `None` until then.
pub trait CrossLayer: CacheLayer {
    fn view(&mut self) -> Result<Option<KvView>>;
    fn fill(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<()>;
}

/// Constant-size state of a recurrent block; `None` before the first token.
pub trait StateLayer: CacheLayer {
    fn state(&mut self) -> Result<Option<SsmState>>;

    /// Replaces the state with the one reached after `tokens` more tokens.
    fn store(&mut self, state: SsmState, tokens: usize) -> Result<()>;
}

/// Positions of the keys in a view. The cache knows where keys are; the model knows which to mask.
///
/// Models take rotary positions from here, never from `seq_len`: a layer that closes the gaps it leaves counts
/// positions of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvSpan {
    pub start: usize,
    pub len: usize,
}

impl KvSpan {
    /// Position of the first of `n` new tokens.
    pub fn query(&self, n: usize) -> usize {
        (self.start + self.len).saturating_sub(n)
    }
}

/// State of one Mamba block: convolution inputs `[batch, channels, conv_width]` and recurrence
/// `[batch, channels, state_dim]`.
pub type SsmState = (Tensor<3>, Tensor<3>);
