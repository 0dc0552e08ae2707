//! Vectors of four numbers in `#[cube]` functions.

use cubecl::prelude::*;

/// `vec4<f32>` in WGSL.
pub(crate) type Four = Vector<f32, Const<4>>;

/// Reads four numbers of a row, from 4 c on. If the row ends within the four, numbers past its end are 0.
#[cube]
pub(crate) fn four<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let width = tensor.vector_size();
    if comptime!(width == 4) {
        Four::cast_from(tensor[at / 4 + c])
    } else {
        let mut numbers = Four::new(0.0);
        #[unroll]
        for i in 0..4usize {
            if 4 * c + i < len {
                numbers.insert(i, f32::cast_from(tensor[at + (4 * c + i) * stride]));
            }
        }
        numbers
    }
}

/// Like [`four`], but also allows 4 c past the end of the row.
#[cube]
pub(crate) fn four_or_zero<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let mut numbers = Four::new(0.0);
    if 4 * c < len {
        numbers = four::<E, N>(tensor, at, c, stride, len);
    }
    numbers
}

/// `Σ a b`. The fused multiply-adds are explicit: a compiler may choose others, and may choose differently in
/// a kernel for more rows.
#[cube]
pub(crate) fn dot(a: Four, b: Four) -> f32 {
    let mut sum = a.extract(0usize) * b.extract(0usize);
    #[unroll]
    for d in 1..4usize {
        sum = fma(a.extract(d), b.extract(d), sum);
    }
    sum
}
