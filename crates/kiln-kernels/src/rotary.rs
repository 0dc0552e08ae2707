//! Rotary positions (Su et al., 2021, <https://arxiv.org/abs/2104.09864>), in the half-split layout of transformers.
//!
//! `y₁ = x₁ cos − x₂ sin` and `y₂ = x₂ cos + x₁ sin` for the pairs `(i, i + rotary_dim / 2)` of every head of
//! `[batch, heads, tokens, head_dim]`; dimensions from `rotary_dim` on are copied.
//!
//! Cosines and sines are rounded to the type of x, as in the reference. The products and their sum are float32 and
//! rounded once: the reference rounds each of the three, and GPUs would not agree with it or with each other, since
//! they are free to contract a product and a sum.

use burn::tensor::{DType, Tensor};

pub(crate) fn definition(x: Tensor<4>, cos: Tensor<3>, sin: Tensor<3>) -> Tensor<4> {
    let dtype = x.dtype();
    let [_, _, _, dim] = x.dims();
    let [_, _, half] = cos.dims();
    let table = |table: Tensor<3>| table.cast(dtype).cast(DType::F32).unsqueeze_dim::<4>(1);
    let (cos, sin) = (table(cos), table(sin));
    let first = x.clone().narrow(3, 0, half).cast(DType::F32);
    let second = x.clone().narrow(3, half, half).cast(DType::F32);

    let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let rotated_second = second * cos + first * sin;
    let mut parts = vec![rotated_first.cast(dtype), rotated_second.cast(dtype)];
    if 2 * half < dim {
        parts.push(x.narrow(3, 2 * half, dim - 2 * half));
    }
    Tensor::cat(parts, 3)
}
