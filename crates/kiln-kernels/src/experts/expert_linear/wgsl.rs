//! The launches of the shaders.

use burn::{
    backend::Cube,
    tensor::{DType, Int, Tensor},
};
use burn_cubecl::tensor::CubeTensor;

use super::{ExpertLinear, FEW, FEW_PACKED, GROUPS, SIZES, Sharing, TILES, TILES_PACKED, Tiles};
use crate::{
    linear::{
        matrix::{Matrix, MatrixStack, StackBlock},
        packed_lines,
    },
    runtime::{
        launch::{Launch, comes_in_fours, empty, in_order, primitive, strides},
        shader::Shader,
    },
};

/// A shader for dense weights, and one for packed ones. The first of their options says how weights are read.
type Shaders = [&'static Shader; 2];

/// What launches for all blocks have in common.
struct Product {
    x: CubeTensor,
    experts: CubeTensor,
    y: CubeTensor,
    tokens: usize,
    slots: usize,
    outputs: usize,
}

impl Product {
    fn new(x: Tensor<4>, experts: Tensor<3, Int>, weight: &MatrixStack) -> Self {
        let ([rows, tokens, slots], [_, outputs, _]) = (experts.dims(), weight.shape());
        // Packed weights are read by fours, and so is what they meet.
        let x = if weight.is_packed() { in_order(x) } else { primitive(x) };
        let y = empty(&x, [rows, tokens, slots, outputs], x.dtype);
        Self { x, experts: in_order(experts), y, tokens, slots, outputs }
    }

    /// A launch for one block, and its `info`, which two more numbers end.
    fn launch(&self, [dense, packed]: Shaders, pick: usize, block: &StackBlock) -> (Launch, Vec<u32>) {
        let StackBlock { matrix, members, rows } = block;
        let (shader, weight, way, [w0, w1]) = match matrix {
            Matrix::Dense(numbers) => {
                let weight = primitive(numbers.clone());
                let fours = comes_in_fours(&self.x) && comes_in_fours(&weight);
                let strides = strides(&weight);
                (dense, weight, usize::from(!fours), strides)
            }
            Matrix::Packed(matrix) => {
                let format = packed_lines::pick(matrix.format()).unwrap_or_default();
                let words = matrix.words.dims()[1];
                (packed, in_order(matrix.words.clone()), format, [words as u32, 1])
            }
        };
        let [x0, x1, x2, x3] = strides(&self.x);
        let x2 = if self.x.meta.shape()[2] == 1 { 0 } else { x2 };
        let input = self.x.meta.shape()[3];
        let sizes = [input, rows.len(), members.start, members.len(), rows.start, self.outputs];
        let sizes = sizes.into_iter().chain([self.tokens, self.slots]).map(|n| n as u32);
        let info = [x0, x1, x3, x2, w0, w1].into_iter().chain(sizes).collect();
        let mut launch = Launch::new(shader, self.x.dtype, &self.y.client).with(&[way, pick]);
        if let Matrix::Packed(matrix) = matrix {
            launch = launch.unpacking_on(&matrix.words.device());
        }
        (launch.reads(self.x.clone()).reads(weight).reads(self.experts.clone()), info)
    }

    fn result(self) -> Tensor<4> {
        Tensor::from_primitive::<Cube>(self.y)
    }
}

pub(super) fn few(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
    let ([.., input], pairs, device) = (weight.shape(), experts.shape().num_elements(), x.device());
    let product = Product::new(x, experts, &weight);
    for block in weight.blocks() {
        let Sharing { splits, workgroups, .. } = Sharing::new(1, input, block.rows.len(), &device);
        let (launch, mut info) = product.launch([&FEW, &FEW_PACKED], splits.ilog2() as usize, block);
        let workgroups = workgroups * pairs;
        info.extend([pairs as u32, workgroups as u32]);
        launch.updates(&product.y).run(workgroups, &info);
    }
    product.result()
}

pub(super) fn many(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
    let ([count, ..], pairs) = (weight.shape(), experts.shape().num_elements());
    let Tiles { tile, tiles, outputs } = Tiles::new(pairs, &weight);
    let size = SIZES.iter().position(|line| *line == format!("const TILE = {tile}u;")).unwrap_or_default();
    let product = Product::new(x, experts, &weight);
    let order = empty(&product.x, [tiles, tile], DType::I32);
    let info = [pairs, count, tile, tiles].map(|n| n as u32);
    let launch = Launch::new(&GROUPS, DType::F32, &order.client).reads(product.experts.clone());
    launch.writes(&order).run(1, &info);
    for block in weight.blocks() {
        let (launch, mut info) = product.launch([&TILES, &TILES_PACKED], size, block);
        let workgroups = tiles * block.rows.len().div_ceil(outputs);
        info.extend([tiles as u32, workgroups as u32]);
        launch.reads(order.clone()).updates(&product.y).run(workgroups, &info);
    }
    product.result()
}
