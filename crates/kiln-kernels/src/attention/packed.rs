//! Attention over packed keys and values, and over recent ones that are not packed.

use burn::tensor::{Int, Tensor};
#[cfg(feature = "cube")]
use burn_cubecl::tensor::CubeTensor;
use kiln_core::packed::PackedKv;
#[cfg(feature = "wgpu")]
use kiln_core::packed::Packing;

use super::AttentionShape;
#[cfg(feature = "cube")]
use super::sharing::{Kernel, LARGEST_HEAD, Sharing};
#[cfg(feature = "wgpu")]
use super::{Buffers, Limits};
use crate::shader::Shader;

/// Everything in one dense buffer, for queries and for a kernel that need it so: keys, values, and the shape whose slots
/// are positions. `unpack` makes numbers of a packed buffer.
///
/// Positions that the packed buffers no longer hold get anything: [`Buffers::from`] hides them. `alike`: all rows stand at one
/// position.
pub(crate) fn in_one(
    packed: &PackedKv,
    [keys, values]: [Tensor<4>; 2],
    [packed_keys, packed_values]: [Tensor<4>; 2],
    positions: &Tensor<2, Int>,
    alike: bool,
    new: usize,
    shape: &AttentionShape,
) -> ([Tensor<4>; 2], AttentionShape) {
    let ([batch, kv_heads, held, head_dim], recent) = (packed_keys.dims(), keys.dims()[2]);
    let slots = held + recent;
    // The position that each slot of a row holds, as `attention` has it, and where that is in the one buffer or the other.
    let count = Tensor::<1, Int>::ones([slots], (&positions.device(), positions.dtype())).cumsum(0) - 1;
    let last = positions.clone().narrow(0, 0, 1).transpose() + (new as i64 - 1);
    let positions = last.clone() - (last - count.unsqueeze()).remainder_scalar(slots as i64);
    let place = |origin: usize, slots: usize| {
        (positions.clone() - (origin % slots.max(1)) as i64).remainder_scalar(slots.max(1) as i64)
    };
    let is_recent = positions.clone().greater_equal(packed.end.clone().cast(positions.dtype()).unsqueeze());
    let place = place(packed.origin, held).mask_where(is_recent, place(shape.origin, recent) + held as i64);
    let join = |packed, recent| {
        let all = Tensor::cat(vec![packed, recent], 2);
        match alike {
            true => all.select(2, place.clone().narrow(0, 0, 1).reshape([slots])),
            false => all.gather(
                2,
                place.clone().reshape([batch, 1, slots, 1]).expand([batch, kv_heads, slots, head_dim]),
            ),
        }
    };
    let shape = AttentionShape { origin: 0, ..*shape };
    ([join(packed_keys, keys), join(packed_values, values)], shape)
}

/// The shader of the packed keys. The recent ones have that of dense steps; both make parts of the result.
pub(crate) const SHADER: Shader = Shader {
    name: "attention_packed",
    text: concat!(
        include_str!("../../../../shaders/attention_packed.wgsl"),
        include_str!("../../../../shaders/attention.wgsl"),
        include_str!("../../../../shaders/attention_few.wgsl"),
    ),
    options: &[
        &["const KEYS_ALONG_TOKENS = false;", "const KEYS_ALONG_TOKENS = true;"],
        &[
            "const KEY_BITS = 4u;",
            "const KEY_BITS = 1u;",
            "const KEY_BITS = 2u;",
            "const KEY_BITS = 3u;",
            "const KEY_BITS = 8u;",
        ],
        &["const VALUES_ALONG_TOKENS = false;", "const VALUES_ALONG_TOKENS = true;"],
        &[
            "const VALUE_BITS = 4u;\nconst PIECE = 8u / FOURS;",
            "const VALUE_BITS = 1u;\nconst PIECE = 8u / FOURS;",
            "const VALUE_BITS = 2u;\nconst PIECE = 8u / FOURS;",
            "const VALUE_BITS = 3u;\nconst PIECE = 5u;",
            "const VALUE_BITS = 8u;\nconst PIECE = 4u;",
        ],
        &["const FOURS = 1u;", "const FOURS = 2u;"],
    ],
};

/// How packed and recent keys are shared, where queries are few.
#[cfg(feature = "cube")]
pub(crate) fn sharing(
    q: &Tensor<4>,
    packed: &PackedKv,
    recent: [usize; 4],
    shape: &AttentionShape,
) -> Option<[Sharing; 2]> {
    let [batch, kv_heads, slots, _] = packed.keys.codes.dims();
    let (device, q) = (q.device(), q.dims());
    let head_dim = q[3];
    let few = |sharing: &Sharing| matches!(sharing.kernel, Kernel::Decode { .. });
    let nothing = q.iter().product::<usize>() * slots * recent[2] == 0;
    let sharings = [[batch, kv_heads, slots, head_dim], recent]
        .map(|keys| (!nothing).then(|| Sharing::new(q, keys, shape, &device)));
    let [Some(packed), Some(recent)] = sharings else { return None };
    (head_dim <= LARGEST_HEAD && few(&packed)).then_some([packed, recent])
}

#[cfg(feature = "wgpu")]
pub(crate) fn wgsl(
    q: Tensor<4>,
    packed: &PackedKv,
    recent: [Tensor<4>; 2],
    positions: Tensor<2, Int>,
    shape: &AttentionShape,
    [of_packed, of_recent]: [Sharing; 2],
) -> Tensor<4> {
    use burn::tensor::DType;

    use super::{
        sharing::Written,
        wgsl::{combine, launch},
    };
    use crate::{
        kv_pack::picks,
        launch::{Launch, empty, in_order, primitive, strides},
    };

    let (dims, dtype) = (q.dims(), q.dtype());
    let [batch, heads, queries, head_dim] = dims;
    let [_, kv_heads, slots, _] = packed.keys.codes.dims();
    let q = primitive(q);
    let all = of_packed.splits + of_recent.splits;
    let parts = empty(&q, [batch * heads * queries, all, head_dim + 2], DType::F32);

    let recent = Buffers::new(recent, shape).from(packed.end.clone());
    let written = Written { to: &parts, parts: all, before: of_packed.splits };
    launch(q.clone(), recent, positions.clone(), of_recent, written);

    let (positions, end) = (in_order(positions), primitive(packed.end.clone()));
    let [keys, key_scales, values, value_scales] =
        [&packed.keys.codes, &packed.keys.scales, &packed.values.codes, &packed.values.scales]
            .map(|tensor| in_rows(primitive(tensor.clone())));
    let Sharing { kernel: Kernel::Decode { fours }, tiles, splits } = of_packed else {
        unreachable!("many queries have dense copies")
    };
    let Limits { scale, softcap, window, start, origin, .. } =
        AttentionShape { origin: packed.origin, ..*shape }.limits(slots);
    let workgroups = batch * kv_heads * tiles * splits;
    let widths = |packing: &Packing| {
        let together = [packing.channels_together(head_dim), packing.words_together(head_dim)];
        [packing.words(head_dim), together[0], together[1], packing.group()].map(|width| width as u32)
    };
    #[rustfmt::skip]
    let scalars = [
        kv_heads as u32, (heads / kv_heads) as u32, queries as u32, slots as u32,
        head_dim as u32, origin as u32, start as u32, window as u32,
        scale.to_bits(), softcap.unwrap_or(0.0).to_bits(), batch as u32, tiles as u32,
        splits as u32, workgroups as u32, all as u32,
    ];
    let tensors = [&q, &keys, &values, &key_scales, &value_scales].map(strides::<4>);
    let info =
        [tensors.as_flattened(), &scalars, &widths(&packed.key_packing), &widths(&packed.value_packing)]
            .concat();
    let ([keys_along, key_bits], [values_along, value_bits]) =
        (picks(packed.key_packing), picks(packed.value_packing));
    let launch = Launch::new(&SHADER, q.dtype, &parts.client).with(&[
        keys_along,
        key_bits,
        values_along,
        value_bits,
        fours - 1,
    ]);
    let launch = launch.reads(q).reads(keys).reads(key_scales).reads(values).reads(value_scales);
    launch.reads(positions).reads(end).writes(&parts).run(workgroups, &info);
    combine(parts, dtype, dims)
}

/// With neighbours in rows next to each other.
#[cfg(feature = "cube")]
pub(super) fn in_rows(tensor: CubeTensor) -> CubeTensor {
    if tensor.meta.strides()[3] == 1 || tensor.meta.shape()[3] == 1 {
        return tensor;
    }
    burn_cubecl::kernel::into_contiguous(tensor)
}
