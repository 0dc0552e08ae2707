//! Buffers that continue each other, so that those which snapshots share need not be copied.
//!
//! Only the last one is written. Where a snapshot holds it too, whoever is fed first goes on in a buffer of its own
//! behind it, and the shared one stays as it is for as long as anyone holds it. So a prompt is there once, whatever
//! number of continuations it serves: copy on write, where what is copied is nothing but the room behind the prompt.

use std::sync::{Arc, OnceLock};

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Result,
    budget::Claim,
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
    shared: Vec<Arc<Link>>,
    last: Arc<Link>,
}

/// A buffer that others may hold, too.
#[derive(Debug)]
struct Link {
    buffer: Buffer,
    /// To what it holds, where that is not claimed by a cache.
    claim: OnceLock<Claim>,
}

impl Link {
    fn new(buffer: Buffer) -> Arc<Self> {
        Arc::new(Self { buffer, claim: OnceLock::new() })
    }

    fn bytes(&self) -> usize {
        self.buffer.slot().device_bytes()
    }
}

/// Tensors are shared, and counted by whoever has the copy.
impl Clone for Link {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), claim: OnceLock::new() }
    }
}

impl Chain {
    pub(crate) fn new(need: &AttentionNeed, kernels: &Kernels) -> Self {
        Self { shared: Vec::new(), last: Link::new(Buffer::new(need, kernels)) }
    }

    pub(crate) fn need(&self) -> &AttentionNeed {
        self.last.buffer.need()
    }

    /// The first position of the buffer that is written.
    pub(crate) fn origin(&self) -> usize {
        self.last.buffer.origin()
    }

    /// The same once something was written behind the first `filled` positions.
    pub(crate) fn next_origin(&self, filled: usize) -> usize {
        if self.branches(filled) { filled } else { self.origin() }
    }

    /// The first position that there is no slot for.
    pub(crate) fn end(&self) -> usize {
        self.origin() + self.last.buffer.slots()
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
            let next = Link::new(self.last.buffer.behind(filled));
            self.shared.push(std::mem::replace(&mut self.last, next));
        }
    }

    /// Has room up to position `end`, for rows like those of `keys`; the first `filled` positions are kept.
    pub(crate) fn resize(
        &mut self,
        end: usize,
        filled: usize,
        [keys, values]: [&Tensor<4>; 2],
    ) -> Result<()> {
        let origin = self.origin();
        // All buffers of a chain have one type.
        let dtype = self.shared.last().and_then(|before| before.buffer.dtype()).unwrap_or(keys.dtype());
        let [keys, values] = [keys, values].map(|new| new.clone().cast(dtype));
        let last = &mut Arc::make_mut(&mut self.last).buffer;
        last.resize(end - origin, filled - origin, [&keys, &values], Lives::UntilItGrows)
    }

    pub(crate) fn write(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<()> {
        Arc::make_mut(&mut self.last).buffer.write(keys, values, place)
    }

    /// Everything, slots that do not count included.
    pub(crate) fn view(&self) -> Result<KvView> {
        match self.shared.is_empty() {
            true => self.last.buffer.view(0).map(KvView::Dense),
            false => {
                let views = self.buffers().map(|buffer| buffer.view(buffer.origin()));
                views.collect::<Result<_>>().map(KvView::Chained)
            }
        }
    }

    /// The first `filled` positions in one piece; `None` where these are none.
    pub(crate) fn dense(&self, filled: usize) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        let ends = self.buffers().map(Buffer::origin).skip(1).chain([filled]);
        let parts = self.buffers().zip(ends).filter_map(|(buffer, end)| {
            let start = buffer.origin();
            buffer.dense(KvSpan { start, len: end.saturating_sub(start) }).transpose()
        });
        let mut parts: Vec<_> = parts.collect::<Result<_>>()?;
        if parts.len() < 2 {
            return Ok(parts.pop());
        }
        let (keys, values) = parts.into_iter().unzip();
        Ok(Some((Tensor::cat(keys, 2), Tensor::cat(values, 2))))
    }

    /// Only the first `filled` positions count from now on. What is behind them is overwritten.
    pub(crate) fn keep(&mut self, filled: usize) {
        while filled <= self.origin()
            && let Some(before) = self.shared.pop()
        {
            self.last = before;
        }
    }

    /// Has no room for more than the first `filled` positions, unless others have it, too.
    pub(crate) fn compact(&mut self, filled: usize) {
        if let Some(last) = Arc::get_mut(&mut self.last) {
            let origin = last.buffer.origin();
            last.buffer.truncate(filled - origin);
        }
    }

    /// Holds nothing.
    pub(crate) fn clear(&mut self) {
        *self = Self { shared: Vec::new(), last: Link::new(self.last.buffer.behind(0)) };
    }

    /// Takes over the tensors of a state.
    pub(crate) fn restore(&mut self, host: Vec<TensorData>, device: &Device) -> Result<()> {
        self.clear();
        Arc::make_mut(&mut self.last).buffer.restore(host, device).map(drop)
    }

    /// What it takes to have room up to position `end`, once `feed` was stored behind the first `filled` ones. What others
    /// hold, too, is counted here as well.
    pub(crate) fn footprint(&self, end: usize, filled: usize, feed: &Feed) -> Footprint {
        let as_it_is = |link: &Arc<Link>| link.buffer.footprint(link.buffer.slots(), feed);
        let mut kept: Vec<_> = self.shared.iter().map(as_it_is).collect();
        let last = if self.branches(filled) {
            kept.push(as_it_is(&self.last));
            self.last.buffer.behind(filled).footprint(end - filled, feed)
        } else {
            let mut last = self.last.buffer.footprint(end - self.origin(), feed);
            // What is copied stays where it is, too.
            if Arc::strong_count(&self.last) > 1 && feed.tokens > 0 {
                last.held = last.held.saturating_add(self.last.bytes());
            }
            last
        };
        kept.into_iter().fold(last, |sum, kept| Footprint {
            held: sum.held.saturating_add(kept.held),
            largest: sum.largest.max(kept.largest),
            passing: sum.passing,
        })
    }

    /// Bytes on the device that others hold, too.
    pub(crate) fn shared_bytes(&self) -> usize {
        self.links().filter(|link| Arc::strong_count(link) > 1).map(|link| link.bytes()).sum()
    }

    /// See [`CacheLayer::claim_shared`](kiln_core::layer::CacheLayer::claim_shared).
    pub(crate) fn claim_shared(&self, all: &Claim) {
        for link in self.links().filter(|link| link.claim.get().is_none()) {
            if let Some(claim) = all.split(link.bytes() as u64) {
                // If another thread was faster, this one is free again.
                _ = link.claim.set(claim);
            }
        }
    }

    /// See [`CacheLayer::claimed_apart`](kiln_core::layer::CacheLayer::claimed_apart).
    pub(crate) fn claimed_apart(&mut self, all: &Claim) -> usize {
        let claimed = |link: &mut Arc<Link>| {
            if let Some(claim) = Arc::get_mut(link).and_then(|alone| alone.claim.take()) {
                all.join(claim);
            }
            link.claim.get().map_or(0, |claim| claim.bytes() as usize)
        };
        self.shared.iter_mut().chain([&mut self.last]).map(claimed).sum()
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

    fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.shared.iter().chain([&self.last])
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.links().map(|link| &link.buffer)
    }

    /// What others hold, too, is theirs from now on, and this has a buffer of its own, of the same tensors.
    fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.shared.iter_mut().chain([&mut self.last]).map(|link| &mut Arc::make_mut(link).buffer)
    }
}
