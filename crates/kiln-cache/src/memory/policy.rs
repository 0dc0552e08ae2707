//! The interface of a strategy.

use std::fmt;

use kiln_core::{
    Error, Result,
    budget::Claim,
    layer::{Footprint, Kv, KvSpan, Limits, Parents, Positions, Reorders, StepShape},
    need::Stream,
    slot::{AnySlot, Outline, Slot, Tensors},
    view::KvView,
};
use serde::{Serialize, de::DeserializeOwned};

/// A strategy for one block: where a token is stored, what may be seen, and what can be undone.
///
/// A policy holds only settings. The progress of its sequence and its tensors are kept elsewhere and passed
/// in. A method without tensors cannot read them; tensors that are passed in are on the device.
pub trait Policy: Clone + fmt::Debug + Send + Sync + 'static {
    /// Name of the strategy.
    const NAME: &'static str;

    /// Further counters of the strategy besides the number of tokens seen. Files store them by name.
    type Counts: Clone + Default + fmt::Debug + Send + Serialize + DeserializeOwned + 'static;
    type Tensors: TensorTree;

    /// Creates the slots for the tensors that belong to these counters.
    fn empty(&self, _counts: &Self::Counts) -> Self::Tensors {
        Self::Tensors::default()
    }

    /// See [`CacheLayer::admits`](kiln_core::layer::CacheLayer::admits).
    fn admits(&self, _at: &Progress<Self::Counts>, _tokens: usize, _padded: bool) -> Result<()> {
        Ok(())
    }

    /// Number of bytes on the device while `step` is stored.
    fn footprint(
        &self,
        _at: &Progress<Self::Counts>,
        tensors: &Self::Tensors,
        _step: &StepShape,
    ) -> Footprint {
        let slots = tensors.slots();
        let bytes = |(shape, dtype): Outline| shape.iter().product::<usize>() * dtype.size();
        let largest = slots.iter().flat_map(|slot| slot.outlines()).map(bytes).max().unwrap_or(0);
        let held = slots.into_iter().map(AnySlot::device_bytes).sum();
        Footprint { held, largest, passing: 0 }
    }

    /// Returns the largest length of at most `at_most` that can be returned to exactly; `None`: only an empty
    /// cache is possible. `at_most` is at most the number of tokens seen.
    fn rewind_point(&self, _at: &Progress<Self::Counts>, at_most: usize) -> Option<usize> {
        Some(at_most)
    }

    /// See [`CacheLayer::can_rewind`](kiln_core::layer::CacheLayer::can_rewind).
    fn can_rewind(&self) -> bool {
        true
    }

    /// Called before `at.seq_len` becomes `len`, which is a [`rewind_point`](Self::rewind_point).
    fn rewind(&self, _at: &mut Progress<Self::Counts>, _: &mut Self::Tensors, _len: usize) -> Result<()> {
        Ok(())
    }

    /// Called when everything is forgotten. A policy may keep its buffers for the next sequence.
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

    /// Drops room that was allocated ahead of need, and everything else that a saved memory does not need.
    fn trim(&self, _at: &mut Progress<Self::Counts>, _: &mut Self::Tensors) -> Result<()> {
        Ok(())
    }

    /// Checks that counters and tensors read from a file fit each other and this block.
    ///
    /// # Errors
    /// [`Error::Import`] if they do not.
    fn validate(&self, at: &Progress<Self::Counts>, tensors: &Self::Tensors) -> Result<()>;
}

/// A [`Policy`] for keys and values.
pub trait KvPolicy: Policy {
    /// See [`KvLayer::streams`](kiln_core::layer::KvLayer::streams).
    fn streams(&self) -> Option<[Stream; 2]> {
        None
    }

    /// Positions of the keys that [`append`](Self::append) of `n` tokens will return.
    fn span(&self, at: &Progress<Self::Counts>, n: usize) -> KvSpan {
        KvSpan { start: 0, len: at.seq_len + n }
    }

    fn limits(&self, _at: &Progress<Self::Counts>) -> Limits {
        Limits::default()
    }

    /// Stores new tokens at `positions`, and returns the keys that attention may look at: exactly the
    /// [`span`](Self::span), asked before. The caller advances `at`.
    fn append(
        &self,
        at: &mut Progress<Self::Counts>,
        tensors: &mut Self::Tensors,
        new: Kv,
        positions: &Positions,
    ) -> Result<KvView>;

    /// See [`KvLayer::slots_for`](kiln_core::layer::KvLayer::slots_for): `None` if position `p` is not in
    /// slot `p` of a single [`buffer`](Self::buffer).
    fn slots_for(
        &self,
        _at: &Progress<Self::Counts>,
        _tensors: &Self::Tensors,
        _tokens: usize,
    ) -> Option<usize> {
        None
    }

    /// Returns the only buffer, if there is just one.
    fn buffer<'a>(&self, _tensors: &'a mut Self::Tensors) -> Option<&'a mut Slot<Kv>> {
        None
    }

    /// Returns the start of the view after [`append`](Self::append) of `n` tokens, if that would only write
    /// into the single [`buffer`](Self::buffer), with position `p` in slot `p` modulo the number of slots.
    fn start_in_place(
        &self,
        _at: &Progress<Self::Counts>,
        _tensors: &Self::Tensors,
        _n: usize,
    ) -> Option<usize> {
        None
    }

    /// Called after `n` tokens were stored, by this pass or by a replayed one.
    fn advance(&self, at: &mut Progress<Self::Counts>, _tensors: &Self::Tensors, n: usize) {
        at.seq_len += n;
    }

    /// Returns the stored keys and values in the order of their positions; `None` if nothing is stored.
    fn gather(&self, at: &Progress<Self::Counts>, tensors: &Self::Tensors) -> Result<Option<Kv>>;

    /// See [`KvLayer::replayable`](kiln_core::layer::KvLayer::replayable).
    fn replayable(&self, _at: &Progress<Self::Counts>, _tensors: &Self::Tensors) -> usize {
        0
    }
}

/// Progress of a memory in its sequence, and what it was told about the sequence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress<C> {
    /// Number of tokens seen so far.
    pub seq_len: usize,
    /// Number of tokens that must be truncatable at any time.
    pub history: usize,
    /// Number of tokens that the sequence is going to reach; 0 if unknown.
    pub horizon: usize,
    /// Further counters of the policy.
    pub counts: C,
}

/// The tensors of a memory: slots, always in the same order.
pub trait TensorTree: Clone + Default + fmt::Debug + Send + 'static {
    fn slots(&self) -> Vec<&dyn AnySlot>;
    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot>;

    /// Number of rows of the batch; `None` while there are no tensors.
    fn batch_rows(&self) -> Option<usize> {
        self.slots().into_iter().find_map(AnySlot::rows)
    }

    /// Whether every tensor has all rows.
    fn has_all_rows(&self) -> bool {
        true
    }

    /// Rebuilds the batch: new row `i` is old row `rows[i]`. `filled`: number of valid tokens.
    fn reorder(&mut self, rows: &[usize], _filled: usize) {
        self.slots_mut().into_iter().for_each(|slot| slot.select_rows(rows));
    }

    /// Number of bytes on the device that snapshots hold too.
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

impl<T: TensorTree> TensorTree for Vec<T> {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.iter().flat_map(T::slots).collect()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.iter_mut().flat_map(T::slots_mut).collect()
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
