//! The memory of one block, in the semantics of the paper.
//!
//! Only distances count for rotary positions. So the kept tokens stay where they are, and copies of the sinks follow
//! them instead: a few keys a step, always turned from the originals, so that no error gathers. When the tokens have
//! drifted to the end of the buffer, all of them are moved back, once in many steps.
//!
//! ```text
//! slot:  0 ...... shift ........................ shift + held ...... window + slack + history
//!        free     sinks (copies) | kept tokens | free
//! ```

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Slot, Touched},
    view::{DenseKv, KvView},
};
use kiln_kernels::Kernels;

use super::rotation::Rotation;
use crate::{
    buffer::{Buffer, Lives},
    restored,
};

type Pair = (Tensor<4>, Tensor<4>);

#[derive(Clone, Debug)]
pub(super) struct SinkLayer {
    /// Slots are positions; those from `shift` to `shift + held` count.
    buffer: Buffer,
    /// Keys and values of the sinks, the keys as rotated for the positions from 0 on; there once something was evicted.
    originals: Slot<Pair>,
    /// The latest tokens that were evicted, as many as may have to come back; keys as rotated where they stood.
    evicted: Slot<Pair>,
    evicted_len: usize,
    window: usize,
    sinks: usize,
    slack: usize,
    history: usize,
    shift: usize,
    held: usize,
    seq_len: usize,
    rotation: Rotation,
}

impl SinkLayer {
    pub(super) fn new([window, sinks, slack]: [usize; 3], need: &AttentionNeed, kernels: &Kernels) -> Self {
        Self {
            buffer: Buffer::new(need, kernels),
            originals: Slot::Empty,
            evicted: Slot::Empty,
            evicted_len: 0,
            window,
            sinks,
            slack,
            history: 0,
            shift: 0,
            held: 0,
            seq_len: 0,
            rotation: Rotation::new(need, kernels),
        }
    }

    /// Tokens that `n` more push out.
    fn pushed_out(&self, n: usize) -> usize {
        (self.held + n).saturating_sub(self.window)
    }

    /// Where the window begins before `n` more tokens are written: back where it can begin, if they have no place.
    fn shift_for(&self, n: usize) -> usize {
        let full = self.shift + self.held + n > self.window + self.slack + self.history;
        if full { self.shift.min(self.history) } else { self.shift }
    }

    /// Slots of the buffer once it was fed up to position `end`.
    fn slots_for(&self, end: usize) -> usize {
        let most = self.window + self.slack + self.history;
        match self.buffer.slots() {
            slots if end <= slots => slots,
            slots => (end + 1).next_power_of_two().min(most).max(slots),
        }
    }

    /// Moves the window to begin at `to`; the sinks are still to be placed.
    fn move_to(&mut self, to: usize) -> Result<()> {
        let by = to as i64 - self.shift as i64;
        let kept = KvSpan { start: self.shift + self.sinks, len: self.held.saturating_sub(self.sinks) };
        if kept.len > 0 {
            let (keys, values) = self.buffer.in_order(kept)?;
            let (keys, values) = (self.rotation.shift(own(keys), by), own(values));
            let at = Place::new(to + self.sinks, &[], &keys.device());
            self.buffer.write(keys, values, &at)?;
        }
        if let Some((keys, values)) = self.evicted.take()? {
            self.evicted = Slot::Here((self.rotation.shift(keys, by), values));
        }
        self.shift = to;
        Ok(())
    }

    /// Remembers the `n` oldest of the kept tokens, as far as they may have to come back.
    fn evict(&mut self, n: usize) -> Result<()> {
        let remembered = n.min(self.history);
        if remembered > 0 {
            let start = self.shift + self.sinks + n - remembered;
            let (keys, values) = self.buffer.in_order(KvSpan { start, len: remembered })?;
            let (mut keys, mut values) = (own(keys), own(values));
            let before = self.evicted_len.min(self.history - remembered);
            if let Some((k, v)) = self.evicted.take()?
                && before > 0
            {
                let tail = |t: Tensor<4>| t.narrow(2, self.evicted_len - before, before);
                (keys, values) = (Tensor::cat(vec![tail(k), keys], 2), Tensor::cat(vec![tail(v), values], 2));
            }
            self.evicted = Slot::Here((keys, values));
            self.evicted_len = before + remembered;
        }
        if self.sinks > 0 && self.originals.get()?.is_none() {
            // The first eviction: they are still where they were written.
            let (keys, values) = self.buffer.in_order(KvSpan { start: 0, len: self.sinks })?;
            self.originals = Slot::Here((own(keys), own(values)));
        }
        self.shift += n;
        Ok(())
    }

    /// Puts copies of the sinks in front of the kept tokens.
    fn place_sinks(&mut self) -> Result<()> {
        if let Some((keys, values)) = self.originals.get()?.cloned() {
            let at = Place::new(self.shift, &[], &keys.device());
            let keys = self.rotation.shift(keys, self.shift as i64);
            self.buffer.write(keys, values, &at)?;
        }
        Ok(())
    }

    /// Evictions that forgetting `n` tokens undoes.
    fn undone(&self, n: usize) -> usize {
        let evicted = self.seq_len - self.held;
        evicted - (self.seq_len - n).saturating_sub(self.window).min(evicted)
    }
}

/// A copy with memory of its own, so that the buffer it was cut from has one owner again.
fn own(tensor: Tensor<4>) -> Tensor<4> {
    tensor * 1.0
}

impl KvLayer for SinkLayer {
    fn span(&self, n: usize) -> KvSpan {
        let pushed_out = self.pushed_out(n);
        KvSpan { start: self.shift_for(n) + pushed_out, len: self.held + n - pushed_out }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        let n = keys.dims()[2];
        self.admits(n, place.left_pad.is_some())?;
        self.buffer.check(&keys, self.held)?;
        let (pushed_out, span, shift) = (self.pushed_out(n), self.span(n), self.shift_for(n));
        let moved = shift != self.shift;
        if moved {
            self.move_to(shift)?;
        }
        let end = self.shift + self.held + n;
        if self.held == 0 || end > self.buffer.slots() {
            let slots = self.slots_for(end);
            self.buffer.resize(slots, self.shift + self.held, [&keys, &values], Lives::UntilItGrows)?;
        }
        self.buffer.write(keys, values, place)?;
        if pushed_out > 0 {
            self.evict(pushed_out)?;
        }
        if moved || pushed_out > 0 {
            self.place_sinks()?;
        }
        self.held += n - pushed_out;
        self.seq_len += n;
        let (keys, values) = self.buffer.get()?;
        Ok(KvView::Dense(DenseKv { keys, values, start: span.start, origin: 0 }))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.buffer.dense(self.span(0))
    }

    fn at_once(&self) -> Option<usize> {
        // As long as nothing is evicted, the window; then a part of it, for a query misses what its chunk evicted.
        let room = self.window - self.held;
        Some(room.max((self.window - self.sinks).div_ceil(4).min(self.slack)))
    }

    fn is_endless(&self) -> bool {
        true
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for SinkLayer {
    fn name(&self) -> &'static str {
        "sink"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn admits(&self, n: usize, padded: bool) -> Result<()> {
        if padded {
            return Err(Error::Prompt {
                why: "rows of different lengths cannot share the sinks of a sink cache; run them one by one, or use \
                      another cache"
                    .to_owned(),
            });
        }
        let most = self.at_once().unwrap_or(usize::MAX);
        if n > most { Err(Error::TooManyAtOnce { given: n, most }) } else { Ok(()) }
    }

    fn can_roll_back(&self, n: usize) -> bool {
        n <= self.seq_len && self.undone(n) <= self.evicted_len
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        let undone = self.undone(n);
        if undone > 0
            && let Some((keys, values)) = self.evicted.get()?.cloned()
        {
            self.buffer.get()?;
            let stay = self.evicted_len - undone;
            let cut = |t: &Tensor<4>, from, len| own(t.clone().narrow(2, from, len));
            let at = Place::new(self.shift - undone + self.sinks, &[], &keys.device());
            self.buffer.write(cut(&keys, stay, undone), cut(&values, stay, undone), &at)?;
            self.evicted = match stay {
                0 => Slot::Empty,
                stay => Slot::Here((cut(&keys, 0, stay), cut(&values, 0, stay))),
            };
            self.evicted_len = stay;
            self.shift -= undone;
            self.place_sinks()?;
        }
        self.seq_len -= n;
        self.held -= n - undone;
        Ok(())
    }

    fn keep_history(&mut self, n: usize) {
        self.history = self.history.max(n);
    }

    fn reset(&mut self) {
        self.buffer.truncate(0);
        (self.originals, self.evicted) = (Slot::Empty, Slot::Empty);
        (self.shift, self.held, self.seq_len, self.evicted_len) = (0, 0, 0, 0);
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        let end = self.shift_for(feed.tokens) + self.held + feed.tokens;
        let Footprint { held, passing, .. } = self.buffer.footprint(self.slots_for(end), feed);
        // Sinks and evicted tokens are held besides; the window is copied when it is moved back.
        let token = self.buffer.need().token_bytes(feed.element).saturating_mul(feed.rows);
        let beside = token.saturating_mul(self.sinks + self.history);
        let held = held.saturating_add(beside);
        Footprint { held, largest: held, passing: passing + token.saturating_mul(self.window) }
    }

    fn compact(&mut self) {
        self.buffer.truncate(self.shift + self.held);
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.shift, self.held, self.seq_len, self.evicted_len, self.history]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([shift, held, seq_len, evicted_len, history], [kv, originals, evicted]) =
            restored::parts(state)?;
        let need = self.buffer.need();
        let has_evicted = seq_len > held;
        let sinks = restored::tokens(&originals, need)?;
        let possible = held <= self.window.min(seq_len)
            && shift + held <= restored::tokens(&kv, need)?
            && shift + held <= self.window + self.slack + history
            && evicted_len <= history
            && restored::tokens(&evicted, need)? == evicted_len
            && (sinks == self.sinks || sinks == 0 && !has_evicted)
            && (!has_evicted || held >= self.sinks);
        restored::check(possible)?;
        self.buffer.restore(kv, device)?;
        self.originals.restore(originals, device)?;
        self.evicted.restore(evicted, device)?;
        (self.shift, self.held, self.seq_len) = (shift, held, seq_len);
        (self.evicted_len, self.history) = (evicted_len, history.max(self.history));
        Ok(())
    }

    /// The originals are written once, where there were none.
    fn touched(&mut self) -> Vec<Touched> {
        vec![self.buffer.touched(), Touched::Nothing, Touched::Everything]
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![self.buffer.slot(), &self.originals, &self.evicted]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![self.buffer.slot_mut(), &mut self.originals, &mut self.evicted]
    }
}
