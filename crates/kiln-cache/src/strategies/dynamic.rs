//! Keeps everything (transformers' `DynamicCache`).
//!
//! Keys live in a buffer that doubles when it is full, so that a step writes its own tokens in place and copies
//! nothing, and so that shapes repeat. Where it is known how far the sequence will go, the last doubling ends there.
//! Behind what a snapshot shares, it is another buffer that doubles ([`Chain`]).

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    budget::Claim,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Slot, Touched},
    view::KvView,
};
use kiln_kernels::Kernels;

use super::{KvFactory, KvStrategy, Settings};
use crate::{chain::Chain, restored};

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
        Ok(Box::new(DynamicLayer { chain: Chain::new(need, kernels), reserved: 0, seq_len: 0 }))
    }
}

#[derive(Clone, Debug)]
struct DynamicLayer {
    /// The first `seq_len` positions count.
    chain: Chain,
    /// What it was told the sequence will reach.
    reserved: usize,
    seq_len: usize,
}

impl DynamicLayer {
    /// The first position that there is no room for once it holds `end` tokens of a sequence that is going to reach
    /// `reserved`, as far as is known.
    fn room_for(&self, end: usize, reserved: usize) -> usize {
        let origin = self.chain.next_origin(self.seq_len);
        if origin == self.chain.origin() && end <= self.chain.end() {
            return self.chain.end();
        }
        origin + slots_for(end - origin, reserved.saturating_sub(origin))
    }
}

/// Slots of a buffer once it holds `end` tokens of those `reserved` that it is going to hold, as far as is known.
fn slots_for(end: usize, reserved: usize) -> usize {
    if end > reserved {
        // Room for one more at least: a prompt is followed by a token.
        return (end + 1).next_power_of_two().max(SMALLEST);
    }
    // What is reserved, halved as often as there is room: so the last doubling ends where the sequence does.
    let mut slots = reserved;
    while slots.div_ceil(2) >= end.max(AT_ONCE) {
        slots = slots.div_ceil(2);
    }
    slots
}

impl KvLayer for DynamicLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: self.seq_len + n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        self.chain.check(&keys, self.seq_len)?;
        let end = self.seq_len + keys.dims()[2];
        if end > self.seq_len {
            self.chain.branch(self.seq_len);
        }
        if self.seq_len == 0 || end > self.chain.end() {
            let room = self.room_for(end, self.reserved);
            self.chain.resize(room, self.seq_len, [&keys, &values])?;
        }
        self.chain.write(keys, values, place)?;
        self.seq_len = end;
        self.chain.view()
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.chain.dense(self.seq_len)
    }

    fn repeats(&self) -> usize {
        self.chain.end().saturating_sub(self.seq_len)
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
        self.chain.keep(self.seq_len);
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {
        self.seq_len = 0;
        self.reserved = 0;
        self.chain.clear();
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        let end = self.seq_len + feed.tokens;
        let reserved = if feed.last { end } else { self.reserved };
        self.chain.footprint(self.room_for(end, reserved), self.seq_len, feed)
    }

    fn compact(&mut self) {
        self.chain.compact(self.seq_len);
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.seq_len]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([seq_len], [kv]) = restored::parts(state)?;
        restored::check(restored::tokens(&kv, self.chain.need())? >= seq_len)?;
        self.chain.restore(kv, device)?;
        self.seq_len = seq_len;
        Ok(())
    }

    /// In one piece, whatever it shares; the layer stays as it is.
    fn save(&mut self) -> Result<LayerState> {
        let mut kv = Vec::new();
        Slot::from(self.chain.dense(self.seq_len)?).read(&mut kv)?;
        Ok(LayerState { slots: vec![kv], counts: self.counts() })
    }

    fn shared_bytes(&self) -> usize {
        self.chain.shared_bytes()
    }

    fn claim_shared(&self, all: &Claim) {
        self.chain.claim_shared(all);
    }

    fn claimed_apart(&mut self, all: &Claim) -> usize {
        self.chain.claimed_apart(all)
    }

    fn touched(&mut self) -> Vec<Touched> {
        self.chain.touched()
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.chain.slots()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.chain.slots_mut()
    }
}
