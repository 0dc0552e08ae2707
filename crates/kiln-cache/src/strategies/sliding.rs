//! Keeps the latest tokens that a query may see (transformers' `SlidingWindowCache`, and its sliding layers of today).
//!
//! A ring: position `p` is in slot `p mod slots`, and nothing is ever moved. A query sees the `window` latest tokens,
//! itself included, so the ring has `window` slots, and as many more as may be rolled back beyond one.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Touched},
    view::{DenseKv, KvView},
};
use kiln_kernels::Kernels;

use super::{KvFactory, KvStrategy, Settings};
use crate::{
    buffer::{Buffer, Lives},
    restored,
};

/// Slots of the smallest buffer, while the ring is not full.
const SMALLEST: usize = 64;

#[derive(Debug)]
pub(super) struct Sliding;

impl KvStrategy for Sliding {
    fn name(&self) -> &'static str {
        "sliding"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["sliding_window"]
    }

    fn summary(&self) -> &'static str {
        "keeps the window that the model's queries may see, in a ring"
    }

    fn configure(&self, settings: Settings) -> Result<Arc<dyn KvFactory>> {
        settings.done()?;
        Ok(Arc::new(Self))
    }
}

impl KvFactory for Sliding {
    fn check(&self, need: &AttentionNeed) -> Result<()> {
        window(need).map(|_| ())
    }

    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(need.window.map_or(tokens, |window| window.min(tokens)))
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(SlidingLayer {
            buffer: Buffer::new(need, kernels),
            window: window(need)?,
            history: 1,
            seq_len: 0,
            oldest: 0,
        }))
    }
}

fn window(need: &AttentionNeed) -> Result<usize> {
    need.window.filter(|&window| window > 0).ok_or_else(|| Error::Setting {
        name: "--cache",
        why: "`sliding` needs a model whose layers have a window, and this one has layers without; use `dynamic`, \
              `fixed`, or `sink:window=N`"
            .to_owned(),
    })
}

#[derive(Clone, Debug)]
struct SlidingLayer {
    buffer: Buffer,
    /// Latest tokens that a query may see, itself included.
    window: usize,
    /// Tokens that can be rolled back at any time, at least 1.
    history: usize,
    seq_len: usize,
    /// The first position that was not overwritten.
    oldest: usize,
}

impl SlidingLayer {
    /// Slots of the full ring.
    fn full(&self) -> usize {
        self.window - 1 + self.history
    }

    /// The first position that the next query may see.
    fn visible(&self) -> usize {
        (self.seq_len + 1).saturating_sub(self.window)
    }

    /// Whether `n` tokens can be written without overwriting a key that one of their queries sees.
    fn fits(&self, n: usize) -> bool {
        self.seq_len + n <= self.visible() + self.full()
    }

    /// Slots of the buffer once it was fed up to `end`.
    fn slots_for(&self, end: usize) -> usize {
        match self.buffer.slots() {
            have if end <= have => have,
            have => end.next_power_of_two().max(SMALLEST).min(self.full()).max(have),
        }
    }

    /// Has the buffer as long as `end` positions need it.
    fn grow(&mut self, end: usize, keys: &Tensor<4>, values: &Tensor<4>) -> Result<()> {
        let (have, full) = (self.buffer.slots(), self.full());
        if self.seq_len <= have {
            // Nothing was wrapped yet: slots are positions.
            return self.buffer.resize(
                self.slots_for(end),
                self.seq_len,
                [keys, values],
                Lives::UntilItGrows,
            );
        }
        if have >= full {
            return Ok(());
        }
        // A ring that has to become longer, because more history was promised.
        let (first, kept) = (self.oldest, self.seq_len - self.oldest);
        let (old_keys, old_values) = self.buffer.in_order(KvSpan { start: first, len: kept })?;
        self.buffer.resize(full, 0, [keys, values], Lives::UntilItGrows)?;
        let place = Place::new(first, &[], &keys.device());
        self.buffer.write(old_keys, old_values, &place)
    }
}

impl KvLayer for SlidingLayer {
    fn span(&self, n: usize) -> KvSpan {
        let start = self.visible();
        KvSpan { start, len: self.seq_len + n - start }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        self.buffer.check(&keys, self.seq_len)?;
        let n = keys.dims()[2];
        let span = self.span(n);
        let end = self.seq_len + n;
        let view = if self.fits(n) {
            self.grow(end, &keys, &values)?;
            self.buffer.write(keys, values, place)?;
            let (keys, values) = self.buffer.get()?;
            DenseKv { keys, values, start: span.start, origin: 0 }
        } else {
            // A chunk that overwrites what its own queries see: they get it in order, the ring gets its end.
            let (all_keys, all_values) = match span.len - n {
                0 => (keys.clone(), values.clone()),
                before => {
                    let before = KvSpan { start: span.start, len: before };
                    let (k, v) = self.buffer.in_order(before)?;
                    (Tensor::cat(vec![k, keys.clone()], 2), Tensor::cat(vec![v, values.clone()], 2))
                }
            };
            self.grow(end, &keys, &values)?;
            let skipped = n.saturating_sub(self.buffer.slots());
            let tail = |new: Tensor<4>| new.narrow(2, skipped, n - skipped);
            self.buffer.write(tail(keys), tail(values), &place.behind(skipped))?;
            DenseKv { keys: all_keys, values: all_values, start: span.start, origin: span.start }
        };
        self.seq_len = end;
        self.oldest = self.oldest.max(end.saturating_sub(self.buffer.slots()));
        Ok(KvView::Dense(view))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.buffer.dense(self.span(0))
    }

    fn is_static(&self) -> bool {
        true
    }

    fn repeats(&self) -> usize {
        match self.buffer.slots() {
            slots if slots >= self.full() => usize::MAX,
            slots => slots.saturating_sub(self.seq_len),
        }
    }

    fn repeated(&mut self) {
        self.seq_len += 1;
        self.oldest = self.oldest.max(self.seq_len.saturating_sub(self.buffer.slots()));
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for SlidingLayer {
    fn name(&self) -> &'static str {
        "sliding"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn can_roll_back(&self, n: usize) -> bool {
        // What the next query sees must still be here.
        n <= self.seq_len && (self.seq_len - n + 1).saturating_sub(self.window) >= self.oldest
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        self.seq_len -= n;
        Ok(())
    }

    fn keep_history(&mut self, n: usize) {
        self.history = self.history.max(n);
    }

    fn reset(&mut self) {
        self.buffer.truncate(0);
        self.seq_len = 0;
        self.oldest = 0;
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        let Footprint { held, largest, passing } =
            self.buffer.footprint(self.slots_for(self.seq_len + feed.tokens), feed);
        // A chunk that does not fit is laid out in order, too.
        let in_order = if self.fits(feed.tokens) { 0 } else { self.span(feed.tokens).len };
        let token = self.buffer.need().token_bytes(feed.element).saturating_mul(feed.rows);
        Footprint { held, largest, passing: passing + token.saturating_mul(in_order) }
    }

    fn compact(&mut self) {
        if self.seq_len < self.buffer.slots() && self.oldest == 0 {
            self.buffer.truncate(self.seq_len);
        }
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.seq_len, self.oldest, self.history]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([seq_len, oldest, history], [kv]) = restored::parts(state)?;
        let slots = restored::tokens(&kv, self.buffer.need())?;
        let here = oldest <= seq_len
            && seq_len - oldest <= slots
            && (seq_len + 1).saturating_sub(self.window) >= oldest;
        // Slots are positions, or positions modulo the length of a full ring.
        let ring = oldest == 0 || slots == self.window - 1 + history;
        restored::check(here && ring)?;
        self.buffer.restore(kv, device)?;
        (self.seq_len, self.oldest, self.history) = (seq_len, oldest, history.max(self.history));
        Ok(())
    }

    fn touched(&mut self) -> Vec<Touched> {
        vec![self.buffer.touched()]
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![self.buffer.slot()]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![self.buffer.slot_mut()]
    }
}
