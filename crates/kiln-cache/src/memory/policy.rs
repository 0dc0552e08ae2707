//! What a strategy decides.

use std::fmt;

use kiln_core::{
    Error, Result,
    budget::Claim,
    layer::{Footprint, Kv, KvSpan, Limits, Parents, Positions, Reorders, StepShape},
    slot::{AnySlot, Slot, Tensors},
    view::KvView,
};
use serde::{Serialize, de::DeserializeOwned};

/// A strategy for one block: where a token goes, what may be seen, what can be taken back.
///
/// It is settings alone. How far its sequence is, and the tensors, are kept for it and handed to it. A question that is
/// asked without the tensors cannot read them; where they are handed over, they are on the device.
pub trait Policy: Clone + fmt::Debug + Send + Sync + 'static {
    /// Name of the strategy.
    const NAME: &'static str;

    /// What it counts beside the tokens seen. Files hold it by name.
    type Counts: Clone + Default + fmt::Debug + Send + Serialize + DeserializeOwned + 'static;
    type Tensors: TensorTree;

    /// Places for the tensors of these counts.
    fn empty(&self, _counts: &Self::Counts) -> Self::Tensors {
        Self::Tensors::default()
    }

    /// See [`CacheLayer::admits`](kiln_core::layer::CacheLayer::admits).
    fn admits(&self, _at: &Progress<Self::Counts>, _tokens: usize, _padded: bool) -> Result<()> {
        Ok(())
    }

    /// Bytes on the device while `step` is stored.
    fn footprint(
        &self,
        _at: &Progress<Self::Counts>,
        tensors: &Self::Tensors,
        _step: &StepShape,
    ) -> Footprint {
        let held = tensors.slots().into_iter().map(AnySlot::device_bytes).sum();
        Footprint { held, largest: held, passing: 0 }
    }

    /// The largest length, `at_most` or less, that can be returned to exactly; `None`: only an empty cache can be returned to.
    /// `at_most` is no more than what was seen.
    fn rewind_point(&self, _at: &Progress<Self::Counts>, at_most: usize) -> Option<usize> {
        Some(at_most)
    }

    /// See [`CacheLayer::can_rewind`](kiln_core::layer::CacheLayer::can_rewind).
    fn can_rewind(&self) -> bool {
        true
    }

    /// Called before `at.seq_len` becomes `len`, a [`rewind_point`](Self::rewind_point).
    fn rewind(&self, _at: &mut Progress<Self::Counts>, _: &mut Self::Tensors, _len: usize) -> Result<()> {
        Ok(())
    }

    /// Called when everything is forgotten, for a policy that keeps its buffers for the next sequence.
    fn reset(&self, tensors: &mut Self::Tensors) {
        *tensors = self.empty(&Self::Counts::default());
    }

    /// See [`CacheLayer::shares_row`](kiln_core::layer::CacheLayer::shares_row).
    fn shares_row(&self, _at: &Progress<Self::Counts>, _tensors: &Self::Tensors) -> bool {
        false
    }

    /// How [`reorder_on_device`](Self::reorder_on_device) is done.
    fn reorders(&self, _tensors: &Self::Tensors) -> Reorders {
        Reorders::ByCopy
    }

    /// See [`CacheLayer::reorder_on_device`](kiln_core::layer::CacheLayer::reorder_on_device).
    fn reorder_on_device(&self, tensors: &mut Self::Tensors, parents: &Parents) -> Result<()> {
        let rows = parents.absolute();
        tensors.slots_mut().into_iter().try_for_each(|slot| slot.select_rows_on_device(&rows))
    }

    /// Gives up room that was allocated ahead of need, and what a saved memory does without.
    fn trim(&self, _at: &mut Progress<Self::Counts>, _: &mut Self::Tensors) -> Result<()> {
        Ok(())
    }

    /// Whether counts and tensors that were read from a file belong to each other, and to this block.
    ///
    /// # Errors
    /// [`Error::Import`].
    fn validate(&self, at: &Progress<Self::Counts>, tensors: &Self::Tensors) -> Result<()>;
}

/// A [`Policy`] for keys and values.
pub trait KvPolicy: Policy {
    /// Positions of the keys that [`append`](Self::append) of `n` tokens will return.
    fn span(&self, at: &Progress<Self::Counts>, n: usize) -> KvSpan {
        KvSpan { start: 0, len: at.seq_len + n }
    }

    fn limits(&self, _at: &Progress<Self::Counts>) -> Limits {
        Limits::default()
    }

    /// Stores new tokens, which stand at `positions`, and returns what attention may look at: exactly the
    /// [`span`](Self::span), asked before. `at` is advanced by the caller.
    fn append(
        &self,
        at: &mut Progress<Self::Counts>,
        tensors: &mut Self::Tensors,
        new: Kv,
        positions: &Positions,
    ) -> Result<KvView>;

    /// See [`KvLayer::slots_for`](kiln_core::layer::KvLayer::slots_for): `None` where position `p` is not in slot `p` of one
    /// [`buffer`](Self::buffer).
    fn slots_for(
        &self,
        _at: &Progress<Self::Counts>,
        _tensors: &Self::Tensors,
        _tokens: usize,
    ) -> Option<usize> {
        None
    }

    /// The only buffer, where there is one.
    fn buffer<'a>(&self, _tensors: &'a mut Self::Tensors) -> Option<&'a mut Slot<Kv>> {
        None
    }

    /// Called when `n` tokens were stored, by this pass or by a replayed one.
    fn advance(&self, at: &mut Progress<Self::Counts>, _tensors: &Self::Tensors, n: usize) {
        at.seq_len += n;
    }

    /// The stored keys and values in the order of their positions; `None` if nothing is stored.
    fn gather(&self, at: &Progress<Self::Counts>, tensors: &Self::Tensors) -> Result<Option<Kv>>;

    /// See [`KvLayer::replayable`](kiln_core::layer::KvLayer::replayable).
    fn replayable(&self, _at: &Progress<Self::Counts>, _tensors: &Self::Tensors) -> usize {
        0
    }
}

/// How far a memory is in its sequence, and what it was told of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress<C> {
    /// Tokens seen so far.
    pub seq_len: usize,
    /// Tokens that must be truncatable at any time.
    pub history: usize,
    /// Tokens that the sequence is going to reach; 0 where that is not known.
    pub horizon: usize,
    /// What the policy counts besides.
    pub counts: C,
}

/// The tensors of a memory: slots, always in the same order.
pub trait TensorTree: Clone + Default + fmt::Debug + Send + 'static {
    fn slots(&self) -> Vec<&dyn AnySlot>;
    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot>;

    /// Rows of the batch; `None` while there are no tensors.
    fn batch_rows(&self) -> Option<usize> {
        self.slots().into_iter().find_map(AnySlot::rows)
    }

    /// Whether every tensor has all rows.
    fn has_all_rows(&self) -> bool {
        true
    }

    /// Rebuilds the batch: new row `i` is old row `rows[i]`. `filled`: tokens that count.
    fn reorder(&mut self, rows: &[usize], _filled: usize) {
        self.slots_mut().into_iter().for_each(|slot| slot.select_rows(rows));
    }

    /// Bytes on the device that snapshots hold, too.
    fn shared_bytes(&self) -> usize {
        0
    }

    /// See [`CacheLayer::claim_shared`](kiln_core::layer::CacheLayer::claim_shared).
    fn claim_shared(&self, _all: &Claim) {}

    /// See [`CacheLayer::claimed_apart`](kiln_core::layer::CacheLayer::claimed_apart).
    fn claimed_apart(&mut self, _all: &Claim) -> usize {
        0
    }
}

impl TensorTree for () {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        Vec::new()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        Vec::new()
    }
}

impl<T: Tensors + 'static> TensorTree for Slot<T> {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![self]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![self]
    }
}

/// Implements [`TensorTree`] for a struct whose fields are slots, or trees of them.
macro_rules! tensor_tree {
    ($tree:ty { $($field:ident),+ }) => {
        impl $crate::memory::TensorTree for $tree {
            fn slots(&self) -> Vec<&dyn kiln_core::slot::AnySlot> {
                let mut slots = Vec::new();
                $(slots.extend($crate::memory::TensorTree::slots(&self.$field));)+
                slots
            }

            fn slots_mut(&mut self) -> Vec<&mut dyn kiln_core::slot::AnySlot> {
                let mut slots = Vec::new();
                $(slots.extend($crate::memory::TensorTree::slots_mut(&mut self.$field));)+
                slots
            }
        }
    };
}
pub(crate) use tensor_tree;

/// Refuses a saved state unless it is `possible`.
pub(crate) fn check(possible: bool) -> Result<()> {
    match possible {
        true => Ok(()),
        false => Err(Error::Import { why: "its counts contradict its tensors".to_owned() }),
    }
}
