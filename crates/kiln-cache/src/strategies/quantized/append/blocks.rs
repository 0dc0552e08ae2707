//! Operations on whole blocks of packed tokens.

use burn::tensor::{DType, Int, Tensor};
use kiln_core::packed::{Along, PackedBuffer, Packing};

/// Copies the blocks of the positions from `from` to `to` (exclusive) from one ring to another, longer or
/// shorter one.
pub(super) fn copy_blocks(
    new: &mut PackedBuffer,
    old: &PackedBuffer,
    together: usize,
    [from, to]: [usize; 2],
) {
    let (old_slots, new_slots) = (old.slots(), new.slots());
    let mut at = from;
    while at < to {
        let (source, target) = (at % old_slots, at % new_slots);
        let straight = (to - at).min(old_slots - source).min(new_slots - target);
        let copy = |new: &mut Tensor<4, Int>, old: &Tensor<4, Int>, together: usize| {
            let [rows, heads, _, words] = old.dims();
            let target = target / together..(target + straight) / together;
            let part = old.clone().narrow(2, source / together, straight / together);
            new.inplace(|new| new.slice_assign([0..rows, 0..heads, target, 0..words], part));
        };
        copy(&mut new.codes, &old.codes, 1);
        copy(&mut new.scales, &old.scales, together);
        at += straight;
    }
}

/// Finds better scales and offsets than those of the smallest and the largest element, if the format can, in
/// the memory layout of scales.
pub(super) fn refined_scales(
    tokens: &Tensor<4>,
    packing: Packing,
    refined: impl Fn(Tensor<2>) -> Option<[Tensor<2>; 2]>,
) -> Option<[Tensor<4>; 2]> {
    let ([rows, heads, n, dim], group) = (tokens.dims(), packing.group());
    let x = tokens.clone().cast(DType::F32);
    match packing.along() {
        Along::Tokens => {
            let groups = x.reshape([rows * heads, n / group, group, dim]).swap_dims(2, 3);
            let shape = [rows, heads, n / group, dim];
            let found = refined(groups.reshape([rows * heads * n / group * dim, group]))?;
            Some(found.map(|x| x.reshape(shape)))
        }
        Along::Channels => {
            let mut all = [Vec::new(), Vec::new()];
            // The channels after the last whole group form a group of their own.
            let (whole, rest) = (dim - dim % group, dim % group);
            for (from, len, group) in [(0, whole, group), (whole, rest, rest)] {
                if len > 0 {
                    let groups =
                        x.clone().narrow(3, from, len).reshape([rows * heads * n * len / group, group]);
                    let found = refined(groups)?.map(|x| x.reshape([rows, heads, n, len / group]));
                    all.iter_mut().zip(found).for_each(|(all, found)| all.push(found));
                }
            }
            Some(all.map(|parts| Tensor::cat(parts, 3)))
        }
    }
}
