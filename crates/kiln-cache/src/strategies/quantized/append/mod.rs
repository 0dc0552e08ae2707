//! The rule of KIVI: a block of tokens is packed once, when it is full, and never touched again.
//!
//! A query at position `q` sees the positions before `q - q mod residual` as codes and those behind as they are: what it
//! sees depends on where it stands only, so that a roll-back is exact. The queries of a chunk see what its first one sees,
//! and all of the chunk: a prompt fed at once sees nothing packed.

mod blocks;
mod saved;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    layer::{CacheLayer, Feed, Footprint, KvLayer, KvSpan, LayerState, Place},
    need::AttentionNeed,
    packed::{Along, PackedBuffer, PackedKv, Packing},
    slot::{AnySlot, Slot, Touched},
    view::{DenseKv, KvView, PackedView},
};
use kiln_kernels::Kernels;

use self::blocks::{copy_blocks, refined_scales};
use super::{Settled, rotation};
use crate::{
    buffer::{Buffer, Lives},
    quantizers::Grouping,
};

/// Of keys and of values.
type Packed = (PackedBuffer, PackedBuffer);

/// How keys and values are packed.
pub(super) fn packings(settled: &Settled) -> Result<[Packing; 2]> {
    let packing = |which: usize| {
        let along = match settled.grouping(which) {
            Grouping::Neighbours => Along::Channels,
            Grouping::Strided | Grouping::PerChannel => Along::Tokens,
        };
        Packing::new(settled.bits[which], settled.group, along)
    };
    Ok([packing(0)?, packing(1)?])
}

/// What `tokens` tokens of a row take: codes of those that are packed, and the room for the others.
pub(super) fn bytes(settled: &Settled, need: &AttentionNeed, tokens: usize, element: usize) -> usize {
    let Ok(packings) = packings(settled) else { return 0 };
    let residual = settled.residual;
    let full = tokens.saturating_sub(1) / residual * residual;
    let slots = need.window.map_or(full, |window| full.min(ring(window, 1, residual)));
    let packed = |packing: Packing| packing.bytes([1, need.kv_heads, slots, need.head_dim]);
    let [keys, values] = packings.map(packed);
    need.token_bytes(element).saturating_mul(residual).saturating_add(keys).saturating_add(values)
}

/// Slots for the packed part of a window, in whole blocks.
fn ring(window: usize, history: usize, block: usize) -> usize {
    (window.saturating_sub(1) + history).next_multiple_of(block)
}

#[derive(Clone, Debug)]
pub(super) struct AppendLayer {
    settled: Settled,
    packings: [Packing; 2],
    kernels: Kernels,
    packed: Slot<Packed>,
    /// Slots of it, known also while it is away.
    slots: usize,
    /// Whether it changed since that was asked before.
    repacked: bool,
    /// A ring of the latest tokens: position `p` is in slot `p mod slots`.
    recent: Buffer,
    /// The first position that is not packed, as far as queries know.
    end: usize,
    /// The same for kernels, once they have asked.
    end_on_device: Option<Tensor<1, Int>>,
    /// The most that `end` has been: what the ring of a window has been written up to.
    written: usize,
    /// The first position that was copied when the packed part last grew; 0 as long as it did not.
    copied: usize,
    /// The first position that the recent tokens still hold.
    oldest: usize,
    seq_len: usize,
    /// Tokens that can be rolled back at any time, at least 1.
    history: usize,
    /// What it was told the sequence will reach.
    reserved: usize,
    rotation: Option<Tensor<2>>,
}

impl AppendLayer {
    pub(super) fn new(settled: &Settled, need: &AttentionNeed, kernels: &Kernels) -> Result<Self> {
        Ok(Self {
            settled: settled.clone(),
            packings: packings(settled)?,
            kernels: kernels.clone(),
            packed: Slot::Empty,
            slots: 0,
            repacked: false,
            recent: Buffer::new(need, kernels),
            end: 0,
            end_on_device: None,
            written: 0,
            copied: 0,
            oldest: 0,
            seq_len: 0,
            history: 1,
            reserved: 0,
            rotation: None,
        })
    }

    fn need(&self) -> &AttentionNeed {
        self.recent.need()
    }

    /// Where the block begins that a token at `position` is in.
    fn block(&self, position: usize) -> usize {
        position - position % self.settled.residual
    }

    /// Slots of the recent tokens: a block, and what may be rolled back beyond one.
    fn room(&self) -> usize {
        self.settled.residual + self.history - 1
    }

    /// The first position that the next query may see.
    fn visible(&self) -> usize {
        self.need().window.map_or(0, |window| (self.seq_len + 1).saturating_sub(window))
    }

    /// The first position that the packed part still holds.
    fn held(&self) -> usize {
        match self.need().window {
            Some(_) => self.written.saturating_sub(self.slots).max(self.copied),
            None => 0,
        }
    }

    /// Packs the positions from `self.end` to `end`, both the beginning of a block. They are in `keys` and `values`, which
    /// begin with position `self.end`.
    fn pack(&mut self, end: usize, [keys, values]: [Tensor<4>; 2]) -> Result<()> {
        if end == self.end {
            return Ok(());
        }
        self.make_room(end, &keys)?;
        self.repacked = true;
        // What the ring of a window would overwrite again is left out.
        let begin = self.end.max(end.saturating_sub(self.slots));
        let Some((k, v)) = self.packed.take()? else { return Ok(()) };
        let [key_packing, value_packing] = self.packings;
        let part = |x: Tensor<4>| x.narrow(2, begin - self.end, end - begin);
        let k = self.packed_into(k, part(keys), begin, key_packing, 0);
        let v = self.packed_into(v, part(values), begin, value_packing, 1);
        self.packed = Slot::Here((k, v));
        (self.end, self.end_on_device) = (end, None);
        self.written = self.written.max(end);
        Ok(())
    }

    fn packed_into(
        &self,
        buffer: PackedBuffer,
        tokens: Tensor<4>,
        position: usize,
        packing: Packing,
        which: usize,
    ) -> PackedBuffer {
        let slot = position % buffer.slots();
        let recipe = self.settled.recipes(DType::F32)[which];
        let refined = |x: Tensor<2>| self.settled.format.refined(x, &recipe);
        match refined_scales(&tokens, packing, refined) {
            Some([scale, offset]) => self.kernels.pack_given(buffer, tokens, scale, offset, slot, packing),
            None => self.kernels.pack(buffer, tokens, slot, packing),
        }
    }

    /// Slots that hold the positions before `end`.
    fn slots_for(&self, end: usize) -> usize {
        match self.need().window {
            Some(window) => ring(window, self.history, self.settled.residual),
            None if end <= self.slots => self.slots,
            // Copies are rare, and little is held in advance.
            None => {
                let expected = self.block(self.reserved.saturating_sub(1));
                end.max(expected).max(self.slots + self.block(self.slots / 16))
            }
        }
    }

    /// Has slots for the positions before `end`, for rows like those of `keys`.
    fn make_room(&mut self, end: usize, keys: &Tensor<4>) -> Result<()> {
        let slots = self.slots_for(end);
        let [rows, heads, _, dim] = keys.dims();
        let device = keys.device();
        let old = self.packed.take()?;
        let same = |(k, _): &Packed| k.codes.dims()[0] == rows && k.slots() == slots;
        let old = match old {
            Some(old) if same(&old) => {
                self.packed = Slot::Here(old);
                return Ok(());
            }
            old => old.filter(|_| self.end > 0),
        };
        let shape = [rows, heads, slots, dim];
        let [mut k, mut v] = self.packings.map(|packing| PackedBuffer::zeros(shape, packing, &device));
        if let Some((old_k, old_v)) = old {
            let (from, to) = (self.held().max(self.end.saturating_sub(slots)), self.end);
            self.copied = from;
            for (new, old, packing) in [(&mut k, old_k, self.packings[0]), (&mut v, old_v, self.packings[1])]
            {
                copy_blocks(new, &old, packing.slots_together(), [from, to]);
            }
        }
        self.packed = Slot::Here((k, v));
        self.slots = slots;
        self.written = self.end;
        Ok(())
    }

    /// What attention reads: what is packed, and `recent`.
    fn seen(&mut self, keys: Tensor<4>, values: Tensor<4>, start: usize, origin: usize) -> Result<KvView> {
        let recent = DenseKv { keys, values, start, origin };
        let packed = match self.packed.get()?.cloned().filter(|_| self.end > 0) {
            None if self.rotation.is_none() => return Ok(KvView::Dense(recent)),
            None => None,
            Some((keys, values)) => {
                let device = recent.keys.device();
                let end = self.end_on_device.get_or_insert_with(|| {
                    Tensor::from_data(TensorData::new(vec![self.end as i32], [1]), (&device, DType::I32))
                });
                let [key_packing, value_packing] = self.packings;
                Some(PackedKv { keys, values, key_packing, value_packing, origin: 0, end: end.clone() })
            }
        };
        let rotation = self.rotation.clone();
        Ok(KvView::Packed(Box::new(PackedView { packed, end: self.end, recent, rotation })))
    }

    /// Has the matrix that keys like these are rotated by, if they are.
    fn prepare_rotation(&mut self, keys: &Tensor<4>) -> Result<()> {
        if self.rotation.is_none() && self.settled.rotates(self.need()) {
            let matrix = rotation::matrix(self.need().head_dim, keys.dtype(), &keys.device())?;
            self.rotation = Some(matrix);
        }
        Ok(())
    }

    fn rotated(&mut self, keys: Tensor<4>, values: Tensor<4>) -> Result<[Tensor<4>; 2]> {
        self.prepare_rotation(&keys)?;
        let rotate = |x: Tensor<4>| match &self.rotation {
            Some(matrix) => x.matmul(matrix.clone().unsqueeze()),
            None => x,
        };
        Ok([rotate(keys), rotate(values)])
    }
}

impl KvLayer for AppendLayer {
    fn span(&self, n: usize) -> KvSpan {
        let start = self.visible();
        KvSpan { start, len: self.seq_len + n - start }
    }

    fn update(&mut self, keys: Tensor<4>, values: Tensor<4>, place: &Place) -> Result<KvView> {
        self.recent.check(&keys, self.seq_len)?;
        // Nothing was changed so far, and nothing fails from here on but the device.
        self.packed.get()?;
        let (n, first, start) = (keys.dims()[2], self.seq_len, self.visible());
        let [keys, values] = self.rotated(keys, values)?;

        let due = self.block(first);
        if self.end < due {
            let (k, v) = self.recent.in_order(KvSpan { start: self.end, len: due - self.end })?;
            self.pack(due, [k, v])?;
        }
        let view = if first + n - self.end <= self.room() {
            self.grow_recent([&keys, &values])?;
            self.recent.write(keys, values, place)?;
            self.seq_len = first + n;
            let (keys, values) = self.recent.get()?;
            self.seen(keys, values, start, 0)?
        } else {
            // A chunk longer than the ring: its queries get it in order, the ring gets its end, and the rest is packed.
            let before = KvSpan { start: self.end, len: first - self.end };
            let all = match before.len {
                0 => [keys, values],
                _ => {
                    let (k, v) = self.recent.in_order(before)?;
                    [Tensor::cat(vec![k, keys], 2), Tensor::cat(vec![v, values], 2)]
                }
            };
            let [k, v] = all.clone();
            let (begin, last) = (self.end, first + n);
            let view = self.seen(k, v, start, begin)?;
            self.seq_len = last;
            let kept = (last - begin).min(self.room());
            self.recent.truncate(0);
            self.grow_recent([&all[0], &all[1]])?;
            let [k, v] = all.clone().map(|x| x.narrow(2, last - begin - kept, kept));
            let position = Place::new(last - kept, &[], &k.device());
            self.recent.write(k, v, &position)?;
            self.pack(self.block(last - 1), all)?;
            self.oldest = last - kept;
            view
        };
        self.oldest = self.oldest.max(self.seq_len.saturating_sub(self.recent.slots()));
        Ok(view)
    }

    fn dense(&self) -> Result<Option<(Tensor<4>, Tensor<4>)>> {
        let span = self.span(0);
        if span.len == 0 {
            return Ok(None);
        }
        let end = self.end.max(span.start);
        let recent = match self.seq_len - end {
            0 => None,
            len => Some(self.recent.in_order(KvSpan { start: end, len })?),
        };
        let dtype = self.recent.get()?.0.dtype();
        let both = match (self.packed.get()?.filter(|_| end > span.start), recent) {
            (None, None) => return Ok(None),
            (None, Some(recent)) => recent,
            (Some((keys, values)), recent) => {
                let unpack = |buffer: &PackedBuffer, packing| {
                    self.kernels.unpack(buffer, packing, self.need().head_dim, 0..self.slots, FloatDType::F32)
                };
                let (keys, values) = (unpack(keys, self.packings[0]), unpack(values, self.packings[1]));
                let old = KvSpan { start: span.start, len: end - span.start };
                let (keys, values) = DenseKv { keys, values, start: 0, origin: 0 }.in_order(old);
                let (keys, values) = (keys.cast(dtype), values.cast(dtype));
                match recent {
                    None => (keys, values),
                    Some((k, v)) => (Tensor::cat(vec![keys, k], 2), Tensor::cat(vec![values, v], 2)),
                }
            }
        };
        let back = |x: Tensor<4>| match &self.rotation {
            Some(matrix) => x.matmul(matrix.clone().unsqueeze()),
            None => x,
        };
        Ok(Some((back(both.0), back(both.1))))
    }

    fn is_static(&self) -> bool {
        true
    }

    fn repeats(&self) -> usize {
        let begin = self.block(self.seq_len);
        let ready = self.seq_len > 0 && self.end == begin && self.recent.slots() == self.room();
        // Where nothing is packed yet, the first token behind the block is another launch.
        if ready { begin + self.settled.residual - self.seq_len } else { 0 }
    }

    fn repeated(&mut self) {
        self.seq_len += 1;
        self.oldest = self.oldest.max(self.seq_len.saturating_sub(self.recent.slots()));
    }

    fn snapshot(&self) -> Box<dyn KvLayer> {
        Box::new(self.clone())
    }
}

impl AppendLayer {
    /// Has the ring as long as it has to be, with what it holds.
    fn grow_recent(&mut self, [keys, values]: [&Tensor<4>; 2]) -> Result<()> {
        let (have, room) = (self.recent.slots(), self.room());
        if have == room {
            return self.recent.resize(room, self.seq_len, [keys, values], Lives::AsLongAsTheSequence);
        }
        let first = self.oldest;
        let kept = KvSpan { start: first, len: self.seq_len - first };
        if have == 0 || kept.len == 0 {
            return self.recent.resize(room, 0, [keys, values], Lives::AsLongAsTheSequence);
        }
        let (old_keys, old_values) = self.recent.in_order(kept)?;
        self.recent.resize(room, 0, [keys, values], Lives::AsLongAsTheSequence)?;
        let place = Place::new(first, &[], &keys.device());
        self.recent.write(old_keys, old_values, &place)
    }
}

impl CacheLayer for AppendLayer {
    fn name(&self) -> &'static str {
        "quantized"
    }

    fn seq_len(&self) -> usize {
        self.seq_len
    }

    fn can_roll_back(&self, n: usize) -> bool {
        let Some(target) = self.seq_len.checked_sub(n) else { return false };
        let end = self.end.min(self.block(target));
        let visible = self.need().window.map_or(0, |window| (target + 1).saturating_sub(window));
        (end >= self.oldest || end == target) && visible.min(end) >= self.held().min(end)
    }

    fn roll_back(&mut self, n: usize) -> Result<()> {
        if !self.can_roll_back(n) {
            return Err(Error::CannotRollBack { layer: self.name(), tokens: n });
        }
        if n == self.seq_len {
            self.forget();
            return Ok(());
        }
        self.seq_len -= n;
        let end = self.end.min(self.block(self.seq_len));
        if end != self.end {
            (self.end, self.end_on_device) = (end, None);
        }
        // A ring that was written from there on holds nothing older.
        self.oldest = self.oldest.min(self.seq_len);
        Ok(())
    }

    fn keep_history(&mut self, n: usize) {
        self.history = self.history.max(n);
    }

    fn reserve(&mut self, tokens: usize) {
        self.reserved = self.reserved.max(tokens);
    }

    fn reset(&mut self) {
        self.forget();
        self.reserved = 0;
    }

    fn counts(&self) -> Vec<usize> {
        vec![self.seq_len, self.end, self.written, self.copied, self.oldest, self.history]
    }

    fn restore(&mut self, state: LayerState, device: &Device) -> Result<()> {
        self.restored(state, device)
    }

    fn touched(&mut self) -> Vec<Touched> {
        let packed = if std::mem::take(&mut self.repacked) { Touched::Everything } else { Touched::Nothing };
        vec![packed, self.recent.touched()]
    }

    /// While a chunk is stored it is there as it is, and what is packed twice: as its queries see it, and with what became
    /// of the chunk.
    fn footprint(&self, feed: &Feed) -> Footprint {
        let need = self.need();
        let packed = |slots: usize| {
            let shape = [feed.rows, need.kv_heads, slots, need.head_dim];
            let [keys, values] = self.packings.map(|packing| packing.bytes(shape));
            keys.saturating_add(values)
        };
        let end = self.block(self.seq_len.saturating_add(feed.tokens).saturating_sub(1));
        let slots = if end == 0 { self.slots } else { self.slots_for(end) };
        let token = need.token_bytes(feed.element).saturating_mul(feed.rows);
        let chunk = if feed.tokens > 1 { self.settled.residual.saturating_add(feed.tokens) } else { 0 };
        let overruns = self.seq_len.saturating_add(feed.tokens) - self.end > self.room();
        let moved = if slots > self.slots || overruns { packed(self.slots) } else { 0 };
        let held = packed(slots).saturating_add(token.saturating_mul(self.room()));
        Footprint { held, largest: held, passing: token.saturating_mul(chunk).saturating_add(moved) }
    }

    fn slots(&self) -> Vec<&dyn AnySlot> {
        vec![&self.packed, self.recent.slot()]
    }

    fn slots_mut(&mut self) -> Vec<&mut dyn AnySlot> {
        vec![&mut self.packed, self.recent.slot_mut()]
    }
}

impl AppendLayer {
    fn forget(&mut self) {
        self.recent.truncate(0);
        (self.packed, self.slots, self.end_on_device, self.repacked) = (Slot::Empty, 0, None, true);
        (self.end, self.written, self.copied, self.oldest, self.seq_len) = (0, 0, 0, 0, 0);
    }
}
