//! Transformers' rule (`QuantizedCache`): a prompt is packed whole; when there are as many recent tokens as
//! the residual, the whole history is packed again with them, in new groups.
//!
//! Errors accumulate, and every step unpacks everything: this exists to reproduce the results of
//! transformers.

use std::collections::VecDeque;

use burn::tensor::DType;
use kiln_core::{
    Result,
    layer::{Footprint, Kv, Limits, Positions, StepShape},
    need::{AttentionNeed, Stream},
    slot::{AnySlot, Slot, Tensors as _},
    view::KvView,
};
use serde::{Deserialize, Serialize};

use super::{
    Compat, QuantizedSettings,
    history::{History, Packed},
};
use crate::{
    buffer::{self, behind, narrow},
    memory::{KvPolicy, Policy, Progress, TensorTree, check, tensor_tree},
    quantizers::Backend,
};

#[derive(Clone, Debug)]
pub(super) struct RequantizePolicy {
    pub(super) settings: QuantizedSettings,
    pub(super) backend: &'static dyn Backend,
    pub(super) need: AttentionNeed,
}

/// States that a truncation may return to, oldest first; the last one is the present. Empty before the first
/// token.
pub(super) type States = VecDeque<State>;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    seq_len: usize,
    /// Number of these tokens that are recent.
    fresh: usize,
}

impl State {
    /// Length of the shortest sequence that the state can return to.
    fn from(&self) -> usize {
        // The packed part is packed as a whole.
        self.seq_len - self.fresh
    }

    fn reaches(&self, len: usize) -> bool {
        (self.from().max(1)..=self.seq_len).contains(&len)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Tensors(VecDeque<StateTensors>);

#[derive(Clone, Debug, Default)]
struct StateTensors {
    packed: Slot<(History, History)>,
    recent: Slot<Kv>,
}

tensor_tree!(StateTensors { packed, recent });

impl TensorTree for Tensors {
    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.0.iter().flat_map(TensorTree::slots).collect()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.0.iter_mut().flat_map(TensorTree::slots_mut).collect()
    }
}

type At = Progress<States>;

impl RequantizePolicy {
    fn dense(&self, state: &StateTensors) -> Result<Option<Kv>> {
        let packed = state.packed.get()?.map(|(keys, values)| {
            let [key, value] = self.recipes(keys.dtype());
            (keys.unpack(&key), values.unpack(&value))
        });
        Ok(match state.recent.get()?.cloned() {
            Some(recent) => Some(behind(packed, recent)),
            None => packed,
        })
    }

    fn pack(&self, (keys, values): Kv) -> (History, History) {
        let [key, value] = self.recipes(keys.dtype());
        (History::pack(keys, &key), History::pack(values, &value))
    }

    /// Returns how keys and values of type `dtype` are packed.
    fn recipes(&self, dtype: DType) -> [Packed; 2] {
        let recipes = self.settings.recipes(dtype);
        [0, 1].map(|which| Packed {
            backend: self.backend,
            recipe: recipes[which],
            grouping: self.settings.grouping(which),
            group: self.settings.group,
        })
    }

    fn validate_state(&self, state: &State, tensors: &StateTensors) -> Result<()> {
        check(state.fresh <= state.seq_len)?;
        check(buffer::validate(&tensors.recent, &self.need)? == state.fresh)?;
        let Some((keys, values)) = tensors.packed.get()? else { return check(state.from() == 0) };
        let [key, value] = self.recipes(keys.dtype());
        let fits = keys.fits(&key, self.need.keys) && values.fits(&value, self.need.values);
        let alike = |other: &History| {
            (keys.tokens(), keys.rows(), keys.dtype()) == (other.tokens(), other.rows(), other.dtype())
        };
        let recent = tensors.recent.dtype().is_none_or(|dtype| dtype == keys.dtype());
        check(fits && alike(values) && recent && keys.tokens() == state.from())
    }
}

impl Policy for RequantizePolicy {
    const NAME: &'static str = "quantized";
    type Counts = States;
    type Tensors = Tensors;

    fn empty(&self, states: &States) -> Tensors {
        Tensors(states.iter().map(|_| StateTensors::default()).collect())
    }

    /// In every step the whole history also exists unpacked, and once more while it is packed.
    fn footprint(&self, at: &At, _: &Tensors, step: &StepShape) -> Footprint {
        let tokens = at.seq_len + step.tokens;
        let all = self.need.token_bytes(step.element).saturating_mul(step.rows).saturating_mul(tokens);
        let packed = self.settings.repacked_bytes(&self.need, tokens, step.element);
        let [keys, values] = packed.map(|bytes| bytes.saturating_mul(step.rows));
        let held = keys.saturating_add(values);
        Footprint { held, largest: keys.max(values), passing: all.saturating_mul(2) }
    }

    fn rewind_point(&self, at: &At, at_most: usize) -> Option<usize> {
        let known = at.counts.iter().rev().find(|state| state.from().max(1) <= at_most);
        known.map(|state| state.seq_len.min(at_most))
    }

    fn rewind(&self, at: &mut At, tensors: &mut Tensors, len: usize) -> Result<()> {
        while at.counts.back().is_some_and(|state| !state.reaches(len)) {
            at.counts.pop_back();
            tensors.0.pop_back();
        }
        if let (Some(state), Some(tensors)) = (at.counts.back_mut(), tensors.0.back_mut()) {
            state.fresh -= state.seq_len - len;
            state.seq_len = len;
            match tensors.recent.take()? {
                Some(kv) if state.fresh > 0 => tensors.recent.set(narrow(&kv, 0, state.fresh)),
                _ => tensors.recent.clear(),
            }
        }
        Ok(())
    }

    fn validate(&self, at: &At, tensors: &Tensors) -> Result<()> {
        check(at.counts.back().map_or(0, |state| state.seq_len) == at.seq_len)?;
        let mut states = at.counts.iter().zip(&tensors.0);
        states.try_for_each(|(state, tensors)| self.validate_state(state, tensors))
    }
}

impl KvPolicy for RequantizePolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn limits(&self, _: &At) -> Limits {
        Limits { by_pass: true, ..Limits::default() }
    }

    fn append(&self, at: &mut At, tensors: &mut Tensors, new: Kv, _: &Positions) -> Result<KvView> {
        let n = new.0.dims()[2];
        let now = at.counts.back().copied().unwrap_or_default();
        let before = tensors.0.back().cloned().unwrap_or_default();
        let (mut next, mut next_tensors) =
            (State { seq_len: now.seq_len + n, ..now }, StateTensors::default());
        let all = behind(self.dense(&before)?, new.clone());
        // 4.47 counts a chunk as one token, and the first chunk after a packed history as none.
        next.fresh += n;
        let full = match self.settings.compat {
            None => next.fresh >= self.settings.residual,
            Some(Compat::V4_47) => now.fresh > 0 && now.fresh + 1 >= self.settings.residual,
        };
        if now.seq_len == 0 || full {
            next_tensors.packed.set(self.pack(all.clone()));
            next.fresh = 0;
        } else {
            next_tensors.packed = before.packed;
            next_tensors.recent.set(behind(before.recent.get()?.cloned(), new));
        }
        at.counts.push_back(next);
        tensors.0.push_back(next_tensors);

        // An older state is useful until the one after it reaches back as far as was promised.
        let target = next.seq_len.saturating_sub(at.history.max(1));
        let useful = at.counts.iter().rposition(|state| state.from().max(1) <= target).unwrap_or(0);
        at.counts.drain(..useful);
        tensors.0.drain(..useful);
        // The tensors are in other slots now.
        tensors.slots_mut().into_iter().for_each(AnySlot::mark_dirty);
        Ok(KvView::from_zero(all.0, all.1))
    }

    fn gather(&self, _: &At, tensors: &Tensors) -> Result<Option<Kv>> {
        tensors.0.back().map_or(Ok(None), |now| self.dense(now))
    }
}
