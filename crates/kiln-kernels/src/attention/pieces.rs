//! Attention in pieces, for when the parts that workgroups write would be larger than a tensor may be.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use super::sharing::Sharing;
use crate::runtime::device::opened;

/// A range of rows, and a range of key heads.
pub(super) type Piece = [Range<usize>; 2];

/// Computes queries `[rows, heads, new, head_dim]` over keys with `kv_heads` heads, at once or piece by
/// piece, so that the parts before they are combined have at most `most` bytes. `compute` gets `None`, or the
/// piece to compute.
pub(super) fn in_pieces(
    q: [usize; 4],
    kv_heads: usize,
    splits: usize,
    most: usize,
    mut compute: impl FnMut(Option<Piece>) -> Tensor<4>,
) -> Tensor<4> {
    if is_whole(q, kv_heads, splits, most) {
        return compute(None);
    }
    let (rows, at_once) = (q[0], at_once(q, kv_heads, splits, most));
    let (rows_at_once, heads_at_once) = ((at_once / kv_heads).max(1), at_once.min(kv_heads));
    let cut = |all: usize, at_once: usize| {
        (0..all).step_by(at_once).map(move |first| first..(first + at_once).min(all))
    };
    let of_rows = cut(rows, rows_at_once).map(|rows| {
        let of_heads = cut(kv_heads, heads_at_once).map(|heads| compute(Some([rows.clone(), heads])));
        Tensor::cat(of_heads.collect(), 1)
    });
    Tensor::cat(of_rows.collect(), 0)
}

/// Whether attention is computed at once.
pub(super) fn is_whole(q: [usize; 4], kv_heads: usize, splits: usize, most: usize) -> bool {
    q[0] * kv_heads <= at_once(q, kv_heads, splits, most)
}

/// Number of key heads, of all rows, that are computed at once.
fn at_once([_, heads, new, head_dim]: [usize; 4], kv_heads: usize, splits: usize, most: usize) -> usize {
    let a_head = if splits > 1 { heads / kv_heads * new * splits * (head_dim + 2) * 4 } else { 0 };
    most.checked_div(a_head).unwrap_or(usize::MAX).max(1)
}

/// Cuts a tensor to these rows and heads. `each` is its number of heads per key head.
pub(super) fn cut_heads(tensor: Tensor<4>, [rows, heads]: &Piece, each: usize) -> Tensor<4> {
    let tensor = tensor.narrow(0, rows.start, rows.len());
    tensor.narrow(1, heads.start * each, heads.len() * each)
}

/// Cuts the sinks of all query heads to these heads.
pub(super) fn cut_sinks(sinks: Option<Tensor<1>>, [_, heads]: &Piece, each: usize) -> Option<Tensor<1>> {
    sinks.map(|sinks| sinks.narrow(0, heads.start * each, heads.len() * each))
}

/// Total number of parts in all sharings: of the keys, and one more for sinks.
pub(super) fn splits(sharings: &[Sharing], has_sinks: bool) -> usize {
    sharings.iter().map(|sharing| sharing.splits).sum::<usize>() + usize::from(has_sinks)
}

/// Bytes of the largest tensor that the device can bind.
pub(super) fn most(device: &Device) -> usize {
    opened::largest_binding(device).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, clippy::unwrap_used, reason = "these are tests of ranges")]

    use std::cell::RefCell;

    use super::*;
    use crate::testing::checked::Checked;

    fn pieces(q: [usize; 4], kv_heads: usize, splits: usize, most: usize) -> Vec<Option<Piece>> {
        let pieces = RefCell::new(Vec::new());
        in_pieces(q, kv_heads, splits, most, |piece| {
            pieces.borrow_mut().push(piece);
            Tensor::zeros([1, 1, 1, 1], &Device::flex())
        });
        pieces.into_inner()
    }

    #[test]
    fn attention_is_divided_to_fit_the_largest_tensor() {
        // 16 queries over 128 Ki slots: 136 MB.
        assert_eq!(pieces([1, 32, 16, 128], 8, 512, 1 << 30), [None]);
        assert_eq!(pieces([1, 32, 16, 128], 8, 512, 128 << 20), [Some([0..1, 0..7]), Some([0..1, 7..8])]);
        assert_eq!(pieces([1, 32, 16, 128], 8, 1, 1), [None], "one part is the result");
        let a_head = 16 * 2 * 10 * 4;
        assert_eq!(
            pieces([5, 4, 4, 8], 1, 2, 2 * a_head),
            [Some([0..2, 0..1]), Some([2..4, 0..1]), Some([4..5, 0..1])]
        );
    }

    /// Checks that the sum of a head does not depend on the heads computed beside it.
    #[test]
    fn divided_attention_equals_undivided_attention_bit_for_bit() {
        use burn::tensor::DType;

        use crate::{
            attention::{Attention, packed::AttentionPacked},
            runtime::{
                device::{DeviceName, open},
                kernel::Kernel,
            },
        };

        let Ok(opened) = open(DeviceName::Wgpu(None)) else {
            let wanted = std::env::var("KILN_TEST_DEVICES").unwrap_or_default();
            assert!(!wanted.contains("wgpu"), "there is no wgpu device");
            return eprintln!("not tested: there is no wgpu device");
        };
        let bits = |y: Tensor<4>| y.into_data().try_to_vec::<f32>().unwrap();
        let mut cut = 0;
        for case in Attention::cases() {
            let kernel = case.inputs(&opened.device, DType::F32).checked();
            if kernel.q.dims()[2] > 4 || !kernel.is_for_gpus() {
                continue;
            }
            cut += 1;
            assert_eq!(bits(kernel.clone().wgsl_within(1)), bits(kernel.wgsl_within(usize::MAX)), "{case:?}");
        }
        for case in AttentionPacked::cases() {
            let kernel = case.inputs(&opened.device, DType::F32).checked();
            let Some(sharings) = kernel.sharings() else { continue };
            cut += 1;
            let whole = bits(kernel.clone().wgsl_within(usize::MAX, sharings));
            assert_eq!(bits(kernel.wgsl_within(1, sharings)), whole, "{case:?}");
        }
        assert!(cut > 20, "only {cut} were cut");
    }
}
