//! The memory of one block, as transformers 4.47's `SinkCache` has it, mistakes included.
//!
//! Queries and new keys stand at absolute positions, however long the text, and every eviction moves the kept keys
//! back by as many positions as tokens came; so distances between queries and kept keys grow. Keys also move in the
//! step that fills the window, where nothing is evicted yet.

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    slot::{AnySlot, Slot},
    view::{DenseKv, KvView},
};

use kiln_kernels::Kernels;

use super::rotation::Rotation;
use crate::restored;

#[derive(Clone, Debug)]
pub(super) struct CompatLayer {
    kv: Slot<(Tensor<4>, Tensor<4>)>,
    window: usize,
    sinks: usize,
    held: usize,
    seq_len: usize,
    need: AttentionNeed,
    rotation: Rotation,
}

impl CompatLayer {
    pub(super) fn new(window: usize, sinks: usize, need: &AttentionNeed, kernels: &Kernels) -> Self {
        let rotation = Rotation::new(need, kernels);
        Self { kv: Slot::Empty, window, sinks, held: 0, seq_len: 0, need: need.clone(), rotation }
    }

    /// Tokens held after `n` more.
    fn held_after(&self, n: usize) -> usize {
        if self.held == 0 { n } else { (self.held + n).min(self.window) }
    }
}

impl KvLayer for CompatLayer {
    fn span(&self, n: usize) -> KvSpan {
        let len = self.held_after(n);
        KvSpan { start: self.seq_len + n - len, len }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        let ([rows, _, n, _], span) = (keys.dims(), self.span(keys.dims()[2]));
        self.admits(n, place.left_pad.is_some())?;
        if let Some((here, _)) = self.kv.get()?
            && self.held > 0
            && here.dims()[0] != rows
        {
            return Err(Error::WrongRows { rows: here.dims()[0], given: rows });
        }
        let (keys, values) = match self.kv.take()? {
            Some((k, v)) if self.held > 0 => {
                let (k, v) = (k.narrow(2, 0, self.held), v.narrow(2, 0, self.held));
                if self.held + n < self.window {
                    (Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2))
                } else {
                    let kept = self.window - self.sinks - n;
                    let mut parts = [vec![keys], vec![values]];
                    if kept > 0 {
                        let from = self.held - kept;
                        let moved = self.rotation.shift(k.clone().narrow(2, from, kept), -(n as i64));
                        parts[0].insert(0, moved);
                        parts[1].insert(0, v.clone().narrow(2, from, kept));
                    }
                    if self.sinks > 0 {
                        parts[0].insert(0, k.narrow(2, 0, self.sinks));
                        parts[1].insert(0, v.narrow(2, 0, self.sinks));
                    }
                    let [k, v] = parts.map(|parts| Tensor::cat(parts, 2));
                    (k, v)
                }
            }
            _ => (keys, values),
        };
        self.kv = Slot::Here((keys.clone(), values.clone()));
        self.seq_len += n;
        self.held = span.len;
        Ok(KvView::Dense(DenseKv { keys, values, start: span.start, origin: span.start }))
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        Ok(self.kv.get()?.cloned().filter(|_| self.held > 0))
    }

    fn at_once(&self) -> Option<usize> {
        (self.held > 0).then_some((self.window - self.sinks).saturating_sub(1).max(1))
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl CacheLayer for CompatLayer {
    fn name(&self) -> &'static str {
        "sink"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn admits(&self, n: usize, _padded: bool) -> Result<()> {
        // With more the reference takes a suffix of something else. With no room at all between sinks and window, one
        // token is all that is kept.
        match self.at_once() {
            Some(most) if n > most => Err(Error::TooManyAtOnce { given: n, most }),
            _ => Ok(()),
        }
    }

    fn can_roll_back(&self, n: usize) -> bool {
        n == 0 || (n <= self.held && self.held == self.seq_len && self.held < self.window)
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        self.seq_len -= n;
        self.held -= n;
        Ok(())
    }

    fn keep_history(&mut self, _n: usize) {}

    fn reset(&mut self) {
        self.kv = Slot::Empty;
        (self.held, self.seq_len) = (0, 0);
    }

    /// It is put together anew at every step.
    fn footprint(&self, feed: &Feed) -> Footprint {
        let token = self.need.token_bytes(feed.element).saturating_mul(feed.rows);
        let held = token.saturating_mul(self.held_after(feed.tokens));
        Footprint { held, largest: held, passing: token.saturating_mul(self.held) }
    }

    fn compact(&mut self) {
        if let Slot::Here((k, v)) = &mut self.kv {
            if self.held == 0 {
                self.kv = Slot::Empty;
            } else {
                k.inplace(|k| k.narrow(2, 0, self.held));
                v.inplace(|v| v.narrow(2, 0, self.held));
            }
        }
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.held, self.seq_len]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        let ([held, seq_len], [kv]) = restored::parts(state)?;
        restored::check(restored::tokens(&kv, &self.need)? == held && held <= seq_len)?;
        self.kv.restore(kv, device)?;
        (self.held, self.seq_len) = (held, seq_len);
        Ok(())
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![&self.kv]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![&mut self.kv]
    }
}
