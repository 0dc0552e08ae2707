//! Transformers' rule (`QuantizedCache`): a prompt is packed whole; when the recent tokens are as many as the residual,
//! the whole history is packed again with them, in groups that are cut anew.
//!
//! Error adds up, and every step unpacks everything: this is here to give what transformers gives.

use std::collections::VecDeque;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Slot, Tensors},
    view::KvView,
};

use super::{
    Settled,
    history::{History, Packed},
};
use crate::{quantizers::Backend, restored};

#[derive(Clone, Debug)]
pub(super) struct RequantizeLayer {
    settled: Settled,
    backend: &'static dyn Backend,
    need: AttentionNeed,
    /// The present, and before it the states that a roll-back may return to, oldest first.
    states: VecDeque<State>,
    /// Tokens that can be rolled back at any time, at least 1.
    history: usize,
}

#[derive(Clone, Debug, Default)]
struct State {
    packed: Slot<(History, History)>,
    recent: Slot<(Tensor<4>, Tensor<4>)>,
    seq_len: usize,
    /// How many of them are recent.
    fresh: usize,
}

impl State {
    /// Whether it still knows the sequence as it was at `len` tokens.
    fn reaches(&self, len: usize) -> bool {
        (self.seq_len - self.fresh..=self.seq_len).contains(&len) && (len > 0 || self.seq_len == self.fresh)
    }

    fn rewind(&mut self, len: usize) {
        self.fresh -= self.seq_len - len;
        self.seq_len = len;
        let recent = std::mem::take(&mut self.recent);
        self.recent = match recent {
            Slot::Here(_) if self.fresh == 0 => Slot::Empty,
            Slot::Here((keys, values)) => {
                Slot::Here((keys.narrow(2, 0, self.fresh), values.narrow(2, 0, self.fresh)))
            }
            other => other,
        };
        if len == 0 {
            self.packed = Slot::Empty;
        }
    }
}

impl RequantizeLayer {
    pub(super) fn new(settled: &Settled, backend: &'static dyn Backend, need: &AttentionNeed) -> Self {
        let states = VecDeque::from([State::default()]);
        Self { settled: settled.clone(), backend, need: need.clone(), states, history: 1 }
    }

    fn now(&self) -> &State {
        // There is always the present.
        &self.states[self.states.len() - 1]
    }

    fn dense(&self, state: &State) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        let packed = state.packed.get()?.map(|(keys, values)| {
            let [key, value] = self.recipes(keys.dtype());
            (keys.unpack(&key), values.unpack(&value))
        });
        let recent = state.recent.get()?.cloned();
        let join = |a, b| Tensor::cat(vec![a, b], 2);
        Ok(match (packed, recent) {
            (Some((k, v)), Some((keys, values))) => Some((join(k, keys), join(v, values))),
            (packed, recent) => packed.or(recent),
        })
    }

    fn pack(&self, keys: Tensor<4>, values: Tensor<4>) -> Slot<(History, History)> {
        let [key, value] = self.recipes(keys.dtype());
        Slot::Here((History::pack(keys, &key), History::pack(values, &value)))
    }

    /// How keys and values of type `dtype` are packed.
    fn recipes(&self, dtype: DType) -> [Packed; 2] {
        let recipes = self.settled.recipes(dtype);
        [0, 1].map(|which| Packed {
            backend: self.backend,
            recipe: recipes[which],
            grouping: self.settled.grouping(which),
            group: self.settled.group,
        })
    }
}

impl KvLayer for RequantizeLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: self.seq_len() + n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, _place: &Place) -> Result<KvView> {
        let n = keys.dims()[2];
        let now = self.now();
        let rows = match (now.packed.get()?, now.recent.get()?) {
            (Some((packed, _)), _) => Some(packed.rows()),
            (None, recent) => recent.map(|(keys, _)| keys.dims()[0]),
        };
        if let Some(rows) = rows.filter(|&rows| rows != keys.dims()[0]) {
            return Err(Error::WrongRows { rows, given: keys.dims()[0] });
        }
        let mut next = State { seq_len: now.seq_len + n, ..now.clone() };
        let all = match self.dense(now)? {
            None => (keys, values),
            Some((old_keys, old_values)) => {
                let recent = match now.recent.get()?.cloned() {
                    None => (keys.clone(), values.clone()),
                    Some((k, v)) => {
                        (Tensor::cat(vec![k, keys.clone()], 2), Tensor::cat(vec![v, values.clone()], 2))
                    }
                };
                (next.recent, next.fresh) = (Slot::Here(recent), now.fresh + n);
                (Tensor::cat(vec![old_keys, keys], 2), Tensor::cat(vec![old_values, values], 2))
            }
        };
        // 4.47 counts a chunk as one token, and the first behind a packed history as none.
        let full = match self.settled.compat {
            false => next.fresh >= self.settled.residual,
            true => now.fresh > 0 && now.fresh + 1 >= self.settled.residual,
        };
        if now.seq_len == 0 || full {
            next.packed = self.pack(all.0.clone(), all.1.clone());
            (next.recent, next.fresh) = (Slot::Empty, 0);
        }

        // An older state is of use until the one after it reaches back as far as was promised.
        let target = next.seq_len.saturating_sub(self.history);
        self.states.push_back(next);
        while self.states.len() > 1 && self.states.range(1..).any(|state| state.reaches(target)) {
            self.states.pop_front();
        }
        Ok(KvView::from_zero(all.0, all.1))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.dense(self.now())
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for RequantizeLayer {
    fn name(&self) -> &'static str {
        "quantized"
    }

    fn seq_len(&self) -> usize {
        self.now().seq_len
    }

    fn can_roll_back(&self, n: usize) -> bool {
        let target = self.seq_len().checked_sub(n);
        target.is_some_and(|target| self.states.iter().any(|state| state.reaches(target)))
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        let target = self.seq_len() - n;
        while self.states.len() > 1 && !self.now().reaches(target) {
            self.states.pop_back();
        }
        if let Some(state) = self.states.back_mut() {
            state.rewind(target);
        }
        Ok(())
    }

    fn keep_history(&mut self, n: usize) {
        self.history = self.history.max(n);
    }

    fn reset(&mut self) {
        self.states = VecDeque::from([State::default()]);
    }

    fn counts(&self) -> Vec<usize> {
        let states = self.states.iter().flat_map(|state| [state.seq_len, state.fresh]);
        std::iter::once(self.history).chain(states).collect()
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let LayerState { counts, slots } = state;
        let [history, ref counts @ ..] = counts[..] else {
            return Err(restored::wrong("it is the state of another kind of cache"));
        };
        let fits = counts.len() == slots.len() && !counts.is_empty() && counts.len().is_multiple_of(2);
        restored::check(fits && counts.iter().all(|&count| count < restored::MOST_TOKENS))?;
        let mut slots = slots.into_iter();
        let mut states = VecDeque::new();
        for pair in counts.chunks_exact(2) {
            let (seq_len, fresh) = (pair[0], pair[1]);
            let (packed, recent) = (slots.next().unwrap_or_default(), slots.next().unwrap_or_default());
            restored::check(fresh <= seq_len && restored::tokens(&recent, &self.need)? == fresh)?;
            let old = History::check(&packed, &self.settled, &self.need)?;
            let alike =
                |data: &TensorData| old.rows == 0 || (data.shape()[0], data.dtype()) == (old.rows, old.dtype);
            restored::check(old.tokens == seq_len - fresh && recent.iter().all(alike))?;
            let mut state = State { seq_len, fresh, ..State::default() };
            state.packed.restore(packed, device)?;
            state.recent.restore(recent, device)?;
            states.push_back(state);
        }
        (self.states, self.history) = (states, history.max(self.history));
        Ok(())
    }

    /// At every step all of it is there as numbers, too, and once more while it is packed.
    fn footprint(&self, feed: &Feed) -> Footprint {
        let tokens = self.seq_len() + feed.tokens;
        let all = self.need.token_bytes(feed.element).saturating_mul(feed.rows).saturating_mul(tokens);
        let packed = self.settled.repacked_bytes(&self.need, tokens, feed.element).saturating_mul(feed.rows);
        Footprint { held: packed, largest: packed, passing: all.saturating_mul(2) }
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        let slots = self.states.iter().flat_map(|state| [&state.packed as &dyn AnySlot, &state.recent]);
        slots.collect()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        let states = self.states.iter_mut();
        states.flat_map(|state| [&mut state.packed as &mut dyn AnySlot, &mut state.recent]).collect()
    }
}
