//! A state of constant size, with a trail of past states to return to.

use std::collections::VecDeque;

use kiln_core::{
    Result,
    layer::{SsmState, StateLayer},
    slot::{AnySlot, Slot},
};

use super::{Memory, Policy, Progress, TensorTree, check};

#[derive(Clone, Debug)]
pub(crate) struct Trail;

/// Tokens that each earlier state had seen, oldest first.
type Lens = VecDeque<usize>;

#[derive(Clone, Debug, Default)]
pub(crate) struct States {
    /// As many as the trail has, oldest first.
    past: VecDeque<Slot<SsmState>>,
    current: Slot<SsmState>,
}

impl TensorTree for States {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.past.iter().chain([&self.current]).map(|slot| slot as &dyn AnySlot).collect()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.past.iter_mut().chain([&mut self.current]).map(|slot| slot as &mut dyn AnySlot).collect()
    }
}

impl Policy for Trail {
    const NAME: &'static str = "recurrent";
    type Counts = Lens;
    type Tensors = States;

    fn empty(&self, trail: &Lens) -> States {
        States { past: trail.iter().map(|_| Slot::default()).collect(), current: Slot::default() }
    }

    /// A recurrence cannot be undone, only left: for a state that was kept.
    fn rewind_point(&self, at: &Progress<Lens>, at_most: usize) -> Option<usize> {
        at.counts.iter().copied().chain([at.seq_len]).filter(|&len| len <= at_most).max()
    }

    fn rewind(&self, at: &mut Progress<Lens>, states: &mut States, len: usize) -> Result<()> {
        while at.counts.back().is_some_and(|&past| past >= len)
            && let (Some(_), Some(state)) = (at.counts.pop_back(), states.past.pop_back())
        {
            states.current = state;
        }
        Ok(())
    }

    /// A file is a place to go on from, not to return before.
    fn trim(&self, at: &mut Progress<Lens>, states: &mut States) -> Result<()> {
        at.counts.clear();
        states.past.clear();
        Ok(())
    }

    fn validate(&self, at: &Progress<Lens>, states: &States) -> Result<()> {
        check(states.current.dtype().is_some() == (at.seq_len > 0) && at.counts.is_empty())
    }
}

impl StateLayer for Memory<Trail> {
    /// In host memory, it is on the device from here on until the new state is stored.
    fn state(&mut self) -> Result<Option<SsmState>> {
        self.fetch()?;
        Ok(self.tensors.current.get()?.cloned())
    }

    fn store(&mut self, state: SsmState, tokens: usize) -> Result<()> {
        self.on_device(|_, at, states| {
            states.past.push_back(std::mem::take(&mut states.current));
            states.current.set(state);
            at.counts.push_back(at.seq_len);
            at.seq_len += tokens;
            // The oldest state worth keeping is the latest one `history` tokens or more ago.
            let oldest = at.seq_len.saturating_sub(at.history);
            let kept = at.counts.iter().rposition(|&len| len <= oldest && at.history > 0);
            let dropped = kept.unwrap_or(if at.history > 0 { 0 } else { at.counts.len() });
            at.counts.drain(..dropped);
            states.past.drain(..dropped);
            if dropped > 0 {
                // They are in other places now.
                states.slots_mut().into_iter().for_each(AnySlot::mark_dirty);
            }
            Ok(())
        })
    }

    fn snapshot(&self) -> Box<dyn StateLayer> {
        Box::new(self.clone())
    }
}
