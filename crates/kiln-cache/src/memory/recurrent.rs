//! States of a recurrent block, in ring buffers (transformers' `LinearAttentionLayer`, formerly
//! `MambaCache`).

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result, gapless,
    layer::{CacheLayer, Footprint, Rings, StateLayer, StepShape},
    need::{RecurrentNeed, RingEntries, RingNeed},
    slot::{AnySlot, Slot},
};
use serde::{Deserialize, Serialize};

use super::{Memory, Policy, Progress, TensorTree, check, tensor_tree};

/// Keeps the states after the latest tokens: one more than the number of tokens promised to be truncatable.
#[derive(Clone, Debug)]
pub(crate) struct Recurrent {
    pub(crate) need: RecurrentNeed,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Counts {
    /// Shortest length whose state is in the rings, or follows from them; so are those of all longer lengths.
    oldest: usize,
    /// Length of the older state, if the rings have one.
    #[serde(default)]
    older: usize,
    /// The rings kept from before the last pass. `None` if the pass wrote in place.
    before: Option<Before>,
}

/// Counts of the rings from before a pass.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Before {
    oldest: usize,
    older: usize,
    /// Number of tokens.
    len: usize,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct States {
    rings: Vec<Slot<Tensor<4>>>,
    /// The rings before a pass that was longer than the rings, so that the pass can be undone.
    before: Vec<Slot<Tensor<4>>>,
}

tensor_tree!(States { rings, before });

impl States {
    /// Takes all rings; `None` if there are none.
    fn take(&mut self) -> Result<Option<Rings>> {
        let rings: Result<Vec<_>> = self.rings.iter_mut().map(Slot::take).collect();
        Ok(rings?.into_iter().collect())
    }

    fn forget_before(&mut self) {
        self.before.iter_mut().for_each(Slot::clear);
    }
}

impl Progress<Counts> {
    /// Number of latest tokens that the older state has not seen.
    fn journaled(&self) -> usize {
        self.seq_len.saturating_sub(self.counts.older)
    }
}

impl Recurrent {
    /// Creates new rings. Slots are never read before they are written.
    fn rings(&self, rows: usize, history: usize, dtype: DType, device: &Device) -> Rings {
        let ring = |ring: &RingNeed| {
            let dtype = if ring.is_float32() { DType::F32 } else { dtype };
            gapless::zeros([rows, ring.groups, ring.slots(history), ring.width], (device, dtype))
        };
        self.need.rings.iter().map(ring).collect()
    }

    /// Moves the entries of `rings` to rings with as many slots as truncating `history` tokens needs.
    fn resized(&self, at: &Progress<Counts>, rings: Rings, history: usize) -> Rings {
        let new = |(ring, need): (Tensor<4>, &RingNeed)| {
            moved(ring, Self::slots(at, need, history), need.latest(at.seq_len))
        };
        rings.into_iter().zip(&self.need.rings).map(new).collect()
    }

    /// Counts `tokens` more tokens, in rings with these numbers of slots.
    fn advance(&self, at: &mut Progress<Counts>, slots: impl Iterator<Item = usize>, tokens: usize) {
        at.seq_len += tokens;
        let mut most = usize::MAX;
        for (ring, slots) in self.need.rings.iter().zip(slots) {
            let history = ring.history(slots);
            most = most.min(history);
            if ring.entries == RingEntries::Journal {
                at.counts.older = at.counts.older.max(at.seq_len.saturating_sub(history));
            }
        }
        at.counts.oldest = at.counts.oldest.max(at.seq_len.saturating_sub(most));
    }

    /// Returns the number of slots of a ring that can be truncated by `history` tokens. A journal always has
    /// room for the tokens that the older state has not seen.
    fn slots(at: &Progress<Counts>, ring: &RingNeed, history: usize) -> usize {
        let journaled = if ring.entries == RingEntries::Journal { at.journaled() } else { 0 };
        ring.slots(history.max(journaled))
    }
}

/// Returns a ring of `slots` slots with the latest entries of `ring`, the last of which has the number
/// `last`.
fn moved(ring: Tensor<4>, slots: usize, last: usize) -> Tensor<4> {
    let have = ring.dims()[2];
    // The latest number in each new slot; if the old ring has lost that entry, any other.
    let number = |slot: usize| {
        let back = (last as i64 - slot as i64).rem_euclid(slots as i64);
        (last as i64 - back).rem_euclid(have as i64) as i32
    };
    let from: Vec<i32> = (0..slots).map(number).collect();
    let from = Tensor::<1, Int>::from_data(TensorData::new(from, [slots]), &ring.device());
    ring.select(2, from)
}

/// Returns the slots of `n` entries from number `first` on.
fn written(first: usize, n: usize, slots: usize) -> [Range<usize>; 2] {
    if n >= slots {
        return [0..slots, 0..0];
    }
    let first = first % slots.max(1);
    [first..(first + n).min(slots), 0..(first + n).saturating_sub(slots)]
}

impl Policy for Recurrent {
    const NAME: &'static str = "recurrent";
    type Counts = Counts;
    type Tensors = States;

    fn empty(&self, _: &Counts) -> States {
        let slots = || vec![Slot::default(); self.need.rings.len()];
        States { rings: slots(), before: slots() }
    }

    fn footprint(&self, at: &Progress<Counts>, states: &States, step: &StepShape) -> Footprint {
        let bytes = |ring: &RingNeed| ring.bytes(at.history, step.element).saturating_mul(step.rows);
        let largest = self.need.rings.iter().map(bytes).max().unwrap_or(0);
        let held = self.need.bytes(at.history, step.element).saturating_mul(step.rows);
        // Rings that are kept for undoing, or that grow, exist twice.
        let have: usize = states.slots().into_iter().map(AnySlot::device_bytes).sum();
        let twice = step.tokens > at.history || have != held;
        Footprint { held: held.saturating_mul(if twice { 2 } else { 1 }), largest, passing: 0 }
    }

    /// A recurrence cannot be reversed; it can only return to a kept state.
    fn rewind_point(&self, at: &Progress<Counts>, at_most: usize) -> Option<usize> {
        let Counts { oldest, before, .. } = at.counts;
        let before = before.map(|before| before.len).filter(|len| *len <= at_most);
        (at_most >= oldest).then_some(at_most).or(before)
    }

    fn rewind(&self, at: &mut Progress<Counts>, states: &mut States, len: usize) -> Result<()> {
        if let Some(Before { oldest, older, .. }) = at.counts.before.take()
            && len < at.counts.oldest
        {
            std::mem::swap(&mut states.rings, &mut states.before);
            states.slots_mut().into_iter().for_each(AnySlot::mark_dirty);
            (at.counts.oldest, at.counts.older) = (oldest, older);
        }
        states.forget_before();
        Ok(())
    }

    /// A file is for continuing a sequence, not for truncating it.
    fn trim(&self, at: &mut Progress<Counts>, states: &mut States) -> Result<()> {
        if let Some(rings) = states.take()? {
            let rings = self.resized(at, rings, 0);
            states.rings.iter_mut().zip(rings).for_each(|(slot, ring)| slot.set(ring));
        }
        states.forget_before();
        at.counts = Counts { oldest: at.seq_len, before: None, ..at.counts };
        Ok(())
    }

    fn validate(&self, at: &Progress<Counts>, states: &States) -> Result<()> {
        check(states.before.iter().all(|slot| slot.dtype().is_none()))?;
        check(at.counts.oldest == at.seq_len && at.counts.before.is_none())?;
        let has_journal = self.need.rings.iter().any(|ring| ring.entries == RingEntries::Journal);
        check(at.counts.older <= if has_journal { at.seq_len } else { 0 })?;
        let fits = |(slot, need): (&Slot<Tensor<4>>, &RingNeed)| match slot.outlines().first() {
            Some((shape, dtype)) => {
                let wanted = [need.groups, Self::slots(at, need, 0), need.width];
                let is_float32 = !need.is_float32() || *dtype == DType::F32;
                at.seq_len > 0 && matches!(**shape, [_, g, s, w] if [g, s, w] == wanted) && is_float32
            }
            None => at.seq_len == 0,
        };
        check(states.rings.iter().zip(&self.need.rings).all(fits))
    }
}

impl StateLayer for Memory<Recurrent> {
    /// Brings an offloaded memory to the device; it stays there until the rings are stored.
    fn take(&mut self, inputs: &Tensor<3>) -> Result<Rings> {
        let [given, tokens, _] = inputs.dims();
        if let Some(rows) = self.rows().filter(|&rows| rows != given) {
            return Err(Error::WrongRows { rows, given });
        }
        self.fetch()?;
        let Self { policy, at, tensors, device, .. } = self;
        tensors.forget_before();
        at.counts.before = None;
        let Some(mut rings) = tensors.take()?.filter(|_| at.seq_len > 0) else {
            (at.counts.oldest, at.counts.older) = (0, 0);
            return Ok(policy.rings(given, at.history, inputs.dtype(), device));
        };
        let grows = |(ring, need): (&Tensor<4>, &RingNeed)| ring.dims()[2] < need.slots(at.history);
        if rings.iter().zip(&policy.need.rings).any(grows) {
            rings = policy.resized(at, rings, at.history);
        }
        if tokens > at.history {
            // The rings that are handed out are then copied when they are written.
            tensors.before.iter_mut().zip(&rings).for_each(|(before, ring)| before.set(ring.clone()));
            let Counts { oldest, older, .. } = at.counts;
            at.counts.before = Some(Before { oldest, older, len: at.seq_len });
        }
        Ok(rings)
    }

    fn store(&mut self, rings: Rings, tokens: usize) -> Result<()> {
        self.on_device(|policy, at, tensors| {
            let slots: Vec<usize> = rings.iter().map(|ring| ring.dims()[2]).collect();
            for (((slot, ring), need), &slots) in
                tensors.rings.iter_mut().zip(rings).zip(&policy.need.rings).zip(&slots)
            {
                slot.set_written(ring, written(need.latest(at.seq_len + 1), tokens, slots));
            }
            policy.advance(at, slots.into_iter(), tokens);
            Ok(())
        })
    }

    fn journaled(&self) -> usize {
        self.at.journaled()
    }

    /// A recording keeps its buffers, so it cannot be replayed with an offloaded memory, with rings that are
    /// about to grow, or with rings that are kept for truncation. It also keeps the number of tokens that are
    /// read from a journal, which is that of all further steps only when the journal is full.
    fn replayable(&self) -> usize {
        let is_full = |(slot, need): (&Slot<Tensor<4>>, &RingNeed)| {
            need.entries != RingEntries::Journal || self.journaled() == need.history(slot.tokens())
        };
        if !self.tensors.rings.iter().zip(&self.policy.need.rings).all(is_full) {
            return 0;
        }
        let stays =
            |(slot, need): (&Slot<Tensor<4>>, &RingNeed)| slot.tokens() >= need.slots(self.at.history);
        let stay = self.at.history > 0 && self.tensors.rings.iter().zip(&self.policy.need.rings).all(stays);
        if stay && self.host.is_none() { usize::MAX } else { 0 }
    }

    fn replayed(&mut self) {
        let slots = self.tensors.rings.iter().map(|slot| slot.tokens());
        self.policy.advance(&mut self.at, slots, 1);
    }

    fn snapshot(&self) -> Box<dyn StateLayer> {
        Box::new(self.clone())
    }
}

/// Remembers nothing: the memory of a recurrent block in a plan that recomputes the whole sequence at every
/// step.
#[derive(Clone, Debug)]
pub(crate) struct Forgetful {
    pub(crate) need: RecurrentNeed,
}

impl Policy for Forgetful {
    const NAME: &'static str = "none";
    type Counts = ();
    type Tensors = ();

    fn can_rewind(&self) -> bool {
        false
    }

    fn validate(&self, at: &Progress<()>, _: &()) -> Result<()> {
        check(at.seq_len == 0)
    }
}

impl StateLayer for Memory<Forgetful> {
    fn take(&mut self, inputs: &Tensor<3>) -> Result<Rings> {
        let need = self.policy.need.clone();
        Ok(Recurrent { need }.rings(inputs.dims()[0], 0, inputs.dtype(), &self.device))
    }

    fn store(&mut self, _: Rings, _tokens: usize) -> Result<()> {
        Ok(())
    }

    fn journaled(&self) -> usize {
        0
    }

    fn replayable(&self) -> usize {
        0
    }

    fn replayed(&mut self) {}

    fn snapshot(&self) -> Box<dyn StateLayer> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resized_ring_keeps_its_latest_entries() {
        let device = Device::flex();
        // A ring of 5 slots with the numbers 6 to 10.
        let ring = Tensor::<4>::from_data([[[[10.0], [6.0], [7.0], [8.0], [9.0]]]], &device);
        for slots in 1..12 {
            let new: Vec<f32> = moved(ring.clone(), slots, 10).into_data().iter().collect();
            for number in 6.max(11 - slots.min(5))..=10 {
                assert_eq!(new[number % slots], number as f32, "{number} of {slots}");
            }
        }
    }

    #[test]
    fn each_written_slot_is_in_one_of_two_ranges() {
        assert_eq!(written(7, 2, 5), [2..4, 0..0]);
        assert_eq!(written(9, 3, 5), [4..5, 0..2]);
        assert_eq!(written(9, 5, 5), [0..5, 0..0]);
    }
}
