//! Attention over packed keys and values, followed by recent ones that are not packed.

use burn::tensor::{FloatDType, Int, IntDType, Tensor};
#[cfg(feature = "wgpu")]
use kiln_core::packed::{PackedBuffer, Packing};
use kiln_core::{layer::Positions, packed::PackedKv, view::DenseKv};

use super::{AttentionShape, Buffers, cases, checked_places, checked_sinks, cut_dense, reference};
#[cfg(feature = "cube")]
use super::{LARGEST_HEAD, sharing::Sharing};
#[cfg(feature = "wgpu")]
use super::{
    Limits,
    pieces::{Piece, cut_heads, cut_sinks, in_pieces, splits},
    sharing::Rows,
};
#[cfg(feature = "cube")]
use crate::runtime::kernel::INVARIANT_UP_TO;
use crate::{
    cache::{kv_pack::fits, kv_unpack::KvUnpack},
    runtime::{
        kernel::Kernel,
        shader::{Shader, reads, writes},
    },
    testing::{
        case::Case,
        checked::Checked,
        cut::{Extent, cut, cut_buffer},
    },
};

/// [`Attention`](super::Attention) over packed positions before `packed.end`, and over recent ones from there
/// on: `[batch, heads, new, width of values]`.
///
/// Query `i` of row `b` stands at `first[b] + i >= packed.end` and sees what it would see in one buffer that
/// held both. With few queries, codes are unpacked only where they are used: nothing as large as the unpacked
/// buffers is held in memory.
#[derive(Clone, Debug)]
pub struct AttentionPacked {
    /// `[batch, heads, new, head_dim]`
    pub q: Tensor<4>,
    /// Buffers of keys `[batch, kv_heads, slots, head_dim]` and of values `[batch, kv_heads, slots, width]`
    pub packed: PackedKv,
    /// Keys and values of all positions from `packed.end` on. `recent.start` is the first position that
    /// counts, packed or recent.
    pub recent: DenseKv,
    /// Positions of `batch` rows.
    pub positions: Positions,
    pub shape: AttentionShape,
    /// See [`Attention::sinks`](super::Attention::sinks).
    pub sinks: Option<Tensor<1>>,
}

impl Kernel for AttentionPacked {
    const NAME: &'static str = "attention_packed";
    type Output = Tensor<4>;

    fn checked(self) -> Self {
        let Self { q, packed, recent, positions, shape, sinks } = self;
        let ([batch, heads, _, head_dim], [_, kv_heads, slots, _]) = (q.dims(), packed.keys.codes.dims());
        let width = recent.values.dims()[3];
        let held = |width| [batch, kv_heads, slots, width];
        let of_keys = shape.key_width(head_dim, width);
        fits("attention_packed: keys", &packed.keys, packed.key_packing, held(of_keys));
        fits("attention_packed: values", &packed.values, packed.value_packing, held(width));
        for packing in [packed.key_packing, packed.value_packing] {
            let whole = packed.origin.is_multiple_of(packing.slots_together());
            assert!(whole, "attention_packed: the origin {} is inside a group", packed.origin);
        }
        for (kv, width) in [(&recent.keys, of_keys), (&recent.values, width)] {
            let want = [batch, kv_heads, recent.keys.dims()[2], width];
            assert_eq!(kv.dims(), want, "attention_packed: recent and q {:?}", q.dims());
        }
        let cast = |recent: Tensor<4>| recent.cast(q.dtype());
        let recent = DenseKv { keys: cast(recent.keys), values: cast(recent.values), ..recent };
        let packed = PackedKv { end: packed.end.cast(IntDType::I32), ..packed };
        let positions = checked_places(positions, batch, &shape, Self::NAME);
        assert!(shape.end.is_none(), "attention_packed: queries after the last key");
        Self { positions, sinks: checked_sinks(sinks, heads, Self::NAME), q, packed, recent, shape }
    }

    fn shape(&self) -> Vec<usize> {
        self.q.dims().into()
    }

    fn reference(self) -> Tensor<4> {
        let sinks = self.sinks.clone();
        let (q, buffers, positions) = self.unpacked(KvUnpack::reference);
        reference(q, vec![buffers], &positions, sinks)
    }

    #[cfg(feature = "cpu")]
    fn native(self) -> Result<Tensor<4>, Self> {
        super::native::packed(&self).ok_or(self)
    }

    #[cfg(feature = "wgpu")]
    fn wgsl(self) -> Result<Tensor<4>, Self> {
        if let Some(sharings) = self.sharings() {
            let most = super::pieces::most(&self.q.device());
            return Ok(self.wgsl_within(most, sharings));
        }
        if !self.is_for_gpus() {
            return Err(self);
        }
        let unpack = |codes: KvUnpack| codes.wgsl().unwrap_or_else(KvUnpack::reference);
        let sinks = self.sinks.clone();
        let (q, buffers, positions) = self.unpacked(unpack);
        Ok(super::wgsl::dense(q, vec![buffers], positions.on_device, sinks))
    }

    #[cfg(feature = "cube")]
    fn cube(self) -> Result<Tensor<4>, Self> {
        if let Some(sharings) = self.sharings() {
            return Ok(super::cube::packed(self, sharings));
        }
        if !self.is_for_gpus() {
            return Err(self);
        }
        let unpack = |codes: KvUnpack| codes.cube().unwrap_or_else(KvUnpack::reference);
        let sinks = self.sinks.clone();
        let (q, buffers, positions) = self.unpacked(unpack);
        Ok(super::cube::dense(q, vec![buffers], positions.on_device, sinks))
    }
}

impl Checked for AttentionPacked {
    fn extent(&self) -> [usize; 2] {
        let [rows, _, tokens, _] = self.q.dims();
        [rows, tokens]
    }

    fn part(self, part: Extent) -> Self {
        let Self { q, packed, recent, positions, shape, sinks } = self;
        // The recent buffers hold every position that is not packed.
        let positions = shape.cut(&positions, &part, 0, usize::MAX);
        let [keys, values] = [packed.keys, packed.values].map(|buffer| cut_buffer(buffer, &part[0]));
        let (packed, recent) = (PackedKv { keys, values, ..packed }, cut_dense(recent, &part[0]));
        Self { q: cut(q, &part, 2), packed, recent, positions, shape, sinks }
    }

    fn part_of(whole: Tensor<4>, part: Extent) -> Tensor<4> {
        cut(whole, &part, 2)
    }

    fn shaders() -> &'static [Shader] {
        &[SHADER]
    }

    fn cases() -> Vec<Case<Self>> {
        cases::packed::cases()
    }
}

impl AttentionPacked {
    /// Unpacks everything into one dense buffer, in which slots are positions. `unpack` turns codes into
    /// numbers.
    ///
    /// Slots of positions that the packed buffers no longer hold have arbitrary contents: [`Buffers::from`]
    /// hides them.
    fn unpacked(self, unpack: impl Fn(KvUnpack) -> Tensor<4>) -> (Tensor<4>, Buffers, Positions) {
        let Self { q, packed, recent, positions, shape, .. } = self;
        let ([batch, _, new, _], [_, kv_heads, held, _]) = (q.dims(), packed.keys.codes.dims());
        let (recent_slots, dtype) = (recent.keys.dims()[2], q.dtype());
        let numbers = |buffer, packing, like: &Tensor<4>| {
            let head_dim = like.dims()[3];
            unpack(KvUnpack { buffer, packing, head_dim, slots: 0..held, dtype: FloatDType::F32 }).cast(dtype)
        };
        let packed_keys = numbers(packed.keys, packed.key_packing, &recent.keys);
        let packed_values = numbers(packed.values, packed.value_packing, &recent.values);
        let alike = positions.on_host.windows(2).all(|pair| pair[0].first == pair[1].first);

        let slots = held + recent_slots;
        // The position that each slot of a row holds, as in `attention`, and its place in the packed or the
        // recent buffer.
        let on_device = &positions.on_device;
        let count = Tensor::<1, Int>::ones([slots], (&q.device(), on_device.dtype())).cumsum(0) - 1;
        let behind = if shape.causal { new as i64 - 1 } else { 0 };
        let last = on_device.clone().narrow(0, 0, 1).transpose() + behind;
        let held_positions = last.clone() - (last - count.unsqueeze()).remainder_scalar(slots as i64);
        let place = |origin: usize, slots: usize| {
            (held_positions.clone() - (origin % slots.max(1)) as i64).remainder_scalar(slots.max(1) as i64)
        };
        let end = packed.end.clone().cast(on_device.dtype()).unsqueeze();
        let is_recent = held_positions.clone().greater_equal(end);
        let place = place(packed.origin, held)
            .mask_where(is_recent, place(recent.origin, recent_slots) + held as i64);
        let join = |packed, recent: Tensor<4>| {
            let width = recent.dims()[3];
            let all = Tensor::cat(vec![packed, recent], 2);
            match alike {
                true => all.select(2, place.clone().narrow(0, 0, 1).reshape([slots])),
                false => all.gather(
                    2,
                    place.clone().reshape([batch, 1, slots, 1]).expand([batch, kv_heads, slots, width]),
                ),
            }
        };
        let both = DenseKv {
            keys: join(packed_keys, recent.keys),
            values: join(packed_values, recent.values),
            start: recent.start,
            origin: 0,
            shared: None,
        };
        let buffers = Buffers::new(both, &shape).from(packed.end - held as i64).seen_at(&positions);
        (q, buffers, positions)
    }
}

#[cfg(feature = "wgpu")]
impl AttentionPacked {
    /// Computes few queries with shaders. No tensor that they write has more than `most` bytes, except the
    /// result.
    pub(super) fn wgsl_within(self, most: usize, sharings: [Sharing; 2]) -> Tensor<4> {
        let (q, kv_heads) = (self.q.dims(), self.packed.keys.codes.dims()[1]);
        in_pieces(q, kv_heads, splits(&sharings, self.sinks.is_some()), most, |piece| match piece {
            Some(piece) => wgsl(self.piece(&piece, q[1] / kv_heads), sharings),
            None => wgsl(self.clone(), sharings),
        })
    }

    /// Cuts out the rows and the key heads in `piece`, with the `each` query heads of every key head.
    fn piece(&self, piece: &Piece, each: usize) -> Self {
        let Self { q, packed, recent, positions, shape, sinks } = self.clone();
        let cut = |tensor| cut_heads(tensor, piece, 1);
        let [keys, values] = [packed.keys, packed.values].map(|buffer| cut_heads_of(buffer, piece));
        Self {
            q: cut_heads(q, piece, each),
            packed: PackedKv { keys, values, ..packed },
            recent: DenseKv { keys: cut(recent.keys), values: cut(recent.values), ..recent },
            positions: positions.narrow(piece[0].clone()),
            shape,
            sinks: cut_sinks(sinks, piece, each),
        }
    }
}

/// Cuts a packed buffer to these rows and heads.
#[cfg(feature = "wgpu")]
fn cut_heads_of(PackedBuffer { codes, scales }: PackedBuffer, [rows, heads]: &Piece) -> PackedBuffer {
    let cut =
        |words: Tensor<4, Int>| words.narrow(0, rows.start, rows.len()).narrow(1, heads.start, heads.len());
    PackedBuffer { codes: cut(codes), scales: cut(scales) }
}

#[cfg(feature = "cube")]
impl AttentionPacked {
    /// Whether GPU kernels take the inputs, from codes or from dense copies.
    fn is_for_gpus(&self) -> bool {
        let slots = self.packed.keys.slots() + self.recent.keys.dims()[2];
        self.is_even() && self.q.dims()[3] <= LARGEST_HEAD && self.q.shape().num_elements() * slots > 0
    }

    /// Whether values are as wide as keys, and as queries.
    fn is_even(&self) -> bool {
        !self.shape.latent && self.recent.keys.dims() == self.recent.values.dims()
    }

    /// How packed and recent keys are divided among workgroups; `None` unless queries are few.
    pub(super) fn sharings(&self) -> Option<[Sharing; 2]> {
        let [batch, kv_heads, slots, _] = self.packed.keys.codes.dims();
        let (device, q, recent) = (self.q.device(), self.q.dims(), self.recent.keys.dims());
        let nothing = q.iter().product::<usize>() * slots * recent[2] == 0;
        if nothing || !self.is_even() || q[3] > LARGEST_HEAD || q[2] > INVARIANT_UP_TO {
            return None;
        }
        let packed = [batch, kv_heads, slots, q[3]];
        let of_packed = Sharing::of_codes(q, packed, &self.shape, &device);
        Some([of_packed, Sharing::new(q, recent, &self.shape, &device)])
    }
}

/// The shader for packed keys. Recent keys use the decode shader for dense keys; both write parts of the
/// result.
const SHADER: Shader = Shader {
    name: "attention_packed",
    bindings: &[
        reads("q"),
        reads("keys"),
        reads("key_scales"),
        reads("values"),
        reads("value_scales"),
        reads("positions"),
        reads("beyond_packed"),
        writes("y"),
    ],
    text: concat!(
        include_str!("../../../../shaders/attention_packed.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_few.wgsl"),
    ),
    options: &[
        || &["const KEYS_ALONG_TOKENS = false;", "const KEYS_ALONG_TOKENS = true;"],
        || {
            &[
                "const KEY_BITS = 4u;",
                "const KEY_BITS = 1u;",
                "const KEY_BITS = 2u;",
                "const KEY_BITS = 3u;",
                "const KEY_BITS = 8u;",
            ]
        },
        || &["const VALUES_ALONG_TOKENS = false;", "const VALUES_ALONG_TOKENS = true;"],
        || {
            &[
                "const VALUE_BITS = 4u;\nconst PIECE = 8u / FOURS;",
                "const VALUE_BITS = 1u;\nconst PIECE = 8u / FOURS;",
                "const VALUE_BITS = 2u;\nconst PIECE = 8u / FOURS;",
                "const VALUE_BITS = 3u;\nconst PIECE = 5u;",
                "const VALUE_BITS = 8u;\nconst PIECE = 4u;",
            ]
        },
        || &["const FOURS = 1u;", "const FOURS = 2u;"],
    ],
};

#[cfg(feature = "wgpu")]
fn wgsl(
    AttentionPacked { q, packed, recent, positions, shape, sinks }: AttentionPacked,
    [of_packed, of_recent]: [Sharing; 2],
) -> Tensor<4> {
    use burn::tensor::DType;

    use super::{
        sharing::Written,
        wgsl::{combine, launch},
    };
    use crate::{
        cache::kv_pack::picks,
        runtime::launch::{Launch, empty, in_order, in_rows, primitive, strides},
        shaders::attention_packed::Info,
    };

    let (dims, dtype) = (q.dims(), q.dtype());
    let [batch, heads, queries, head_dim] = dims;
    let [_, kv_heads, slots, _] = packed.keys.codes.dims();
    let q = primitive(q);
    let all = of_packed.splits + of_recent.splits;
    let parts = empty(&q, [batch * heads * queries, all, head_dim + 2], DType::F32);

    let start = recent.start;
    let recent = Buffers::new(recent, &shape).from(packed.end.clone()).seen_at(&positions);
    let written =
        Written { to: &parts, parts: all, before: of_packed.splits, is_split: true, combined: None };
    launch(q.clone(), recent, None, positions.on_device.clone(), of_recent, written);

    let (positions, end) = (in_order(positions.on_device), primitive(packed.end));
    let [keys, key_scales, values, value_scales] =
        [packed.keys.codes, packed.keys.scales, packed.values.codes, packed.values.scales].map(in_rows);
    let Sharing { rows: Rows::Few { fours, chunk }, tiles, splits } = of_packed else {
        unreachable!("many queries have dense copies")
    };
    let Limits { scale, softcap, window, start, origin, .. } = shape.limits(start, packed.origin, slots);
    let workgroups = batch * kv_heads * tiles * splits;
    let words = |packing: &Packing| packing.words(head_dim) as u32;
    let channels = |packing: &Packing| packing.channels_together(head_dim) as u32;
    let together = |packing: &Packing| packing.words_together(head_dim) as u32;
    let (key, value) = (&packed.key_packing, &packed.value_packing);
    let info = Info {
        q_strides: strides(&q),
        key_strides: strides(&keys),
        value_strides: strides(&values),
        key_scale_strides: strides(&key_scales),
        value_scale_strides: strides(&value_scales),
        kv_heads: kv_heads as u32,
        group: (heads / kv_heads) as u32,
        queries: queries as u32,
        slots: slots as u32,
        head_dim: head_dim as u32,
        origin: origin.cast_unsigned(),
        start,
        window,
        scale,
        softcap: softcap.unwrap_or(0.0),
        batch: batch as u32,
        tiles: tiles as u32,
        splits: splits as u32,
        workgroups: workgroups as u32,
        parts: all as u32,
        chunk: chunk as i32,
        key_words: words(key),
        key_channels: channels(key),
        key_together: together(key),
        key_group: key.group() as u32,
        value_words: words(value),
        value_channels: channels(value),
        value_together: together(value),
        value_group: value.group() as u32,
    };
    let ([keys_along, key_bits], [values_along, value_bits]) =
        (picks(packed.key_packing), picks(packed.value_packing));
    let launch = Launch::new(&SHADER, q.dtype, &parts.client).with(&[
        keys_along,
        key_bits,
        values_along,
        value_bits,
        fours - 1,
    ]);
    let tensors = [&q, &keys, &key_scales, &values, &value_scales, &positions, &end, &parts];
    launch.run(workgroups, tensors, info);
    combine(parts, sinks, dtype, dims)
}
