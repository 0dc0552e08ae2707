//! The launches of the shaders.

use burn::tensor::{DType, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::{
    ExpertLinear, FEW, FEW_PACKED, GROUPS, SIZES, Sharing, TILES, TILES_PACKED, Tiles, product::Product,
};
use crate::{
    linear::{matrix::Matrix, packed_lines},
    runtime::{
        launch::{Launch, empty, in_order, strides},
        shader::Shader,
    },
    shaders::{expert_groups, expert_linear, expert_tiles},
};

/// A shader for dense weights, and one for packed ones. Their first option says how weights are read.
type Shaders = [&'static Shader; 2];

impl Product {
    /// Prepares a launch for one block. Returns it with the weight and the strides of the weight.
    fn launch(
        &self,
        [dense, packed]: Shaders,
        pick: usize,
        matrix: &Matrix,
    ) -> (Launch, CubeTensor, [u32; 2]) {
        let launch = |shader, way| Launch::new(shader, self.x.dtype, &self.y.client).with(&[way, pick]);
        match matrix {
            Matrix::Dense(numbers) => {
                let (weight, fours) = self.dense(numbers);
                let strides = strides(&weight);
                (launch(dense, usize::from(!fours)), weight, strides)
            }
            Matrix::Packed(matrix) => {
                let format = packed_lines::pick(matrix.format()).unwrap_or_default();
                let launch = launch(packed, format).unpacking_on(&matrix.words.device());
                let words = matrix.words.dims()[1];
                (launch, in_order(matrix.words.clone()), [words as u32, 1])
            }
        }
    }

    /// Strides of rows, tokens, numbers and slots.
    fn x_strides(&self) -> [u32; 4] {
        let [x0, x1, x2, x3] = strides(&self.x);
        [x0, x1, x3, if self.x.meta.shape()[2] == 1 { 0 } else { x2 }]
    }
}

/// The uniform of a launch for one block: the fields that both shaders have, and one that only this shader
/// has.
macro_rules! info {
    ($shader:ident, $product:ident, $block:ident, $w_strides:ident, $own:ident, $workgroups:ident) => {
        $shader::Info {
            x_strides: $product.x_strides(),
            w_strides: $w_strides,
            input: $block.matrix.columns() as u32,
            output: $block.rows.len() as u32,
            first_expert: $block.members.start as u32,
            experts: $block.members.len() as u32,
            first_output: $block.rows.start as u32,
            outputs: $product.outputs as u32,
            tokens: $product.tokens as u32,
            slots: $product.slots as u32,
            $own: $own as u32,
            workgroups: $workgroups as u32,
        }
    };
}

pub(super) fn few(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
    let ([.., input], pairs, device) = (weight.shape(), experts.shape().num_elements(), x.device());
    let product = Product::new(x, experts, &weight);
    for block in weight.blocks() {
        let packed = matches!(block.matrix, Matrix::Packed(_));
        let Sharing { splits, workgroups, .. } = Sharing::new(1, [block.rows.len(), input], packed, &device);
        let workgroups = workgroups * pairs;
        let (launch, weight, w_strides) =
            product.launch([&FEW, &FEW_PACKED], splits.ilog2() as usize, &block.matrix);
        let info = info!(expert_linear, product, block, w_strides, pairs, workgroups);
        launch.run(workgroups, [&product.x, &weight, &product.experts, &product.y], info);
    }
    product.result()
}

pub(super) fn many(ExpertLinear { x, weight, experts }: ExpertLinear) -> Tensor<4> {
    let ([count, ..], pairs) = (weight.shape(), experts.shape().num_elements());
    let Tiles { tile, tiles, outputs } = Tiles::new(pairs, &weight);
    let size = SIZES().iter().position(|line| *line == format!("const TILE = {tile}u;")).unwrap_or_default();
    let product = Product::new(x, experts, &weight);
    let order = empty(&product.x, [tiles, tile], DType::I32);
    let info = expert_groups::Info {
        pairs: pairs as u32,
        experts: count as u32,
        tile: tile as u32,
        tiles: tiles as u32,
    };
    Launch::new(&GROUPS, DType::F32, &order.client).run(1, [&product.experts, &order], info);
    for block in weight.blocks() {
        let workgroups = tiles * block.rows.len().div_ceil(outputs);
        let (launch, weight, w_strides) = product.launch([&TILES, &TILES_PACKED], size, &block.matrix);
        let info = info!(expert_tiles, product, block, w_strides, tiles, workgroups);
        launch.run(workgroups, [&product.x, &weight, &product.experts, &order, &product.y], info);
    }
    product.result()
}
