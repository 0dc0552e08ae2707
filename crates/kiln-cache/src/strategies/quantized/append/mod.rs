//! KIVI's rule (Liu et al., 2024, <https://arxiv.org/abs/2402.02750>): tokens are packed once, a block at a
//! time, and never packed again.
//!
//! In this module, a block is `residual` tokens, the first at a multiple of `residual`. A query at position
//! `q` sees the positions before its block, `q - q mod residual`, as codes, and later ones in full precision.
//! The view depends only on the position of the query, so a truncation is exact. All queries of a chunk of a
//! prompt see the positions before the block of the first query as codes, and later ones, including the whole
//! chunk, in full precision. A prompt fed at once therefore sees no codes.
//!
//! Packed tokens are in one buffer, recent ones in another, in full precision. The buffer of recent tokens is
//! a ring, in which position `p` is in slot `p mod slots`; so is the packed buffer of a layer with a window.

mod blocks;

use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use kiln_core::{
    Result,
    layer::{Footprint, Kv, KvSpan, Limits, Positions, StepShape},
    need::{AttentionNeed, Stream},
    packed::{Along, PackedBuffer, PackedKv, Packing},
    slot::Slot,
    view::{DenseKv, KvView, PackedView},
};
use kiln_kernels::{Kernels, KvPack, KvUnpack, product};
use serde::{Deserialize, Serialize};

use self::blocks::{copy_blocks, refined_scales};
use super::{QuantizedSettings, rotation};
use crate::{
    buffer::{Buffer, Lifetime, behind, narrow},
    memory::{EncoderPolicy, KvPolicy, Policy, Progress, check, tensor_tree},
    quantizers::Grouping,
};

/// Packed keys and packed values.
type Packed = (PackedBuffer, PackedBuffer);

/// Returns the packings of keys and of values.
///
/// # Errors
/// The errors of [`Packing::new`].
pub(super) fn packings(settings: &QuantizedSettings) -> Result<[Packing; 2]> {
    let packing = |which: usize| {
        let along = match settings.grouping(which) {
            Grouping::Neighbours => Along::Channels,
            Grouping::Strided | Grouping::PerChannel => Along::Tokens,
        };
        Packing::new(settings.bits()[which], settings.group, along)
    };
    Ok([packing(0)?, packing(1)?])
}

/// Number of bytes for `tokens` tokens of one row in one block of the model: codes and scales of the packed
/// tokens, and a buffer of `residual` tokens in full precision. `element`: bytes per element of the latter.
pub(super) fn bytes(
    settings: &QuantizedSettings,
    need: &AttentionNeed,
    tokens: usize,
    element: usize,
) -> usize {
    let Ok(packings) = packings(settings) else { return 0 };
    let residual = settings.residual;
    let full = tokens.saturating_sub(1) / residual * residual;
    let slots = need.window.map_or(full, |window| full.min(ring(window, 1, residual)));
    let [keys, values] = packed_bytes(packings, need, 1, slots);
    need.token_bytes(element).saturating_mul(residual).saturating_add(keys).saturating_add(values)
}

/// Number of bytes of packed keys and of packed values.
fn packed_bytes(packings: [Packing; 2], need: &AttentionNeed, rows: usize, slots: usize) -> [usize; 2] {
    let streams = need.streams();
    [0, 1].map(|which| packings[which].bytes(streams[which].shape(rows, slots)))
}

/// Number of slots for the packed tokens of a layer with a window of `window` tokens, if the latest `history`
/// tokens may be truncated: a multiple of `block`.
fn ring(window: usize, history: usize, block: usize) -> usize {
    (window.saturating_sub(1) + history).next_multiple_of(block)
}

/// The policy of `flush=append`, for one block of the model.
#[derive(Clone, Debug)]
pub(super) struct AppendPolicy {
    settings: QuantizedSettings,
    packings: [Packing; 2],
    need: AttentionNeed,
    kernels: Kernels,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    /// First position that queries do not see as codes; a multiple of `residual`. After a truncation, later
    /// positions may still be in the packed buffer.
    end: usize,
    /// Largest value that `end` has had since the packed buffer was allocated: the ring of a window has been
    /// written up to it.
    written: usize,
    /// First position that the packed buffer still holds.
    begin: usize,
    /// First position that the buffer of recent tokens still holds.
    oldest: usize,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Tensors {
    packed: Slot<Packed>,
    /// Ring of the latest tokens in full precision: position `p` is in slot `p mod slots`.
    recent: Buffer,
    /// Tensors that are computed from counters and settings when a kernel first needs them. They are not
    /// saved.
    derived: Derived,
}

tensor_tree!(Tensors { packed, recent });

#[derive(Clone, Debug, Default)]
struct Derived {
    /// `[1]`: [`Counts::end`] on the device, with its value.
    end: Option<(usize, Tensor<1, Int>)>,
    /// `[width, width]`: Hadamard matrices that keys and values are multiplied by, if they are rotated.
    rotation: Option<[Tensor<2>; 2]>,
}

/// Progress of the layer in its sequence.
type At = Progress<Counts>;

impl AppendPolicy {
    pub(super) fn new(settings: &QuantizedSettings, need: &AttentionNeed, kernels: &Kernels) -> Result<Self> {
        let packings = packings(settings)?;
        Ok(Self { settings: settings.clone(), packings, need: need.clone(), kernels: kernels.clone() })
    }

    /// Start of the block that contains `position`.
    fn block(&self, position: usize) -> usize {
        position - position % self.settings.residual
    }

    /// Number of slots for recent tokens: one block, plus one slot for each token beyond the first that may
    /// be truncated.
    fn room(&self, at: &At) -> usize {
        self.settings.residual + at.history.max(1) - 1
    }

    /// First position that a query after `len` tokens may see.
    fn visible(&self, len: usize) -> usize {
        self.need.window.map_or(0, |window| (len + 1).saturating_sub(window))
    }

    /// Packs the positions from `counts.end` up to, but not including, `end`; both are multiples of
    /// `residual`. `all`: keys and values from position `counts.end` on.
    fn pack(&self, at: &mut At, tensors: &mut Tensors, end: usize, all: Kv) -> Result<()> {
        if end == at.counts.end {
            return Ok(());
        }
        self.make_room(at, tensors, end, &all)?;
        // Tokens that the ring of a window would overwrite again are left out.
        let begin = at.counts.end.max(end.saturating_sub(tensors.packed.tokens()));
        let Some((k, v)) = tensors.packed.take()? else { return Ok(()) };
        let (keys, values) = narrow(&all, begin - at.counts.end, end - begin);
        tensors.packed.set((self.packed_into(k, keys, begin, 0), self.packed_into(v, values, begin, 1)));
        at.counts.end = end;
        at.counts.written = at.counts.written.max(end);
        at.counts.begin = at.counts.begin.max(at.counts.written.saturating_sub(tensors.packed.tokens()));
        Ok(())
    }

    /// Packs `tokens`, `[rows, heads, tokens, width]`, from `position` on into a buffer of keys
    /// (`which` = 0) or values (1).
    fn packed_into(
        &self,
        buffer: PackedBuffer,
        tokens: Tensor<4>,
        position: usize,
        which: usize,
    ) -> PackedBuffer {
        let (slot, packing) = (position % buffer.slots(), self.packings[which]);
        let recipe = self.settings.recipes(DType::F32)[which];
        let refined = |x: Tensor<2>| (self.settings.format.refined)(x, &recipe);
        let given = refined_scales(&tokens, packing, refined);
        self.kernels.run(KvPack { buffer, tokens, slot, packing, given })
    }

    /// Number of slots that the packed buffer needs for the positions before `end`; `have`: current number.
    fn slots_for(&self, at: &At, have: usize, end: usize) -> usize {
        match self.need.window {
            Some(window) => ring(window, at.history.max(1), self.settings.residual),
            None if end <= have => have,
            // Growth by a sixteenth makes copies rare, and leaves little memory unused. If the final length
            // is known (`horizon`), all is allocated at once.
            None => end.max(self.block(at.horizon.saturating_sub(1))).max(have + self.block(have / 16)),
        }
    }

    /// Reallocates the packed buffer if it does not fit the positions before `end`, or the batch of `new`
    /// keys and values. Keeps its contents, unless nothing is packed.
    fn make_room(&self, at: &mut At, tensors: &mut Tensors, end: usize, new: &Kv) -> Result<()> {
        let have = tensors.packed.tokens();
        let slots = self.slots_for(at, have, end);
        let (rows, device) = (new.0.dims()[0], new.0.device());
        let old = match tensors.packed.take()? {
            Some((k, v)) if (k.codes.dims()[0], have) == (rows, slots) => {
                tensors.packed.set_written((k, v), []);
                return Ok(());
            }
            old => old.filter(|_| at.counts.end > 0),
        };
        at.counts.begin =
            if old.is_some() { at.counts.begin.max(at.counts.end.saturating_sub(slots)) } else { 0 };
        let empty = |like: &Tensor<4>, packing| {
            let [_, heads, _, width] = like.dims();
            PackedBuffer::zeros([rows, heads, slots, width], packing, &device)
        };
        let (mut k, mut v) = (empty(&new.0, self.packings[0]), empty(&new.1, self.packings[1]));
        if let Some((old_k, old_v)) = old {
            let range = [at.counts.begin, at.counts.end];
            for (new, old, packing) in [(&mut k, old_k, self.packings[0]), (&mut v, old_v, self.packings[1])]
            {
                copy_blocks(new, &old, packing.slots_together(), range);
            }
        }
        tensors.packed.set((k, v));
        at.counts.written = at.counts.end;
        Ok(())
    }

    /// Returns the view for attention: the packed keys and values, if there are any, and `recent`.
    fn seen(&self, at: &At, tensors: &mut Tensors, recent: DenseKv) -> Result<KvView> {
        let end = at.counts.end;
        let rotation = tensors.derived.rotation.clone();
        let packed = match tensors.packed.get()?.cloned().filter(|_| end > 0) {
            None if rotation.is_none() => return Ok(KvView::Dense(recent)),
            None => None,
            Some((keys, values)) => {
                let [key_packing, value_packing] = self.packings;
                let end = tensors.derived.end(end, &recent.keys);
                Some(PackedKv { keys, values, key_packing, value_packing, origin: 0, end })
            }
        };
        Ok(KvView::Packed(Box::new(PackedView { packed, end, recent, rotation })))
    }

    /// Returns the matrices that keys and values are multiplied by before they are stored, in the type of
    /// `like`; `None` if they are not rotated. Each matrix is its own inverse.
    fn rotation(&self, derived: &Derived, like: &Tensor<4>) -> Result<Option<[Tensor<2>; 2]>> {
        match &derived.rotation {
            None if self.settings.rotates(&self.need) => {
                let [keys, values] = self.need.streams().map(|stream| stream.width);
                let matrix = |width| rotation::matrix(width, like.dtype(), &like.device());
                let of_keys = matrix(keys)?;
                let of_values = if values == keys { of_keys.clone() } else { matrix(values)? };
                Ok(Some([of_keys, of_values]))
            }
            known => Ok(known.clone()),
        }
    }

    /// Resizes the ring of recent tokens to [`room`](Self::room) slots, and keeps its contents. `new`: keys
    /// and values whose shape and type it gets.
    fn grow_recent(&self, at: &At, recent: &mut Buffer, new: &Kv) -> Result<()> {
        let (have, room) = (recent.slots(), self.room(at));
        if have == room {
            return recent.resize(room, at.seq_len, new, Lifetime::AsLongAsTheSequence);
        }
        let first = at.counts.oldest.max(at.seq_len.saturating_sub(room));
        let kept = if have == 0 { 0 } else { at.seq_len - first };
        let old = recent.gather(KvSpan { start: first, len: kept })?;
        recent.resize(room, 0, new, Lifetime::AsLongAsTheSequence)?;
        match old {
            Some(old) => recent.write_from(&self.kernels, old, first),
            None => Ok(()),
        }
    }

    /// Number of slots of a packed buffer that was read from a file; 0 if there is none.
    ///
    /// # Errors
    /// [`Error::Import`](kiln_core::Error::Import) if its shapes do not fit this block of the model.
    fn packed_slots(&self, packed: &Slot<Packed>) -> Result<usize> {
        let Some((keys, values)) = packed.get()? else { return Ok(0) };
        let fits = |buffer: &PackedBuffer, packing: &Packing, stream: Stream| {
            let [rows, _, slots, _] = buffer.codes.dims();
            let shape = stream.shape(rows, slots);
            rows > 0
                && slots > 0
                && slots.is_multiple_of(packing.slots_together())
                && buffer.codes.dims() == packing.codes_shape(shape)
                && buffer.scales.dims() == packing.scales_shape(shape)
        };
        let [key_packing, value_packing] = &self.packings;
        check(fits(keys, key_packing, self.need.keys) && fits(values, value_packing, self.need.values))?;
        let sizes = |buffer: &PackedBuffer| (buffer.codes.dims()[0], buffer.slots());
        check(sizes(keys) == sizes(values))?;
        Ok(keys.slots())
    }
}

impl Derived {
    /// Returns `end` on the device of `like`, `[1]`.
    fn end(&mut self, end: usize, like: &Tensor<4>) -> Tensor<1, Int> {
        let known = self.end.take().filter(|(known, _)| *known == end);
        let (_, on_device) = self.end.insert(known.unwrap_or_else(|| {
            let data = TensorData::new(vec![end as i32], [1]);
            (end, Tensor::from_data(data, (&like.device(), DType::I32)))
        }));
        on_device.clone()
    }
}

/// Multiplies keys and values by their matrices, if there are any.
fn rotated((keys, values): Kv, rotation: Option<&[Tensor<2>; 2]>) -> Kv {
    let Some([of_keys, of_values]) = rotation else { return (keys, values) };
    let rotate = |x: Tensor<4>, matrix: &Tensor<2>| product(x, matrix.clone().unsqueeze());
    (rotate(keys, of_keys), rotate(values, of_values))
}

impl Policy for AppendPolicy {
    const NAME: &'static str = "quantized";
    type Counts = Counts;
    type Tensors = Tensors;

    /// While a chunk is stored, it is held in full precision. If its tokens are packed, the packed buffer
    /// exists twice: without them, as the queries of the chunk see it, and with them.
    fn footprint(&self, at: &At, tensors: &Tensors, step: &StepShape) -> Footprint {
        let need = &self.need;
        let both = |slots: usize| packed_bytes(self.packings, need, step.rows, slots);
        let packed = |slots: usize| both(slots).into_iter().fold(0, usize::saturating_add);
        let have = tensors.packed.tokens();
        let after = at.seq_len.saturating_add(step.tokens);
        let end = self.block(after.saturating_sub(1));
        let slots = if end == 0 { have } else { self.slots_for(at, have, end) };
        let token = need.token_bytes(step.element).saturating_mul(step.rows);
        let chunk = if step.tokens > 1 { self.settings.residual.saturating_add(step.tokens) } else { 0 };
        let overruns = after - at.counts.end > self.room(at);
        let moved = if slots > have || overruns { packed(have) } else { 0 };
        let held = packed(slots).saturating_add(token.saturating_mul(self.room(at)));
        let recent = need.largest_bytes(step.element).saturating_mul(step.rows).saturating_mul(self.room(at));
        let largest = both(slots).into_iter().fold(recent, usize::max);
        Footprint { held, largest, passing: token.saturating_mul(chunk).saturating_add(moved) }
    }

    fn rewind_point(&self, at: &At, at_most: usize) -> Option<usize> {
        let Counts { end, oldest, begin, .. } = at.counts;
        let now = end.min(self.block(at_most));
        let recent = now >= oldest || now == at_most;
        let held = self.visible(at_most).min(now) >= begin.min(now);
        (at_most > 0 && recent && held).then_some(at_most)
    }

    fn rewind(&self, at: &mut At, _: &mut Tensors, len: usize) -> Result<()> {
        at.counts.end = at.counts.end.min(self.block(len));
        // If the ring holds only positions from `len` on, no remaining token is in it.
        at.counts.oldest = at.counts.oldest.min(len);
        Ok(())
    }

    fn validate(&self, at: &At, tensors: &Tensors) -> Result<()> {
        let (seq_len, Counts { end, written, begin, oldest }) = (at.seq_len, at.counts.clone());
        let room = tensors.recent.validate(&self.need)?;
        let slots = self.packed_slots(&tensors.packed)?;
        let block = self.settings.residual;
        check(
            end.is_multiple_of(block)
                && end <= seq_len
                && end <= written
                && written.is_multiple_of(block)
                && oldest <= seq_len
                && (oldest <= end || end == seq_len)
                && (room == 0) == (seq_len == 0)
                && seq_len - oldest <= room,
        )?;
        check(match self.need.window {
            None => slots >= written && begin == 0,
            Some(_) => {
                let visible = self.visible(seq_len).min(end);
                slots.is_multiple_of(block) && written.saturating_sub(slots) <= begin && begin <= visible
            }
        })
    }
}

impl EncoderPolicy for AppendPolicy {
    fn stored(&self, at: &At, tensors: &mut Tensors) -> Result<KvView> {
        let recent = tensors.recent.dense(0)?;
        self.seen(at, tensors, recent)
    }
}

impl KvPolicy for AppendPolicy {
    fn streams(&self) -> Option<[Stream; 2]> {
        Some(self.need.streams())
    }

    fn span(&self, at: &At, n: usize) -> KvSpan {
        let start = self.visible(at.seq_len);
        KvSpan { start, len: at.seq_len + n - start }
    }

    fn limits(&self, _: &At) -> Limits {
        Limits { fixed_buffers: true, by_pass: true, ..Limits::default() }
    }

    fn append(&self, at: &mut At, tensors: &mut Tensors, new: Kv, positions: &Positions) -> Result<KvView> {
        let (n, first, start) = (new.0.dims()[2], at.seq_len, self.visible(at.seq_len));
        tensors.derived.rotation = self.rotation(&tensors.derived, &new.0)?;
        let new = rotated(new, tensors.derived.rotation.as_ref());
        let due = self.block(first);
        if at.counts.end < due {
            let full = KvSpan { start: at.counts.end, len: due - at.counts.end };
            let full = tensors.recent.in_order(full)?;
            self.pack(at, tensors, due, full)?;
        }
        let begin = at.counts.end;
        if first + n - begin <= self.room(at) {
            self.grow_recent(at, &mut tensors.recent, &new)?;
            tensors.recent.write(&self.kernels, new, positions)?;
            let recent = tensors.recent.dense(start)?;
            return self.seen(at, tensors, recent);
        }
        // A chunk longer than the ring: its queries see the recent tokens and the chunk in full precision, in
        // order of position. The ring then gets the latest tokens, and all complete blocks are packed.
        let all = behind(tensors.recent.gather(KvSpan { start: begin, len: first - begin })?, new);
        let (keys, values) = all.clone();
        let view = self.seen(at, tensors, DenseKv { keys, values, start, origin: begin, shared: None })?;
        let last = first + n;
        let kept = (last - begin).min(self.room(at));
        tensors.recent.truncate(0)?;
        self.grow_recent(at, &mut tensors.recent, &all)?;
        let tail = narrow(&all, last - begin - kept, kept);
        tensors.recent.write_from(&self.kernels, tail, last - kept)?;
        self.pack(at, tensors, self.block(last - 1), all)?;
        at.counts.oldest = last - kept;
        Ok(view)
    }

    fn advance(&self, at: &mut At, tensors: &Tensors, n: usize) {
        at.seq_len += n;
        at.counts.oldest = at.counts.oldest.max(at.seq_len.saturating_sub(tensors.recent.slots()));
    }

    fn gather(&self, at: &At, tensors: &Tensors) -> Result<Option<Kv>> {
        let (span, end) = (self.span(at, 0), at.counts.end);
        if span.len == 0 {
            return Ok(None);
        }
        let begin = end.max(span.start);
        let recent = tensors.recent.gather(KvSpan { start: begin, len: at.seq_len - begin })?;
        let packed = match tensors.packed.get()?.filter(|_| begin > span.start) {
            None => None,
            Some((keys, values)) => {
                let dtype = tensors.recent.dtype().unwrap_or(DType::F32);
                let unpack = |buffer: &PackedBuffer, packing, Stream { width, .. }: Stream| {
                    let (buffer, slots) = (buffer.clone(), 0..buffer.slots());
                    let (head_dim, dtype) = (width, FloatDType::F32);
                    self.kernels.run(KvUnpack { buffer, packing, head_dim, slots, dtype })
                };
                let (keys, values) = (
                    unpack(keys, self.packings[0], self.need.keys),
                    unpack(values, self.packings[1], self.need.values),
                );
                let old = KvSpan { start: span.start, len: begin - span.start };
                let (keys, values) =
                    DenseKv { keys, values, start: 0, origin: 0, shared: None }.in_order(old);
                Some((keys.cast(dtype), values.cast(dtype)))
            }
        };
        let both = match recent {
            Some(recent) => Some(behind(packed, recent)),
            None => packed,
        };
        let Some(both) = both else { return Ok(None) };
        let rotation = self.rotation(&tensors.derived, &both.0)?;
        Ok(Some(rotated(both, rotation.as_ref())))
    }

    fn replayable(&self, at: &At, tensors: &Tensors) -> usize {
        let begin = self.block(at.seq_len);
        let ready = at.seq_len > 0 && at.counts.end == begin && tensors.recent.slots() == self.room(at);
        // The first token of the next block packs this one, so its launches differ.
        if ready { begin + self.settings.residual - at.seq_len } else { 0 }
    }
}
