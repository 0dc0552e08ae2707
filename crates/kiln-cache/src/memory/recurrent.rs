//! States of a recurrent block, in ring buffers (transformers' `LinearAttentionLayer`, formerly
//! `MambaCache`).

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Footprint, StateLayer, StateRings, StepShape},
    need::RecurrentNeed,
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
    /// Shortest length whose state is in the rings; those of all longer lengths are too.
    oldest: usize,
    /// Shortest and longest length whose state is in the rings kept from before the last pass. `None` if the
    /// pass wrote in place.
    before: Option<(usize, usize)>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct States {
    inputs: Slot<Tensor<4>>,
    states: Slot<Tensor<4>>,
    /// The rings before a pass that was longer than the rings, so that the pass can be undone.
    inputs_before: Slot<Tensor<4>>,
    states_before: Slot<Tensor<4>>,
}

tensor_tree!(States { inputs, states, inputs_before, states_before });

impl Recurrent {
    /// Creates new rings. Slots are never read before they are written.
    fn rings(&self, [rows, slots, more]: [usize; 3], dtype: DType, device: &Device) -> StateRings {
        let &RecurrentNeed { channels, state_dim, .. } = &self.need;
        StateRings {
            inputs: Tensor::zeros([rows, 1, slots, channels], (device, dtype)),
            states: Tensor::zeros([rows, state_dim, more, channels], (device, DType::F32)),
        }
    }

    /// Moves the states of `rings` to rings with as many slots as truncating `history` tokens needs.
    fn resized(&self, at: &Progress<Counts>, rings: StateRings, history: usize) -> StateRings {
        let StateRings { inputs, states } = rings;
        let [slots, more] = self.need.slots(history);
        // The last input is numbered by the position of the last token, and the last state by the length.
        StateRings {
            inputs: moved(inputs, slots, at.seq_len.saturating_sub(1)),
            states: moved(states, more, at.seq_len),
        }
    }

    fn advance(&self, at: &mut Progress<Counts>, slots: usize, tokens: usize) {
        at.seq_len += tokens;
        at.counts.oldest = at.counts.oldest.max((at.seq_len + 1).saturating_sub(slots));
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

    fn footprint(&self, at: &Progress<Counts>, states: &States, step: &StepShape) -> Footprint {
        let [inputs, state] =
            self.need.bytes(at.history, step.element).map(|row| row.saturating_mul(step.rows));
        let held = inputs.saturating_add(state);
        // Rings that are kept for undoing, or that grow, exist twice.
        let have: usize = states.slots().into_iter().map(AnySlot::device_bytes).sum();
        let twice = step.tokens > at.history || have != held;
        Footprint {
            held: held.saturating_mul(if twice { 2 } else { 1 }),
            largest: 2 * inputs.max(state),
            passing: 0,
        }
    }

    /// A recurrence cannot be reversed; it can only return to a kept state.
    fn rewind_point(&self, at: &Progress<Counts>, at_most: usize) -> Option<usize> {
        let Counts { oldest, before } = at.counts;
        let before = before.filter(|&(_, len)| len <= at_most).map(|(_, len)| len);
        (at_most >= oldest).then_some(at_most).or(before)
    }

    fn rewind(&self, at: &mut Progress<Counts>, states: &mut States, len: usize) -> Result<()> {
        if let Some((oldest, _)) = at.counts.before.take()
            && len < at.counts.oldest
        {
            states.inputs = std::mem::take(&mut states.inputs_before);
            states.states = std::mem::take(&mut states.states_before);
            states.slots_mut().into_iter().for_each(AnySlot::mark_dirty);
            at.counts.oldest = oldest;
        }
        states.inputs_before.clear();
        states.states_before.clear();
        Ok(())
    }

    /// A file is for continuing a sequence, not for truncating it.
    fn trim(&self, at: &mut Progress<Counts>, states: &mut States) -> Result<()> {
        if let (Some(inputs), Some(state)) = (states.inputs.take()?, states.states.take()?) {
            let StateRings { inputs, states: state } =
                self.resized(at, StateRings { inputs, states: state }, 0);
            states.inputs.set(inputs);
            states.states.set(state);
        }
        states.inputs_before.clear();
        states.states_before.clear();
        at.counts = Counts { oldest: at.seq_len, before: None };
        Ok(())
    }

    fn validate(&self, at: &Progress<Counts>, states: &States) -> Result<()> {
        check(states.inputs_before.dtype().is_none() && states.states_before.dtype().is_none())?;
        check(at.counts.oldest == at.seq_len && at.counts.before.is_none())?;
        let &RecurrentNeed { channels, state_dim, .. } = &self.need;
        let is_ring = |slot: &Slot<Tensor<4>>, heads: usize, slots: usize, float32: bool| {
            let outlines = slot.outlines();
            let (shape, dtype) = outlines.first()?;
            let fits = matches!(**shape, [_, h, s, c] if (h, s, c) == (heads, slots, channels));
            Some(fits && (!float32 || *dtype == DType::F32))
        };
        let [slots, more] = self.need.slots(0);
        let rings =
            [is_ring(&states.inputs, 1, slots, false), is_ring(&states.states, state_dim, more, true)];
        check(match at.seq_len {
            0 => rings == [None; 2],
            _ => rings == [Some(true); 2],
        })
    }
}

impl StateLayer for Memory<Recurrent> {
    /// Brings an offloaded memory to the device; it stays there until the rings are stored.
    fn take(&mut self, inputs: &Tensor<3>) -> Result<StateRings> {
        let [given, tokens, _] = inputs.dims();
        if let Some(rows) = self.rows().filter(|&rows| rows != given) {
            return Err(Error::WrongRows { rows, given });
        }
        self.fetch()?;
        let Self { policy, at, tensors, device, .. } = self;
        tensors.inputs_before.clear();
        tensors.states_before.clear();
        at.counts.before = None;
        let held = tensors.inputs.take()?.zip(tensors.states.take()?).filter(|_| at.seq_len > 0);
        let [slots, more] = policy.need.slots(at.history);
        let Some((inputs, states)) = held else {
            at.counts.oldest = 0;
            return Ok(policy.rings([given, slots, more], inputs.dtype(), device));
        };
        let mut rings = StateRings { inputs, states };
        if rings.states.dims()[2] < more {
            rings = policy.resized(at, rings, at.history);
        }
        if tokens > at.history {
            // The rings that are handed out are then copied when they are written.
            tensors.inputs_before.set(rings.inputs.clone());
            tensors.states_before.set(rings.states.clone());
            at.counts.before = Some((at.counts.oldest, at.seq_len));
        }
        Ok(rings)
    }

    fn store(&mut self, StateRings { inputs, states }: StateRings, tokens: usize) -> Result<()> {
        self.on_device(|policy, at, tensors| {
            let (slots, more) = (inputs.dims()[2], states.dims()[2]);
            tensors.inputs.set_written(inputs, written(at.seq_len, tokens, slots));
            tensors.states.set_written(states, written(at.seq_len + 1, tokens, more));
            policy.advance(at, more, tokens);
            Ok(())
        })
    }

    /// A recording keeps its buffers, so it cannot be replayed with an offloaded memory, with rings that are
    /// about to grow, or with rings that are kept for truncation.
    fn replayable(&self) -> usize {
        let [_, slots] = self.policy.need.slots(self.at.history);
        let stay = self.at.history > 0 && self.tensors.states.tokens() >= slots;
        if stay && self.host.is_none() { usize::MAX } else { 0 }
    }

    fn replayed(&mut self) {
        self.policy.advance(&mut self.at, self.tensors.states.tokens(), 1);
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
    fn take(&mut self, inputs: &Tensor<3>) -> Result<StateRings> {
        let need = self.policy.need.clone();
        let [slots, more] = need.slots(0);
        Ok(Recurrent { need }.rings([inputs.dims()[0], slots, more], inputs.dtype(), &self.device))
    }

    fn store(&mut self, _: StateRings, _tokens: usize) -> Result<()> {
        Ok(())
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
    fn a_ring_that_becomes_larger_or_smaller_keeps_the_latest() {
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
    fn slots_that_were_written_are_named_once() {
        assert_eq!(written(7, 2, 5), [2..4, 0..0]);
        assert_eq!(written(9, 3, 5), [4..5, 0..2]);
        assert_eq!(written(9, 5, 5), [0..5, 0..0]);
    }
}
