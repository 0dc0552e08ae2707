//! Attention over packed keys and values, and over recent ones that are not packed.

use burn::tensor::{Int, Tensor};
use kiln_core::packed::PackedKv;

use super::AttentionShape;

/// Everything in one dense buffer, for queries and for a kernel that need it so: keys, values, and the shape whose slots
/// are positions. `unpack` makes numbers of a packed buffer.
///
/// Positions that the packed buffers no longer hold get anything: the mask hides them ([`hidden`]).
pub(crate) fn in_one(
    packed: &PackedKv,
    [keys, values]: [Tensor<4>; 2],
    [packed_keys, packed_values]: [Tensor<4>; 2],
    first: Tensor<1, Int>,
    new: usize,
    shape: &AttentionShape,
) -> ([Tensor<4>; 2], AttentionShape) {
    let (held, recent) = (packed_keys.dims()[2], keys.dims()[2]);
    let slots = held + recent;
    // The position that each slot holds, as `attention` has it, and where that is in the one buffer or the other.
    let count = Tensor::<1, Int>::ones([slots], (&first.device(), first.dtype())).cumsum(0) - 1;
    let last = first + (new as i64 - 1);
    let positions = last.clone() - (last - count).remainder_scalar(slots as i64);
    let place = |origin: usize, slots: usize| {
        (positions.clone() - (origin % slots.max(1)) as i64).remainder_scalar(slots.max(1) as i64)
    };
    let is_recent = positions.clone().greater_equal(packed.end.clone().cast(positions.dtype()));
    let place = place(packed.origin, held).mask_where(is_recent, place(shape.origin, recent) + held as i64);
    let join = |packed, recent| Tensor::cat(vec![packed, recent], 2).select(2, place.clone());
    let shape = AttentionShape { origin: 0, ..*shape };
    ([join(packed_keys, keys), join(packed_values, values)], shape)
}

/// For each row, the first position that padding does not hide and that slots still hold.
pub(crate) fn hidden(packed: &PackedKv, left_pad: Option<Tensor<1, Int>>, batch: usize) -> Tensor<1, Int> {
    let kept = (packed.end.clone() - packed.keys.slots() as i64).expand([batch]);
    match left_pad {
        Some(left_pad) => kept.max_pair(left_pad),
        None => kept,
    }
}
