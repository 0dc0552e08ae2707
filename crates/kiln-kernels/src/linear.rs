//! `y = x Wᵀ + b` for `[rows, tokens, in]` and weights `[out, in]`, as checkpoints store them.

use burn::tensor::Tensor;

pub(crate) fn definition(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<3> {
    let [rows, tokens, input] = x.dims();
    let [output, _] = weight.dims();
    // One product of two matrices, which the CPU backend computes in parallel; one product a row it would not.
    let y = x.reshape([rows * tokens, input]).matmul(weight.transpose());
    let y = match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    };
    y.reshape([rows, tokens, output])
}
