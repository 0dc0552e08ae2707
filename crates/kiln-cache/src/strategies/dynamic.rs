//! Keeps everything (transformers' `DynamicCache`).
//!
//! Keys live in a buffer that doubles when it is full, so that a step writes its own tokens in place and copies
//! nothing, and so that shapes repeat. Where it is known how far the sequence will go, the last doubling ends there.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Touched},
    view::KvView,
};
use kiln_kernels::Kernels;

use super::{KvFactory, KvStrategy, Settings};
use crate::{
    buffer::{Buffer, Lives},
    restored,
};

/// Slots of the smallest buffer, where nobody knows how far the sequence will go.
const SMALLEST: usize = 64;

/// Slots that are taken at once where they are going to be needed: a smaller buffer would save a few megabytes for a few
/// lines of text, and be copied at the end of each.
const AT_ONCE: usize = 256;

#[derive(Debug)]
pub(super) struct Dynamic;

impl KvStrategy for Dynamic {
    fn name(&self) -> &'static str {
        "dynamic"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["hybrid"]
    }

    fn offloaded_aliases(&self) -> &'static [&'static str] {
        &["offloaded"]
    }

    fn summary(&self) -> &'static str {
        "keeps every key and value, in a buffer that doubles"
    }

    fn windowed(&self) -> Option<&'static str> {
        Some("sliding")
    }

    fn configure(&self, settings: Settings) -> Result<Arc<dyn KvFactory>> {
        settings.done()?;
        Ok(Arc::new(Self))
    }
}

impl KvFactory for Dynamic {
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(tokens)
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(DynamicLayer { buffer: Buffer::new(need, kernels), reserved: 0, seq_len: 0 }))
    }
}

#[derive(Clone, Debug)]
struct DynamicLayer {
    /// The first `seq_len` slots count.
    buffer: Buffer,
    /// What it was told the sequence will reach.
    reserved: usize,
    seq_len: usize,
}

impl DynamicLayer {
    /// Slots of the buffer once it holds `end` tokens of a sequence that is going to reach `reserved`, as far as is known.
    fn slots_for(&self, end: usize, reserved: usize) -> usize {
        match self.buffer.slots() {
            slots if end <= slots => slots,
            // What is reserved, halved as often as there is room: so the last doubling ends where the sequence does.
            _ if end <= reserved => {
                let mut slots = reserved;
                while slots.div_ceil(2) >= end.max(AT_ONCE) {
                    slots = slots.div_ceil(2);
                }
                slots
            }
            // Room for one more at least: a prompt is followed by a token.
            _ => (end + 1).next_power_of_two().max(SMALLEST),
        }
    }
}

impl KvLayer for DynamicLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: self.seq_len + n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        self.buffer.check(&keys, self.seq_len)?;
        let end = self.seq_len + keys.dims()[2];
        if self.seq_len == 0 || end > self.buffer.slots() {
            let slots = self.slots_for(end, self.reserved);
            self.buffer.resize(slots, self.seq_len, [&keys, &values], Lives::UntilItGrows)?;
        }
        self.buffer.write(keys, values, place)?;
        self.seq_len = end;
        let (keys, values) = self.buffer.get()?;
        Ok(KvView::from_zero(keys, values))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.buffer.dense(self.span(0))
    }

    fn repeats(&self) -> usize {
        self.buffer.slots().saturating_sub(self.seq_len)
    }

    fn repeated(&mut self) {
        self.seq_len += 1;
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for DynamicLayer {
    fn name(&self) -> &'static str {
        "dynamic"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn can_roll_back(&self, n: usize) -> bool {
        n <= self.seq_len
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        self.seq_len -= n;
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {
        self.seq_len = 0;
        self.reserved = 0;
        self.buffer.truncate(0);
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        let end = self.seq_len + feed.tokens;
        let reserved = if feed.last { end } else { self.reserved };
        self.buffer.footprint(self.slots_for(end, reserved), feed)
    }

    fn compact(&mut self) {
        self.buffer.truncate(self.seq_len);
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.seq_len]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([seq_len], [kv]) = restored::parts(state)?;
        restored::check(restored::tokens(&kv, self.buffer.need())? >= seq_len)?;
        self.buffer.restore(kv, device)?;
        self.seq_len = seq_len;
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
