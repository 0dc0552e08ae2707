//! The kernels of packed keys and values.

use std::ops::Range;

use burn::tensor::{FloatDType, Int, IntDType, Tensor};
use kiln_core::{
    layer::Positions,
    packed::{PackedBuffer, PackedKv, Packing},
};

use crate::{
    AttentionShape, Kernels,
    attention::{self, Buffers, packed},
    choice::{Kernel, Path},
    kv_pack, kv_unpack, on_device,
};

impl Kernels {
    /// Packs new tokens into a ring of slots: token `i` into slot `(slot + i) mod slots`.
    ///
    /// In place where `buffer` holds its memory alone, else on a copy. For each group, the offset is its smallest number
    /// rounded down to float16 and the scale `(largest - offset) / (2^bits - 1)` rounded up, so that no number is off by
    /// more than half a scale. Numbers beyond those of float16 count as the largest of them, and what is not a number
    /// as 0. The words are the same on every device.
    ///
    /// # Shapes
    /// - buffer: packed `[batch, kv_heads, slots, head_dim]`, and so is the result
    /// - tokens: `[batch, kv_heads, n, head_dim]`, with `n <= slots`; along tokens, `n` and `slot` are multiples of groups
    pub fn pack(
        &self,
        buffer: PackedBuffer,
        tokens: Tensor<4>,
        slot: usize,
        packing: Packing,
    ) -> PackedBuffer {
        self.pack_with(buffer, tokens, slot, packing, None)
    }

    /// As [`Kernels::pack`], with scales and offsets that are given, and rounded to the nearest float16.
    ///
    /// # Shapes
    /// - scale, offset: those of tokens, [`Packing::scales_shape`]; a scale below 0 counts as 0
    pub fn pack_given(
        &self,
        buffer: PackedBuffer,
        tokens: Tensor<4>,
        scale: Tensor<4>,
        offset: Tensor<4>,
        slot: usize,
        packing: Packing,
    ) -> PackedBuffer {
        let shape = packing.scales_shape(tokens.dims());
        assert_eq!(
            [scale.dims(), offset.dims()],
            [shape; 2],
            "kv_pack: scales of tokens {:?}",
            tokens.dims()
        );
        self.pack_with(buffer, tokens, slot, packing, Some([scale, offset]))
    }

    fn pack_with(
        &self,
        buffer: PackedBuffer,
        tokens: Tensor<4>,
        slot: usize,
        packing: Packing,
        given: Option<[Tensor<4>; 2]>,
    ) -> PackedBuffer {
        let ([batch, heads, n, head_dim], slots) = (tokens.dims(), buffer.slots());
        fits("kv_pack", &buffer, packing, [batch, heads, slots, head_dim]);
        let together = packing.slots_together();
        assert!(n <= slots, "kv_pack: {n} tokens into {slots} slots");
        assert!(
            n.is_multiple_of(together) && slot.is_multiple_of(together),
            "kv_pack: {n} tokens from slot {slot} on are no groups of {together}"
        );
        match self.recorder.run(Kernel::KvPack, &tokens.dims()) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => kv_pack::wgsl(buffer, tokens, slot, packing, given),
            #[cfg(feature = "cube")]
            Path::Cube => kv_pack::cube(buffer, tokens, slot, packing, given),
            _ => kv_pack::definition(buffer, tokens, slot, packing, given),
        }
    }

    /// The numbers of those slots, in order: `[batch, kv_heads, slots, head_dim]`.
    pub fn unpack(
        &self,
        buffer: &PackedBuffer,
        packing: Packing,
        head_dim: usize,
        slots: Range<usize>,
        dtype: FloatDType,
    ) -> Tensor<4> {
        let [batch, heads, all, _] = buffer.codes.dims();
        fits("kv_unpack", buffer, packing, [batch, heads, all, head_dim]);
        assert!(slots.start <= slots.end && slots.end <= all, "kv_unpack: slots {slots:?} of {all}");
        self.recorder.run(Kernel::KvUnpack, &[batch, heads, slots.len(), head_dim]);
        self.numbers(buffer, packing, head_dim, slots, dtype)
    }

    fn numbers(
        &self,
        buffer: &PackedBuffer,
        packing: Packing,
        head_dim: usize,
        slots: Range<usize>,
        dtype: FloatDType,
    ) -> Tensor<4> {
        match self.recorder.path(Kernel::KvUnpack) {
            #[cfg(feature = "wgpu")]
            Path::Wgsl => kv_unpack::wgsl(buffer, packing, head_dim, slots, dtype),
            #[cfg(feature = "cube")]
            Path::Cube => kv_unpack::cube(buffer, packing, head_dim, slots, dtype),
            _ => kv_unpack::definition(buffer, packing, head_dim, slots, dtype),
        }
    }

    /// [`Kernels::attention`] over packed positions before `packed.end`, and over recent ones from there on.
    ///
    /// Query `i` of row `b` stands at `first[b] + i >= packed.end` and sees what it would see of one buffer that held both.
    /// Where queries are few, numbers are made of codes only where they are used: nothing as large as the packed buffers
    /// is held in memory.
    ///
    /// # Shapes
    /// - q: `[batch, heads, new, head_dim]`, and so is the result
    /// - packed: buffers of `[batch, kv_heads, slots, head_dim]`
    /// - recent: keys and values `[batch, kv_heads, slots, head_dim]` of all positions from `packed.end` on; position `p`
    ///   is in slot `(p - shape.origin) mod slots`
    /// - positions: as for [`Kernels::attention`]
    /// - shape: its `start` is the first position that counts, packed or recent
    pub fn attention_packed(
        &self,
        q: Tensor<4>,
        packed: &PackedKv,
        recent: [Tensor<4>; 2],
        positions: &Positions,
        shape: &AttentionShape,
    ) -> Tensor<4> {
        let ([batch, _, _, head_dim], [_, kv_heads, slots, _]) = (q.dims(), packed.keys.codes.dims());
        let held = [batch, kv_heads, slots, head_dim];
        fits("attention_packed: keys", &packed.keys, packed.key_packing, held);
        fits("attention_packed: values", &packed.values, packed.value_packing, held);
        for packing in [packed.key_packing, packed.value_packing] {
            let whole = packed.origin.is_multiple_of(packing.slots_together());
            assert!(whole, "attention_packed: the origin {} is inside a group", packed.origin);
        }
        let recent_slots = recent[0].dims()[2];
        for recent in &recent {
            let want = [batch, kv_heads, recent_slots, head_dim];
            assert_eq!(recent.dims(), want, "attention_packed: recent and q {:?}", q.dims());
        }
        let recent = recent.map(|recent| recent.cast(q.dtype()));
        let alike = positions.on_host.windows(2).all(|pair| pair[0].first == pair[1].first);
        let positions = on_device("attention_packed", positions, batch);
        let packed = &PackedKv { end: packed.end.clone().cast(IntDType::I32), ..packed.clone() };
        #[cfg(feature = "cpu")]
        if self.recorder.is_native()
            && let [keys, values] = &recent
            && let Some(y) = attention::native_packed(&q, packed, [keys, values], &positions, shape)
        {
            self.recorder.record(Kernel::AttentionPacked, Path::Native, &q.dims());
            return y;
        }
        #[cfg(feature = "cube")]
        if let Some(sharing) = packed::sharing(&q, packed, recent[0].dims(), shape) {
            let dims = q.dims();
            let path = self.recorder.path(Kernel::AttentionPacked);
            let y = match path {
                #[cfg(feature = "wgpu")]
                Path::Wgsl => packed::wgsl(q, packed, recent, positions, shape, sharing),
                Path::Cube => attention::cube_packed(q, packed, recent, positions, shape, sharing),
                _ => return self.attend_unpacked(q, packed, recent, (positions, alike), shape),
            };
            self.recorder.record(Kernel::AttentionPacked, path, &dims);
            return y;
        }
        self.attend_unpacked(q, packed, recent, (positions, alike), shape)
    }

    /// With dense copies.
    fn attend_unpacked(
        &self,
        q: Tensor<4>,
        packed: &PackedKv,
        recent: [Tensor<4>; 2],
        (positions, alike): (Tensor<2, Int>, bool),
        shape: &AttentionShape,
    ) -> Tensor<4> {
        let (dims, dtype, slots) = (q.dims(), q.dtype(), packed.keys.slots());
        let [_, _, new, head_dim] = dims;
        let numbers = |buffer: &PackedBuffer, packing| {
            self.numbers(buffer, packing, head_dim, 0..slots, FloatDType::F32).cast(dtype)
        };
        let dense =
            [numbers(&packed.keys, packed.key_packing), numbers(&packed.values, packed.value_packing)];
        let (both, shape) = packed::in_one(packed, recent, dense, &positions, alike, new, shape);
        let kept = packed.end.clone() - slots as i64;
        let (y, path) = self.attend(q, vec![Buffers::new(both, &shape).from(kept)], positions);
        self.recorder.record(Kernel::AttentionPacked, path, &dims);
        y
    }
}

fn fits(kernel: &str, buffer: &PackedBuffer, packing: Packing, shape: [usize; 4]) {
    assert_eq!(buffer.codes.dims(), packing.codes_shape(shape), "{kernel}: codes of {shape:?}");
    assert_eq!(buffer.scales.dims(), packing.scales_shape(shape), "{kernel}: scales of {shape:?}");
    let together = packing.slots_together();
    assert!(shape[2].is_multiple_of(together), "{kernel}: {} slots are no groups of {together}", shape[2]);
}
