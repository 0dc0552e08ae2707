//! The `#[cube]` functions, which take the same steps as the shaders.

mod few;
mod tiles;

use burn::{backend::cubecl::dtype_to_storage_type, tensor::DType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{ExpertLinear, Sharing, Tiles, product::Product};
use crate::{
    experts::route::MOST_EXPERTS,
    linear::{
        matrix::{Matrix, StackBlock},
        packed::PackedMatrix,
        packed_reader::{ONE, Reading, halves_of, runs_of},
    },
    runtime::launch::{LANES, address_type, count, empty, in_rows},
};

/// The rows and matrices in a block, and the number of rows of a whole matrix.
#[derive(CubeType, CubeLaunch)]
struct Block {
    first_expert: usize,
    experts: usize,
    first_output: usize,
    output: usize,
    outputs: usize,
}

/// The index of the expert of `pair` within a block; at least `block.experts` if it is not in the block.
#[cube]
fn expert_of(experts: &Tensor<i32>, pair: usize, block: &Block) -> usize {
    let expert = usize::cast_from(experts[pair]);
    select(expert >= block.first_expert, expert - block.first_expert, block.experts)
}

/// The offset of the vector of a pair.
#[cube]
fn vector_of<E: Float, N: Size>(x: &Tensor<Vector<E, N>>, pair: usize, tokens: usize, slots: usize) -> usize {
    let vector = pair / slots;
    let slot = select(x.shape(2) == 1, 0usize, pair % slots);
    vector / tokens * x.stride(0) + vector % tokens * x.stride(1) + slot * x.stride(2)
}

#[cube(launch)]
fn expert_groups(
    experts: &Tensor<i32>,
    order: &mut Tensor<i32>,
    pairs: usize,
    count: usize,
    tile: usize,
    tiles: usize,
) {
    let lane = UNIT_POS as usize;
    let counts = Shared::<[Atomic<u32>]>::new_slice(MOST_EXPERTS);
    let mut starts = Shared::<[u32]>::new_slice(MOST_EXPERTS);
    let mut e = lane;
    while e < count {
        counts[e].store(0u32);
        e += LANES;
    }
    sync_cube();
    let mut pair = lane;
    while pair < pairs {
        counts[usize::cast_from(experts[pair])].fetch_add(1u32);
        pair += LANES;
    }
    sync_cube();
    // Number of pairs of earlier experts, in whole tiles.
    let mut before = 0usize;
    for e in 0..count {
        let own = usize::cast_from(counts[e].load());
        let next = before + own.div_ceil(tile) * tile;
        if e % LANES == lane {
            starts[e] = u32::cast_from(before);
            for i in before + own..next {
                order[i] = -1;
            }
        }
        before = next;
    }
    let mut i = before + lane;
    while i < tiles * tile {
        order[i] = -1;
        i += LANES;
    }
    // All lanes have read the counts.
    sync_cube();
    let mut e = lane;
    while e < count {
        counts[e].store(starts[e]);
        e += LANES;
    }
    sync_cube();
    let mut pair = lane;
    while pair < pairs {
        let at = counts[usize::cast_from(experts[pair])].fetch_add(1u32);
        order[usize::cast_from(at)] = i32::cast_from(pair);
        pair += LANES;
    }
}

impl Product {
    /// The words of a packed weight, and how to read them.
    fn packed(&self, matrix: &PackedMatrix, few_shifts: bool) -> (CubeTensor, Reading) {
        let words = in_rows(matrix.words.clone());
        let reading = Reading::new(matrix.format(), &words, few_shifts);
        (words, reading)
    }

    fn block(&self, StackBlock { members, rows, .. }: &StackBlock) -> BlockLaunch {
        BlockLaunch::new(members.start, members.len(), rows.start, rows.len(), self.outputs)
    }
}

pub(super) fn few(ExpertLinear { x, weight, experts }: ExpertLinear) -> burn::tensor::Tensor<4> {
    let (pairs, device) = (experts.shape().num_elements(), x.device());
    let product = Product::new(x, experts, &weight);
    let Product { ref x, ref experts, ref y, tokens, slots, input, .. } = product;
    let (client, lanes, elem) = (&y.client, CubeDim::new_1d(LANES as u32), dtype_to_storage_type(x.dtype));
    for block in weight.blocks() {
        let packed = matches!(block.matrix, Matrix::Packed(_));
        let Sharing { splits, workgroups, .. } = Sharing::new(1, [block.rows.len(), input], packed, &device);
        let workgroups = workgroups * pairs;
        match &block.matrix {
            Matrix::Dense(numbers) => {
                let (weight, fours) = product.dense(numbers);
                few::expert_linear::launch(
                    client,
                    count(workgroups),
                    lanes,
                    address_type([x, &weight, experts, y]),
                    if fours { 4 } else { 1 },
                    x.clone().into_tensor_arg(),
                    weight.into_tensor_arg(),
                    experts.clone().into_tensor_arg(),
                    y.clone().into_tensor_arg(),
                    product.block(block),
                    tokens,
                    slots,
                    input,
                    pairs,
                    workgroups,
                    splits,
                    elem,
                );
            }
            Matrix::Packed(matrix) => {
                let (words, reading) = product.packed(matrix, x.dtype != DType::F32);
                few::expert_linear_packed::launch(
                    client,
                    count(workgroups),
                    lanes,
                    address_type([x, &words, experts, y]),
                    4,
                    x.clone().into_tensor_arg(),
                    words.into_tensor_arg(),
                    experts.clone().into_tensor_arg(),
                    y.clone().into_tensor_arg(),
                    product.block(block),
                    tokens,
                    slots,
                    input,
                    runs_of(input),
                    ONE,
                    pairs,
                    workgroups,
                    splits,
                    reading,
                    elem,
                );
            }
        }
    }
    product.result()
}

pub(super) fn many(ExpertLinear { x, weight, experts }: ExpertLinear) -> burn::tensor::Tensor<4> {
    let ([members, ..], pairs) = (weight.shape(), experts.shape().num_elements());
    let Tiles { tile, tiles, outputs } = Tiles::new(pairs, &weight);
    let product = Product::new(x, experts, &weight);
    let Product { ref x, ref experts, ref y, tokens, slots, input, .. } = product;
    let (client, lanes, elem) = (&y.client, CubeDim::new_1d(LANES as u32), dtype_to_storage_type(x.dtype));
    let order = empty(x, [tiles, tile], DType::I32);
    expert_groups::launch(
        client,
        count(1),
        lanes,
        experts.clone().into_tensor_arg(),
        order.clone().into_tensor_arg(),
        pairs,
        members,
        tile,
        tiles,
    );
    for block in weight.blocks() {
        let workgroups = tiles * block.rows.len().div_ceil(outputs);
        match &block.matrix {
            Matrix::Dense(numbers) => {
                let (weight, fours) = product.dense(numbers);
                tiles::expert_tiles::launch(
                    client,
                    count(workgroups),
                    lanes,
                    address_type([x, &weight, experts, &order, y]),
                    if fours { 4 } else { 1 },
                    x.clone().into_tensor_arg(),
                    weight.into_tensor_arg(),
                    experts.clone().into_tensor_arg(),
                    order.clone().into_tensor_arg(),
                    y.clone().into_tensor_arg(),
                    product.block(block),
                    tokens,
                    slots,
                    input,
                    tiles,
                    workgroups,
                    tile,
                    elem,
                );
            }
            Matrix::Packed(matrix) => {
                let (words, reading) = product.packed(matrix, false);
                tiles::expert_tiles_packed::launch(
                    client,
                    count(workgroups),
                    lanes,
                    address_type([x, &words, experts, &order, y]),
                    4,
                    x.clone().into_tensor_arg(),
                    words.into_tensor_arg(),
                    experts.clone().into_tensor_arg(),
                    order.clone().into_tensor_arg(),
                    y.clone().into_tensor_arg(),
                    product.block(block),
                    tokens,
                    slots,
                    input,
                    halves_of(input),
                    tiles,
                    workgroups,
                    tile,
                    reading,
                    elem,
                );
            }
        }
    }
    product.result()
}
