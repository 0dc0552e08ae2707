//! Buffers that continue each other, so that those which snapshots share need not be copied.
//!
//! Only the last one is written. Where a snapshot holds it too, whoever is fed first goes on in a buffer of its own
//! behind it, and the shared one stays as it is for as long as anyone holds it. So a prompt is there once, whatever
//! number of continuations it serves: copy on write, where what is copied is nothing but the room behind the prompt.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Result,
    layer::{Feed, Footprint, KvSpan, Place},
    need::AttentionNeed,
    slot::{AnySlot, Touched},
    view::KvView,
};
use kiln_kernels::Kernels;

use crate::buffer::{Buffer, Lives};

/// Tokens that are worth being shared: fewer are copied, because each buffer of a chain is a launch of its own in every
/// step, and keys that are few take as long as that.
const WORTH: usize = 256;

/// Buffers of a chain. A tree of conversations that branches deeper copies what its last buffer holds.
const MOST: usize = 4;

/// Keys and values of all positions from 0 on.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    /// Each holds the positions from its origin to that of the next.
    shared: Vec<Arc<Buffer>>,
    last: Arc<Buffer>,
}

impl Chain {
    pub(crate) fn new(need: &AttentionNeed, kernels: &Kernels) -> Self {
        Self { shared: Vec::new(), last: Arc::new(Buffer::new(need, kernels)) }
    }

    pub(crate) fn need(&self) -> &AttentionNeed {
        self.last.need()
    }

    /// The first position of the buffer that is written.
    pub(crate) fn origin(&self) -> usize {
        self.last.origin()
    }

    /// The same once something was written behind the first `filled` positions.
    pub(crate) fn next_origin(&self, filled: usize) -> usize {
        if self.branches(filled) { filled } else { self.origin() }
    }

    /// The first position that there is no slot for.
    pub(crate) fn end(&self) -> usize {
        self.last.origin() + self.last.slots()
    }

    /// Whether `keys` can follow the first `filled` positions.
    ///
    /// # Errors
    /// Those of [`Buffer::check`].
    pub(crate) fn check(&self, keys: &Tensor<4>, filled: usize) -> Result<()> {
        self.buffers().try_for_each(|buffer| buffer.check(keys, filled))
    }

    /// Whether what comes behind the first `filled` positions goes into a new buffer.
    fn branches(&self, filled: usize) -> bool {
        Arc::strong_count(&self.last) > 1 && filled - self.origin() >= WORTH && self.shared.len() + 1 < MOST
    }

    /// To be called before anything is written behind the first `filled` positions: what snapshots hold stays as it is.
    pub(crate) fn branch(&mut self, filled: usize) {
        if self.branches(filled) {
            let next = Arc::new(self.last.behind(filled));
            self.shared.push(std::mem::replace(&mut self.last, next));
        }
    }

    /// Has room up to position `end`, for rows like those of `keys`; the first `filled` positions are kept.
    pub(crate) fn resize(&mut self, end: usize, filled: usize, kv: [&Tensor<4>; 2]) -> Result<()> {
        let origin = self.origin();
        Arc::make_mut(&mut self.last).resize(end - origin, filled - origin, kv, Lives::UntilItGrows)
    }

    pub(crate) fn write(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<()> {
        Arc::make_mut(&mut self.last).write(keys, values, place)
    }

    /// Everything, slots that do not count included.
    pub(crate) fn view(&self) -> Result<KvView> {
        match self.shared.is_empty() {
            true => self.last.view(0).map(KvView::Dense),
            false => {
                let views = self.buffers().map(|buffer| buffer.view(buffer.origin()));
                views.collect::<Result<_>>().map(KvView::Chained)
            }
        }
    }

    /// The first `filled` positions in one piece; `None` where these are none.
    pub(crate) fn dense(&self, filled: usize) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        let origins = self.buffers().map(|buffer| buffer.origin());
        let ends = origins.skip(1).chain([filled]);
        let parts = self.buffers().zip(ends).filter_map(|(buffer, end)| {
            let start = buffer.origin();
            buffer.dense(KvSpan { start, len: end.min(filled).saturating_sub(start) }).transpose()
        });
        let (mut keys, mut values): (Vec<_>, Vec<_>) = parts.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        Ok(match (keys.len(), keys.pop(), values.pop()) {
            (0, ..) => None,
            (1, Some(keys), Some(values)) => Some((keys, values)),
            (_, Some(last_keys), Some(last_values)) => {
                keys.push(last_keys);
                values.push(last_values);
                Some((Tensor::cat(keys, 2), Tensor::cat(values, 2)))
            }
            _ => None,
        })
    }

    /// Only the first `filled` positions count from now on. What is behind them is overwritten.
    pub(crate) fn keep(&mut self, filled: usize) {
        while filled <= self.origin()
            && let Some(before) = self.shared.pop()
        {
            self.last = before;
        }
    }

    /// Holds the first `filled` positions in a buffer that has no room for more.
    pub(crate) fn compact(&mut self, filled: usize) {
        if !self.shared.is_empty()
            && let Ok(Some((keys, values))) = self.dense(filled)
        {
            let mut one = self.last.behind(0);
            one.hold(keys, values);
            *self = Self { shared: Vec::new(), last: Arc::new(one) };
        }
        let origin = self.origin();
        Arc::make_mut(&mut self.last).truncate(filled - origin);
    }

    /// Holds nothing.
    pub(crate) fn clear(&mut self) {
        *self = Self { shared: Vec::new(), last: Arc::new(self.last.behind(0)) };
    }

    /// Takes over the tensors of a state; how many slots there are now.
    pub(crate) fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<usize> {
        self.clear();
        Arc::make_mut(&mut self.last).restore(host, device)
    }

    /// What it takes to have room up to position `end`, once `feed` was stored behind the first `filled` ones.
    pub(crate) fn footprint(&self, end: usize, filled: usize, feed: &Feed) -> Footprint {
        let held: usize = self.shared.iter().map(share).sum();
        let mut last = match self.branches(filled) {
            false => self.last.footprint(end - self.origin(), feed),
            true => {
                let mut next = self.last.behind(filled).footprint(end - filled, feed);
                next.held += share(&self.last);
                next
            }
        };
        last.held += held;
        last
    }

    /// Bytes on the device. Of what others hold too, everyone counts the same part.
    pub(crate) fn device_bytes(&self) -> usize {
        self.shared.iter().chain([&self.last]).map(share).sum()
    }

    pub(crate) fn touched(&mut self) -> Vec<Touched> {
        self.buffers_mut().map(Buffer::touched).collect()
    }

    pub(crate) fn slots(&self) -> Vec<&dyn AnySlot> {
        self.buffers().map(Buffer::slot).collect()
    }

    pub(crate) fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.buffers_mut().map(Buffer::slot_mut).collect()
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.shared.iter().chain([&self.last]).map(|buffer| &**buffer)
    }

    /// Those that others hold, too, are others from now on.
    fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.shared.iter_mut().chain([&mut self.last]).map(Arc::make_mut)
    }
}

/// Bytes of a buffer that one of its holders counts.
fn share(buffer: &Arc<Buffer>) -> usize {
    buffer.slot().device_bytes() / Arc::strong_count(buffer)
}
