//! A buffer of fixed length, allocated once (transformers' `StaticCache`): so that a step is the same launches for
//! ever, and can be captured.

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

#[derive(Debug)]
pub(super) struct Fixed;

impl KvStrategy for Fixed {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["static"]
    }

    fn offloaded_aliases(&self) -> &'static [&'static str] {
        &["offloaded_static"]
    }

    fn summary(&self) -> &'static str {
        "keeps every key and value, in a buffer allocated once; decoding is captured and replayed"
    }

    fn settings(&self) -> &'static [(&'static str, &'static str)] {
        &[("len", "tokens it holds; unset: what the generation is going to reach")]
    }

    fn windowed(&self) -> Option<&'static str> {
        Some("sliding")
    }

    fn configure(&self, mut settings: Settings) -> Result<Arc<dyn KvFactory>> {
        let len = settings.positive("len")?;
        settings.done()?;
        Ok(Arc::new(FixedLength { len }))
    }
}

#[derive(Debug)]
struct FixedLength {
    len: Option<usize>,
}

impl KvFactory for FixedLength {
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
        need.token_bytes(element).saturating_mul(self.len.unwrap_or(tokens))
    }

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>> {
        Ok(Box::new(FixedLayer {
            buffer: Buffer::new(need, kernels),
            len: self.len,
            reserved: 0,
            seq_len: 0,
        }))
    }
}

#[derive(Clone, Debug)]
struct FixedLayer {
    /// The first `seq_len` slots count.
    buffer: Buffer,
    /// As the user set it.
    len: Option<usize>,
    /// What it was told the sequence will reach.
    reserved: usize,
    seq_len: usize,
}

impl FixedLayer {
    /// Slots of the buffer once it holds `end` tokens. Without a length of its own it is as long as it was told to become;
    /// a caller that tells nothing gets what he feeds.
    fn slots_for(&self, end: usize) -> usize {
        self.len.unwrap_or_else(|| self.reserved.max(self.buffer.slots()).max(end))
    }
}

impl KvLayer for FixedLayer {
    fn span(&self, n: usize) -> KvSpan {
        KvSpan { start: 0, len: self.seq_len + n }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        let n = keys.dims()[2];
        self.admits(n, place.left_pad.is_some())?;
        self.buffer.check(&keys, self.seq_len)?;
        let slots = self.slots_for(self.seq_len + n);
        self.buffer.resize(slots, self.seq_len, [&keys, &values], Lives::AsLongAsTheSequence)?;
        self.buffer.write(keys, values, place)?;
        self.seq_len += n;
        let (keys, values) = self.buffer.get()?;
        Ok(KvView::from_zero(keys, values))
    }

    fn capacity(&self) -> Option<usize> {
        self.len
    }

    fn is_static(&self) -> bool {
        true
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        self.buffer.dense(self.span(0))
    }

    fn repeats(&self) -> usize {
        let grows = self.len.unwrap_or(self.reserved) > self.buffer.slots();
        if grows { 0 } else { self.buffer.slots().saturating_sub(self.seq_len) }
    }

    fn repeated(&mut self) {
        self.seq_len += 1;
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for FixedLayer {
    fn name(&self) -> &'static str {
        "fixed"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn admits(&self, n: usize, _padded: bool) -> Result<()> {
        match self.len {
            Some(capacity) if self.seq_len + n > capacity => {
                Err(Error::Full { capacity, needed: self.seq_len + n })
            }
            _ => Ok(()),
        }
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = self.reserved.max(tokens);
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

    /// The buffers stay, for the next sequence.
    fn reset(&mut self) {
        self.seq_len = 0;
        self.reserved = 0;
    }

    fn footprint(&self, feed: &Feed) -> Footprint {
        self.buffer.footprint(self.slots_for(self.seq_len + feed.tokens), feed)
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
        if let Some(capacity) = self.len.filter(|&len| len < seq_len) {
            return Err(Error::Full { capacity, needed: seq_len });
        }
        self.buffer.restore(kv, device)?;
        self.buffer.truncate(seq_len);
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
