//! The memory of one block, with the semantics of the paper.
//!
//! Only distances matter for rotary positions. So the kept tokens stay where they are, and copies of the
//! sinks follow them instead: a few keys per step, always rotated from the originals, so that no error
//! accumulates. When the tokens have drifted to the end of the buffer, all of them are moved back, once in
//! many steps.
//!
//! ```text
//! slot:  0 ...... shift ........................ shift + held ...... window + slack + history
//!        free     sinks (copies) | kept tokens | free
//! ```

use kiln_core::{
    Error, Result,
    layer::{Footprint, Kv, KvSpan, Limits, Positions, StepShape},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::KvView,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use super::rotation::Rotation;
use crate::{
    buffer::{self, Buffer, Lifetime, behind, narrow},
    memory::{KvPolicy, Policy, Progress, check, tensor_tree},
};

#[derive(Clone, Debug)]
pub(super) struct SinkPolicy {
    pub(super) need: AttentionNeed,
    pub(super) kernels: Kernels,
    pub(super) rotation: Rotation,
    /// Number of tokens held, including sinks.
    pub(super) window: usize,
    pub(super) sinks: usize,
    /// Number of positions beyond the window that tokens may drift to before they are moved back.
    pub(super) slack: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    shift: usize,
    held: usize,
    /// Number of evicted tokens that can be restored.
    remembered: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Tensors {
    /// Slots are positions; those from `shift` to `shift + held` are valid.
    buffer: Buffer,
    /// Keys and values of the sinks, with keys rotated for the positions from 0 on. Empty before the first
    /// eviction.
    originals: Slot<Kv>,
    /// Latest evicted tokens, as many as may have to be restored, with keys rotated for the positions where
    /// they were.
    evicted: Slot<Kv>,
}

tensor_tree!(Tensors { buffer, originals, evicted });

type At = Progress<Counts>;

impl SinkPolicy {
    /// Number of tokens that `n` more tokens evict.
    fn pushed_out(&self, at: &At, n: usize) -> usize {
        (at.counts.held + n).saturating_sub(self.window)
    }

    /// Number of slots of the longest buffer.
    fn most(&self, at: &At) -> usize {
        self.window + self.slack + at.history
    }

    /// Start of the window before `n` more tokens are written: moved back as far as possible if there is no
    /// room for them.
    fn shift_for(&self, at: &At, n: usize) -> usize {
        let Counts { shift, held, .. } = at.counts;
        if shift + held + n > self.most(at) { shift.min(at.history) } else { shift }
    }

    /// Number of slots of the buffer once it was fed up to position `end`.
    fn slots_for(&self, at: &At, end: usize, buffer: &Buffer) -> usize {
        match buffer.slots() {
            slots if end <= slots => slots,
            slots => (end + 1).next_power_of_two().min(self.most(at)).max(slots),
        }
    }

    /// Moves the window to begin at `to`; the sinks must still be placed.
    fn move_to(&self, at: &mut At, tensors: &mut Tensors, to: usize) -> Result<()> {
        let Counts { shift, held, .. } = at.counts;
        let by = to as i64 - shift as i64;
        let kept = KvSpan { start: shift + self.sinks, len: held.saturating_sub(self.sinks) };
        if let Some(kept) = tensors.buffer.gather(kept)? {
            let (keys, values) = own(kept);
            let turned = (self.rotation.shift(keys, by), values);
            tensors.buffer.write_from(&self.kernels, turned, to + self.sinks)?;
        }
        if let Some((keys, values)) = tensors.evicted.take()? {
            tensors.evicted.set((self.rotation.shift(keys, by), values));
        }
        at.counts.shift = to;
        Ok(())
    }

    /// Evicts the `n` oldest kept tokens, and remembers those that may have to be restored.
    fn evict(&self, at: &mut At, tensors: &mut Tensors, n: usize) -> Result<()> {
        let remembered = n.min(at.history);
        if remembered > 0 {
            let start = at.counts.shift + self.sinks + n - remembered;
            let mut evicted = own(tensors.buffer.in_order(KvSpan { start, len: remembered })?);
            let have = at.counts.remembered;
            let before = have.min(at.history - remembered);
            if let Some(old) = tensors.evicted.take()?
                && before > 0
            {
                evicted = behind(Some(narrow(&old, have - before, before)), evicted);
            }
            tensors.evicted.set(evicted);
            at.counts.remembered = before + remembered;
        }
        if self.sinks > 0 && tensors.originals.get()?.is_none() {
            // At the first eviction the sinks are still where they were written.
            let sinks = tensors.buffer.in_order(KvSpan { start: 0, len: self.sinks })?;
            tensors.originals.set(own(sinks));
        }
        at.counts.shift += n;
        Ok(())
    }

    /// Places copies of the sinks before the kept tokens.
    fn place_sinks(&self, at: &At, tensors: &mut Tensors) -> Result<()> {
        if let Some((keys, values)) = tensors.originals.get()?.cloned() {
            let shift = at.counts.shift;
            let turned = (self.rotation.shift(keys, shift as i64), values);
            tensors.buffer.write_from(&self.kernels, turned, shift)?;
        }
        Ok(())
    }

    /// Number of evictions that returning to `len` tokens undoes.
    fn undone(&self, at: &At, len: usize) -> usize {
        let evicted = at.seq_len - at.counts.held;
        evicted - len.saturating_sub(self.window).min(evicted)
    }
}

/// Copies to new memory, so that the original buffer has a single owner again.
fn own((keys, values): Kv) -> Kv {
    (keys * 1.0, values * 1.0)
}

impl Policy for SinkPolicy {
    const NAME: &'static str = "sink";
    type Counts = Counts;
    type Tensors = Tensors;

    fn admits(&self, at: &At, tokens: usize, padded: bool) -> Result<()> {
        if padded {
            return Err(Error::Prompt {
                why: "a sink cache holds no padding; feed rows of different lengths without it (`Batch::ragged`)"
                    .to_owned(),
            });
        }
        match self.limits(at).at_once {
            Some(most) if tokens > most => Err(Error::TooManyAtOnce { given: tokens, most }),
            _ => Ok(()),
        }
    }

    fn footprint(&self, at: &At, tensors: &Tensors, step: &StepShape) -> Footprint {
        let end = self.shift_for(at, step.tokens) + at.counts.held + step.tokens;
        let slots = self.slots_for(at, end, &tensors.buffer);
        let Footprint { held, largest, passing } =
            buffer::footprint(&self.need, tensors.buffer.slots(), slots, step);
        // Sinks and evicted tokens are held in addition; the window is copied when it is moved back.
        let token = self.need.token_bytes(step.element).saturating_mul(step.rows);
        let held = held.saturating_add(token.saturating_mul(self.sinks + at.history));
        Footprint { held, largest, passing: passing + token.saturating_mul(self.window) }
    }

    /// As many evictions can be undone as tokens were remembered.
    fn rewind_point(&self, at: &At, at_most: usize) -> Option<usize> {
        (self.undone(at, at_most) <= at.counts.remembered.min(at.counts.shift)).then_some(at_most)
    }

    fn rewind(&self, at: &mut At, tensors: &mut Tensors, len: usize) -> Result<()> {
        let undone = self.undone(at, len);
        if undone > 0
            && let Some(evicted) = tensors.evicted.take()?
        {
            let stay = at.counts.remembered - undone;
            at.counts.shift -= undone;
            let back = own(narrow(&evicted, stay, undone));
            tensors.buffer.write_from(&self.kernels, back, at.counts.shift + self.sinks)?;
            if stay > 0 {
                tensors.evicted.set(own(narrow(&evicted, 0, stay)));
            }
            at.counts.remembered = stay;
            self.place_sinks(at, tensors)?;
        }
        at.counts.held -= at.seq_len - len - undone;
        if len < self.sinks {
            // Other tokens may take the place of the sinks.
            tensors.originals.clear();
        }
        Ok(())
    }

    fn trim(&self, at: &mut At, tensors: &mut Tensors) -> Result<()> {
        tensors.buffer.truncate(at.counts.shift + at.counts.held)
    }

    fn validate(&self, at: &At, tensors: &Tensors) -> Result<()> {
        let Counts { shift, held, remembered } = at.counts;
        let evicted = at.seq_len > held;
        let sinks = buffer::validate(&tensors.originals, &self.need)?;
        check(
            held <= self.window.min(at.seq_len)
                && shift + held <= tensors.buffer.validate(&self.need)?
                && buffer::validate(&tensors.evicted, &self.need)? == remembered
                && (sinks == self.sinks || sinks == 0 && !evicted)
                && (!evicted || held == self.window)
                && remembered <= at.history,
        )
    }
}

impl KvPolicy for SinkPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn span(&self, at: &At, n: usize) -> KvSpan {
        let pushed_out = self.pushed_out(at, n);
        KvSpan { start: self.shift_for(at, n) + pushed_out, len: at.counts.held + n - pushed_out }
    }

    fn limits(&self, at: &At) -> Limits {
        // The rest of the window while nothing is evicted; later a part of the window, because a query misses
        // the tokens that its own chunk evicted.
        let room = self.window - at.counts.held;
        let at_once = room.max((self.window - self.sinks).div_ceil(4).min(self.slack));
        Limits { at_once: Some(at_once), endless: true, by_pass: true, ..Limits::default() }
    }

    fn append(&self, at: &mut At, tensors: &mut Tensors, new: Kv, positions: &Positions) -> Result<KvView> {
        let n = new.0.dims()[2];
        let (pushed_out, span, shift) = (self.pushed_out(at, n), self.span(at, n), self.shift_for(at, n));
        let moved = shift != at.counts.shift;
        if moved {
            self.move_to(at, tensors, shift)?;
        }
        let filled = at.counts.shift + at.counts.held;
        if at.counts.held == 0 || filled + n > tensors.buffer.slots() {
            let slots = self.slots_for(at, filled + n, &tensors.buffer);
            tensors.buffer.resize(slots, filled, &new, Lifetime::UntilItGrows)?;
        }
        tensors.buffer.write(&self.kernels, new, positions)?;
        if pushed_out > 0 {
            self.evict(at, tensors, pushed_out)?;
        }
        if moved || pushed_out > 0 {
            self.place_sinks(at, tensors)?;
        }
        at.counts.held += n - pushed_out;
        tensors.buffer.view(span.start)
    }

    fn gather(&self, at: &At, tensors: &Tensors) -> Result<Option<Kv>> {
        tensors.buffer.gather(self.span(at, 0))
    }
}
