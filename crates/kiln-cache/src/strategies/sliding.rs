//! Keeps the latest tokens that a query may see (transformers' `SlidingWindowCache`, and its current sliding
//! layers).
//!
//! The buffer is a ring: position `p` is in slot `p mod slots`, and nothing is ever moved. A query sees the
//! `window` latest tokens, including its own, so the ring has `window` slots, plus one for each token beyond
//! the first that may be truncated.

use kiln_core::{
    Error, Result,
    layer::{Footprint, Kv, KvLayer, KvSpan, Limits, Parents, Positions, Reorders, StepShape},
    need::{AttentionNeed, Stream},
    slot::Slot,
    view::{DenseKv, KvView},
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize};

use super::{CacheSettings, KvFactory, KvStrategy};
use crate::{
    CacheSpec,
    buffer::{self, Buffer, Lifetime, behind, narrow},
    memory::{KvPolicy, Memory, Policy, Progress, check},
};

/// Number of slots of the smallest buffer, while the ring is not full.
const SMALLEST: usize = 64;

pub(super) static SLIDING: KvStrategy = KvStrategy {
    name: "sliding",
    aliases: &["sliding_window"],
    offloaded_aliases: &[],
    summary: "keeps the window that the model's queries may see, in a ring",
    settings: &[],
    samples: &[],
    windowed: None,
    read: CacheSpec::read::<Sliding>,
};

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sliding {}

impl CacheSettings for Sliding {
    const STRATEGY: &'static KvStrategy = &SLIDING;
}

impl KvFactory for Sliding {
    fn check(&self, need: &AttentionNeed) -> Result<()> {
        window(need).map(|_| ())
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(need.window.map_or(tokens, |window| window.min(tokens)))
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        let policy = SlidingPolicy { need: need.clone(), kernels: kernels.clone(), window: window(need)? };
        Ok(Box::new(Memory::new(policy, kernels.device())))
    }
}

fn window(need: &AttentionNeed) -> Result<usize> {
    need.window.filter(|&window| window > 0).ok_or_else(|| Error::Setting {
        name: "cache",
        why: "`sliding` needs a model whose layers have a window, and this model has layers without one; use `dynamic`, \
              `static`, or `sink:window=N`"
            .to_owned(),
    })
}

#[derive(Clone, Debug)]
struct SlidingPolicy {
    need: AttentionNeed,
    kernels: Kernels,
    /// Number of latest tokens that a query may see, including its own.
    window: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Counts {
    /// First position that was not overwritten.
    oldest: usize,
}

impl SlidingPolicy {
    /// Number of slots of the full ring.
    fn full(&self, at: &Progress<Counts>) -> usize {
        self.window - 1 + at.history.max(1)
    }

    /// First position that a query after `len` tokens may see.
    fn visible(&self, len: usize) -> usize {
        (len + 1).saturating_sub(self.window)
    }

    /// Whether `n` tokens can be written without overwriting a key that one of their queries sees.
    fn fits(&self, n: usize, at: &Progress<Counts>) -> bool {
        at.seq_len + n <= self.visible(at.seq_len) + self.full(at)
    }

    /// Number of slots of the buffer once it was fed up to `end`.
    fn slots_for(&self, end: usize, at: &Progress<Counts>, buffer: &Buffer) -> usize {
        match buffer.slots() {
            have if end <= have => have,
            // The ring must become longer where more history was promised.
            have if has_wrapped(at, buffer) => have.max(self.full(at)),
            have => end.next_power_of_two().max(SMALLEST).min(self.full(at)).max(have),
        }
    }

    /// Grows the buffer as needed for `end` positions.
    fn grow(&self, end: usize, at: &Progress<Counts>, buffer: &mut Buffer, new: &Kv) -> Result<()> {
        let slots = self.slots_for(end, at, buffer);
        if !has_wrapped(at, buffer) {
            return buffer.resize(slots, at.seq_len, new, Lifetime::UntilItGrows);
        }
        if slots == buffer.slots() {
            return Ok(());
        }
        let first = at.counts.oldest;
        let old = buffer.in_order(KvSpan { start: first, len: at.seq_len - first })?;
        buffer.resize(slots, 0, new, Lifetime::UntilItGrows)?;
        buffer.write_from(&self.kernels, old, first)
    }
}

/// Whether positions are in other slots than those of their own numbers.
fn has_wrapped(at: &Progress<Counts>, buffer: &Buffer) -> bool {
    at.seq_len > buffer.slots()
}

impl Policy for SlidingPolicy {
    const NAME: &'static str = "sliding";
    type Counts = Counts;
    type Tensors = Buffer;

    fn footprint(&self, at: &Progress<Counts>, buffer: &Buffer, step: &StepShape) -> Footprint {
        let slots = self.slots_for(at.seq_len + step.tokens, at, buffer);
        let Footprint { held, largest, passing } = buffer::footprint(&self.need, buffer.slots(), slots, step);
        // A chunk that does not fit is also laid out in order.
        let in_order = if self.fits(step.tokens, at) { 0 } else { self.span(at, step.tokens).len };
        let token = self.need.token_bytes(step.element).saturating_mul(step.rows);
        Footprint { held, largest, passing: passing + token.saturating_mul(in_order) }
    }

    /// The keys that the next query sees must still be in the ring.
    fn rewind_point(&self, at: &Progress<Counts>, at_most: usize) -> Option<usize> {
        (self.visible(at_most) >= at.counts.oldest).then_some(at_most)
    }

    fn reorders(&self, _: &Buffer) -> Reorders {
        Reorders::InPlace
    }

    fn reorder_on_device(&self, buffer: &mut Buffer, parents: &Parents) -> Result<()> {
        buffer.reorder_on_device(&self.kernels, parents)
    }

    fn trim(&self, at: &mut Progress<Counts>, buffer: &mut Buffer) -> Result<()> {
        match at.counts.oldest {
            0 if at.seq_len < buffer.slots() => buffer.truncate(at.seq_len),
            _ => Ok(()),
        }
    }

    fn validate(&self, at: &Progress<Counts>, buffer: &Buffer) -> Result<()> {
        let (slots, oldest) = (buffer.validate(&self.need)?, at.counts.oldest);
        let held = oldest <= at.seq_len && at.seq_len - oldest <= slots;
        check(held && self.visible(at.seq_len) >= oldest)
    }
}

impl KvPolicy for SlidingPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn span(&self, at: &Progress<Counts>, n: usize) -> KvSpan {
        let start = self.visible(at.seq_len);
        KvSpan { start, len: at.seq_len + n - start }
    }

    fn limits(&self, _: &Progress<Counts>) -> Limits {
        Limits { fixed_buffers: true, ..Limits::default() }
    }

    fn append(
        &self,
        at: &mut Progress<Counts>,
        buffer: &mut Buffer,
        new: Kv,
        positions: &Positions,
    ) -> Result<KvView> {
        let n = new.0.dims()[2];
        let (span, end) = (self.span(at, n), at.seq_len + n);
        if self.fits(n, at) {
            self.grow(end, at, buffer, &new)?;
            buffer.write(&self.kernels, new, positions)?;
            return buffer.view(span.start);
        }
        // A chunk that overwrites keys that its own queries see: they get a copy in order, and the ring gets
        // the chunk's end.
        let before = buffer.gather(KvSpan { start: span.start, len: span.len - n })?;
        let (keys, values) = behind(before, new.clone());
        self.grow(end, at, buffer, &new)?;
        let skipped = n.saturating_sub(buffer.slots());
        buffer.write(&self.kernels, narrow(&new, skipped, n - skipped), &positions.behind(skipped))?;
        Ok(KvView::Dense(DenseKv { keys, values, start: span.start, origin: span.start, shared: None }))
    }

    fn buffer<'a>(&self, buffer: &'a mut Buffer) -> Option<&'a mut Slot<Kv>> {
        Some(buffer.slot())
    }

    fn start_in_place(&self, at: &Progress<Counts>, buffer: &Buffer, n: usize) -> Option<usize> {
        let grows = self.slots_for(at.seq_len + n, at, buffer) > buffer.slots();
        (at.seq_len > 0 && self.fits(n, at) && !grows).then_some(self.span(at, n).start)
    }

    fn advance(&self, at: &mut Progress<Counts>, buffer: &Buffer, n: usize) {
        at.seq_len += n;
        at.counts.oldest = at.counts.oldest.max(at.seq_len.saturating_sub(buffer.slots()));
    }

    fn gather(&self, at: &Progress<Counts>, buffer: &Buffer) -> Result<Option<Kv>> {
        buffer.gather(self.span(at, 0))
    }

    fn replayable(&self, at: &Progress<Counts>, buffer: &Buffer) -> usize {
        match buffer.slots() {
            slots if slots >= self.full(at) => usize::MAX,
            slots => slots.saturating_sub(at.seq_len),
        }
    }
}
