//! Chains of consecutive buffers, so that buffers shared with snapshots need not be copied.
//!
//! Only the last buffer is written. If a snapshot holds it too, whoever is fed first continues in a new
//! buffer after it, and the shared one stays unchanged for as long as anyone holds it. A prompt is therefore
//! stored once, however many continuations it serves: copy on write, where nothing is copied except the spare
//! room after the prompt.
//!
//! A prompt that becomes several rows (beams) is stored once, too: its buffers keep their single row, which
//! all rows read, and only the tokens after it move when rows are reordered.

use std::sync::{Arc, OnceLock};

use burn::tensor::Tensor;
use kiln_core::{
    Result,
    budget::Claim,
    layer::{Footprint, Kv, KvSpan, Parents, Positions, Reorders, StepShape},
    need::AttentionNeed,
    slot::{AnySlot, Slot},
    view::{DenseKv, KvView},
};
use kiln_kernels::Kernels;

use crate::{
    buffer::{self, Buffer, Lifetime},
    memory::TensorTree,
};

/// Smallest number of tokens worth sharing. Fewer are copied, because each buffer of a chain is a launch of
/// its own in every step, and a few keys take as long as a launch.
const WORTH: usize = 256;

/// Largest number of buffers in a chain. A tree of conversations that branches deeper copies the contents of
/// its last buffer.
const MOST: usize = 4;

/// Keys and values of all positions from 0 on, in a chain of buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedPrefix {
    /// Buffers that are not written any more. Each holds the positions from its origin to that of the next.
    shared: Vec<Arc<Link>>,
    last: Arc<Link>,
    /// Number of rows that read a shared buffer of one row; 0 while every buffer has all rows.
    readers: usize,
}

/// A buffer that others may hold too.
#[derive(Debug, Default)]
struct Link {
    buffer: Buffer,
    /// Claim to the buffer's memory, if no cache claims it.
    claim: OnceLock<Claim>,
}

impl Link {
    fn new(buffer: Buffer) -> Arc<Self> {
        Arc::new(Self { buffer, claim: OnceLock::new() })
    }

    fn bytes(&self) -> usize {
        self.buffer.device_bytes()
    }
}

/// Shares tensors; the owner of the copy counts them.
impl Clone for Link {
    fn clone(&self) -> Self {
        Self { buffer: self.buffer.clone(), claim: OnceLock::new() }
    }
}

impl SharedPrefix {
    /// First position of the buffer that is written.
    pub(crate) fn origin(&self) -> usize {
        self.last.buffer.origin()
    }

    /// First position of the buffer that will be written after the first `filled` positions.
    pub(crate) fn next_origin(&self, filled: usize) -> usize {
        if self.branches(filled) { filled } else { self.origin() }
    }

    /// First position without a slot.
    pub(crate) fn end(&self) -> usize {
        self.origin() + self.last.buffer.slots()
    }

    /// Whether tokens after the first `filled` positions go into a new buffer.
    fn branches(&self, filled: usize) -> bool {
        Arc::strong_count(&self.last) > 1 && filled - self.origin() >= WORTH && self.shared.len() + 1 < MOST
    }

    /// Starts a new buffer if needed, before a write after the first `filled` positions: buffers that
    /// snapshots hold stay unchanged.
    pub(crate) fn branch(&mut self, filled: usize) {
        if self.branches(filled) {
            let next = Link::new(Buffer::behind(filled));
            self.shared.push(std::mem::replace(&mut self.last, next));
        }
    }

    /// Makes room up to position `end`, for rows like those of `keys`; the first `filled` positions are kept.
    pub(crate) fn resize(&mut self, end: usize, filled: usize, (keys, values): &Kv) -> Result<()> {
        let origin = self.origin();
        // All buffers of a chain have the same element type.
        let dtype = self.shared.last().and_then(|before| before.buffer.dtype()).unwrap_or(keys.dtype());
        let [keys, values] = [keys, values].map(|new| new.clone().cast(dtype));
        let last = &mut Arc::make_mut(&mut self.last).buffer;
        last.resize(end - origin, filled - origin, &(keys, values), Lifetime::UntilItGrows)
    }

    pub(crate) fn write(&mut self, kernels: &Kernels, new: Kv, positions: &Positions) -> Result<()> {
        Arc::make_mut(&mut self.last).buffer.write(kernels, new, positions)
    }

    /// Returns a view of everything, including invalid slots.
    pub(crate) fn view(&self) -> Result<KvView> {
        match self.shared.is_empty() {
            true => self.last.buffer.view(0),
            false => {
                let views = self.buffers().map(|buffer| {
                    let DenseKv { keys, values, start, origin, shared } = buffer.dense(buffer.origin())?;
                    let [keys, values] = [keys, values].map(|tensor| self.read_by_all(tensor));
                    Ok(DenseKv { keys, values, start, origin, shared })
                });
                views.collect::<Result<_>>().map(KvView::Chained)
            }
        }
    }

    /// Expands a tensor of one row to all rows without a copy.
    fn read_by_all(&self, tensor: Tensor<4>) -> Tensor<4> {
        let [rows, heads, slots, dim] = tensor.dims();
        if rows < self.readers { tensor.expand([self.readers, heads, slots, dim]) } else { tensor }
    }

    /// Returns the first `filled` positions in one piece; `None` if there are none.
    pub(crate) fn gather(&self, filled: usize) -> Result<Option<Kv>> {
        let ends = self.buffers().map(Buffer::origin).skip(1).chain([filled]);
        let parts = self.buffers().zip(ends).filter_map(|(buffer, end)| {
            let start = buffer.origin();
            buffer.gather(KvSpan { start, len: end.saturating_sub(start) }).transpose()
        });
        let mut parts: Vec<_> = parts.collect::<Result<_>>()?;
        if parts.len() < 2 {
            let all = |(keys, values)| (self.read_by_all(keys), self.read_by_all(values));
            return Ok(parts.pop().map(all));
        }
        let (keys, values): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let cat = |parts: Vec<Tensor<4>>| {
            Tensor::cat(parts.into_iter().map(|part| self.read_by_all(part)).collect(), 2)
        };
        Ok(Some((cat(keys), cat(values))))
    }

    /// Keeps only the first `filled` positions. Later positions will be overwritten.
    pub(crate) fn keep(&mut self, filled: usize) {
        while filled <= self.origin()
            && let Some(before) = self.shared.pop()
        {
            self.last = before;
            if self.last.buffer.rows().is_some_and(|rows| rows < self.readers) {
                let rows = vec![0; self.readers];
                Arc::make_mut(&mut self.last).buffer.select_rows(&rows);
            }
        }
        if self.shared.is_empty() {
            self.readers = 0;
        }
    }

    /// Whether a row that is repeated after the first `filled` positions is stored once.
    pub(crate) fn shares_row(&self, filled: usize) -> bool {
        filled >= WORTH && self.shared.len() + 1 < MOST
    }

    /// How rows are reordered: a buffer of all rows that others may hold too is copied.
    pub(crate) fn reorders(&self) -> Reorders {
        match self.shared.iter().any(|link| link.buffer.rows().is_some_and(|rows| rows >= self.readers)) {
            true => Reorders::ByCopy,
            false => Reorders::InPlace,
        }
    }

    /// Makes each row take over its parent's tokens after the prompt.
    pub(crate) fn reorder_on_device(&mut self, kernels: &Kernels, parents: &Parents) -> Result<()> {
        let readers = self.readers;
        let has_all = |buffer: &Buffer| buffer.rows().is_some_and(|rows| rows >= readers);
        let rows = parents.absolute();
        for link in self.shared.iter_mut().filter(|link| has_all(&link.buffer)) {
            let slots = Arc::make_mut(link).buffer.slots_mut();
            slots.into_iter().try_for_each(|slot| slot.select_rows_on_device(&rows))?;
        }
        match has_all(&self.last.buffer) {
            true => Arc::make_mut(&mut self.last).buffer.reorder_on_device(kernels, parents),
            false => Ok(()),
        }
    }

    /// Moves the first `filled` positions into a single buffer without spare room.
    pub(crate) fn unite(&mut self, filled: usize) -> Result<()> {
        let mut buffer = Buffer::default();
        if let Some(all) = self.gather(filled)? {
            buffer.set(all);
        }
        *self = Self { last: Link::new(buffer), ..Self::default() };
        Ok(())
    }

    /// Number of positions with a slot in a chain that was read from a file.
    ///
    /// # Errors
    /// The errors of [`Buffer::validate`].
    pub(crate) fn validate(&self, need: &AttentionNeed) -> Result<usize> {
        self.last.buffer.validate(need)
    }

    /// Footprint with room up to position `end`, once `step` was stored after the first `filled` positions.
    /// Buffers that others hold too are counted here as well.
    pub(crate) fn footprint(
        &self,
        need: &AttentionNeed,
        end: usize,
        filled: usize,
        step: &StepShape,
    ) -> Footprint {
        let as_it_is = |link: &Arc<Link>| {
            let rows = link.buffer.rows().unwrap_or(step.rows);
            let step = StepShape { rows, ..*step };
            buffer::footprint(need, link.buffer.slots(), link.buffer.slots(), &step)
        };
        let mut kept: Vec<_> = self.shared.iter().map(as_it_is).collect();
        let last = if self.branches(filled) {
            kept.push(as_it_is(&self.last));
            buffer::footprint(need, 0, end - filled, step)
        } else {
            let mut last = buffer::footprint(need, self.last.buffer.slots(), end - self.origin(), step);
            // The buffer that is copied stays where it is, too.
            if Arc::strong_count(&self.last) > 1 && step.tokens > 0 {
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

    /// Whether all positions are in one buffer that has all rows.
    pub(crate) fn is_one_buffer(&self) -> bool {
        self.shared.is_empty() && self.origin() == 0
    }

    /// Returns the buffer of all positions, which is not shared from then on.
    pub(crate) fn only_buffer(&mut self) -> Option<&mut Slot<Kv>> {
        self.is_one_buffer().then(|| Arc::make_mut(&mut self.last).buffer.slot())
    }

    fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.shared.iter().chain([&self.last])
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.links().map(|link| &link.buffer)
    }

    /// Iterates over the buffers. Buffers that others hold too are replaced by own ones with the same
    /// tensors.
    fn buffers_mut(&mut self) -> impl Iterator<Item = &mut Buffer> {
        self.shared.iter_mut().chain([&mut self.last]).map(|link| &mut Arc::make_mut(link).buffer)
    }
}

impl TensorTree for SharedPrefix {
    fn batch_rows(&self) -> Option<usize> {
        let rows = self.buffers().find_map(Buffer::rows)?;
        Some(rows.max(self.readers))
    }

    fn has_all_rows(&self) -> bool {
        self.readers == 0
    }

    fn reorder(&mut self, rows: &[usize], filled: usize) {
        let becomes_several = self.batch_rows() == Some(1) && rows.len() > 1;
        if becomes_several && self.shares_row(filled) {
            if filled > self.origin() {
                let next = Link::new(Buffer::behind(filled));
                self.shared.push(std::mem::replace(&mut self.last, next));
            }
            self.readers = rows.len();
            return;
        }
        let readers = self.readers;
        for buffer in self.buffers_mut().filter(|buffer| buffer.rows().is_some_and(|rows| rows >= readers)) {
            buffer.select_rows(rows);
        }
        // A single row uses the prompt alone.
        self.readers = if readers > 0 && rows.len() > 1 { rows.len() } else { 0 };
    }

    fn shared_bytes(&self) -> usize {
        self.links().filter(|link| Arc::strong_count(link) > 1).map(|link| link.bytes()).sum()
    }

    fn claim_shared(&self, all: &Claim) {
        for link in self.links().filter(|link| link.claim.get().is_none()) {
            if let Some(claim) = all.split(link.bytes() as u64) {
                // If another thread was faster, this claim is freed.
                _ = link.claim.set(claim);
            }
        }
    }

    fn claimed_apart(&mut self, all: &Claim) -> usize {
        let claimed = |link: &mut Arc<Link>| {
            if let Some(claim) = Arc::get_mut(link).and_then(|alone| alone.claim.take()) {
                all.join(claim);
            }
            link.claim.get().map_or(0, |claim| claim.bytes() as usize)
        };
        self.shared.iter_mut().chain([&mut self.last]).map(claimed).sum()
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        self.buffers().flat_map(TensorTree::slots).collect()
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        self.buffers_mut().flat_map(TensorTree::slots_mut).collect()
    }
}
