//! The tensors that the launches for all blocks of a stack share.

use burn::{
    backend::Cube,
    tensor::{Int, Tensor},
};
use burn_cubecl::tensor::CubeTensor;

use crate::{
    linear::matrix::MatrixStack,
    runtime::launch::{comes_in_fours, empty, in_order, primitive},
};

pub(super) struct Product {
    pub(super) x: CubeTensor,
    pub(super) experts: CubeTensor,
    pub(super) y: CubeTensor,
    pub(super) tokens: usize,
    pub(super) slots: usize,
    /// Length of a vector.
    pub(super) input: usize,
    /// Rows of a whole matrix.
    pub(super) outputs: usize,
}

impl Product {
    pub(super) fn new(x: Tensor<4>, experts: Tensor<3, Int>, weight: &MatrixStack) -> Self {
        let ([rows, tokens, slots], [_, outputs, input]) = (experts.dims(), weight.shape());
        // Vectors that are multiplied with packed weights are read by fours or eights.
        let x = if weight.is_packed() { in_order(x) } else { primitive(x) };
        let y = empty(&x, [rows, tokens, slots, outputs], x.dtype);
        Self { x, experts: in_order(experts), y, tokens, slots, input, outputs }
    }

    /// A dense weight, and whether it and x are read by fours.
    pub(super) fn dense(&self, numbers: &Tensor<2>) -> (CubeTensor, bool) {
        let weight = primitive(numbers.clone());
        let fours = comes_in_fours(&self.x) && comes_in_fours(&weight);
        (weight, fours)
    }

    pub(super) fn result(self) -> Tensor<4> {
        Tensor::from_primitive::<Cube>(self.y)
    }
}
