//! The `#[cube]` functions, which take the steps of the shaders.

use burn::{
    backend::{Cube, cubecl::dtype_to_storage_type},
    tensor::DType,
};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{ExpertLinear, Sharing, Tiles};
use crate::{
    launch::{LANES, address_type, comes_in_fours, count, empty, in_order, primitive},
    linear::{Four, add_up, added_up, dot, four, four_or_zero},
    matrix::StackBlock,
    route::MOST_EXPERTS,
};

/// Which rows of which matrices a block has, and of how many rows the matrices are.
#[derive(CubeType, CubeLaunch)]
struct Block {
    first_expert: usize,
    experts: usize,
    first_output: usize,
    output: usize,
    outputs: usize,
}

/// The number of the expert of `pair` in a block; any other where it is not there.
#[cube]
fn expert_of(experts: &Tensor<i32>, pair: usize, block: &Block) -> usize {
    let expert = usize::cast_from(experts[pair]);
    select(expert >= block.first_expert, expert - block.first_expert, block.experts)
}

/// Where the vector of a pair begins.
#[cube]
fn vector_of<E: Float, N: Size>(x: &Tensor<Vector<E, N>>, pair: usize, tokens: usize, slots: usize) -> usize {
    let vector = pair / slots;
    let slot = select(x.shape(2) == 1, 0usize, pair % slots);
    vector / tokens * x.stride(0) + vector % tokens * x.stride(1) + slot * x.stride(2)
}

#[cube(launch, address_type = "dynamic")]
fn expert_linear<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<Vector<E, N>>,
    experts: &Tensor<i32>,
    y: &mut Tensor<E>,
    block: &Block,
    tokens: usize,
    slots: usize,
    input: usize,
    pairs: usize,
    workgroups: usize,
    #[comptime] splits: usize,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let together = comptime!(8 * splits);
    let of_workgroup = comptime!(LANES / (8 * splits) * 4);
    let pair = workgroup % pairs;
    let expert = expert_of(experts, pair, block);
    // Where it is not in this block, nothing is computed.
    let is_here = expert < block.experts;
    let first_output = workgroup / pairs * of_workgroup;
    let first = first_output + lane / together * 4;
    let at = vector_of(x, pair, tokens, slots);
    let columns = input.div_ceil(4);
    let end = select(is_here, columns, 0usize);
    let mut products = Four::new(0.0);
    let mut c = lane % together * 2;
    while c < end {
        let numbers = four::<E, N>(x, at, c, x.stride(3), input);
        let next = four_or_zero::<E, N>(x, at, c + 1, x.stride(3), input);
        #[unroll]
        for i in 0..4usize {
            // Those beyond the last are the last.
            let own = expert * block.output + min(first + i, block.output - 1);
            let weights = four::<E, N>(w, own * w.stride(0), c, w.stride(1), input);
            let following = four_or_zero::<E, N>(w, own * w.stride(0), c + 1, w.stride(1), input);
            products.insert(i, products.extract(i) + dot(numbers, weights) + dot(next, following));
        }
        c += comptime!(2 * together);
    }
    let mut sums = Shared::<[f32]>::new_slice(comptime!(4 * LANES));
    #[unroll]
    for i in 0..4usize {
        sums[lane * 4 + i] = products.extract(i);
    }
    add_up(&mut sums, lane, together, 1usize);
    let mut i = lane;
    while i < of_workgroup {
        let output = first_output + i;
        if is_here && output < block.output {
            let sum = added_up(&sums, 0usize, i, together);
            y[pair * block.outputs + block.first_output + output] = E::cast_from(sum);
        }
        i += LANES;
    }
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
    // Those of the experts before it, in whole tiles.
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

#[cube(launch, address_type = "dynamic")]
fn expert_tiles<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<Vector<E, N>>,
    experts: &Tensor<i32>,
    order: &Tensor<i32>,
    y: &mut Tensor<E>,
    block: &Block,
    tokens: usize,
    slots: usize,
    input: usize,
    tiles: usize,
    workgroups: usize,
    #[comptime] tile: usize,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    // Lanes that have the same four pairs, each with four rows of the matrix.
    let across = comptime!(4 * LANES / tile);
    let outputs = comptime!(16 * LANES / tile);
    // Fours of numbers along the sum that are in memory together.
    let fours = comptime!(if tile < 32 { 2 } else { 4 });
    let first = workgroup % tiles * tile;
    let first_output = workgroup / tiles * outputs;
    let expert = expert_of(experts, usize::cast_from(max(order[first], 0)), block);
    // Where there is nothing, or it is not in this block, nothing is computed.
    let is_here = order[first] >= 0 && expert < block.experts;

    // The vector of which it loads a part.
    let loads = lane < comptime!(fours * tile);
    let own = order[first + select(loads, lane / fours, 0usize)];
    let has_pair = loads && own >= 0;
    let at = vector_of(x, usize::cast_from(max(own, 0)), tokens, slots);

    // What it computes: four rows of the matrix, `across` apart, times four vectors.
    let quartet = lane / across * 4;
    let own_across = lane % across;
    let mut products = Array::<Four>::new(4usize);
    #[unroll]
    for r in 0..4usize {
        products[r] = Four::new(0.0);
    }
    let mut vectors = Shared::<[Four]>::new_slice(comptime!(fours * tile));
    let mut weights = Shared::<[Four]>::new_slice(comptime!(fours * outputs));
    let columns = select(is_here, input.div_ceil(4), 0usize);
    let mut c = 0usize;
    while c < columns {
        let mut i = lane;
        while i < comptime!(fours * outputs) {
            // Those beyond the last row are the last.
            let row = expert * block.output + min(first_output + i / fours, block.output - 1);
            let mut numbers = Four::new(0.0);
            if c + i % fours < columns {
                numbers = four::<E, N>(w, row * w.stride(0), c + i % fours, w.stride(1), input);
            }
            weights[i % fours * outputs + i / fours] = numbers;
            i += LANES;
        }
        if loads {
            let mut numbers = Four::new(0.0);
            if has_pair && c + lane % fours < columns {
                numbers = four::<E, N>(x, at, c + lane % fours, x.stride(3), input);
            }
            vectors[lane % fours * tile + lane / fours] = numbers;
        }
        sync_cube();
        for i in 0..fours {
            #[unroll]
            for r in 0..4usize {
                let numbers = vectors[i * tile + quartet + r];
                let mut sums = products[r];
                #[unroll]
                for j in 0..4usize {
                    let sum = dot(numbers, weights[i * outputs + own_across + across * j]);
                    sums.insert(j, sums.extract(j) + sum);
                }
                products[r] = sums;
            }
        }
        sync_cube();
        c += fours;
    }
    #[unroll]
    for r in 0..4usize {
        let to = order[first + quartet + r];
        #[unroll]
        for j in 0..4usize {
            let output = first_output + own_across + across * j;
            if is_here && to >= 0 && output < block.output {
                let place = usize::cast_from(to) * block.outputs + block.first_output + output;
                y[place] = E::cast_from(products[r].extract(j));
            }
        }
    }
}

/// What launches for all blocks have in common.
struct Product {
    x: CubeTensor,
    experts: CubeTensor,
    y: CubeTensor,
    /// Tokens, slots and numbers of a vector.
    sizes: [usize; 3],
    outputs: usize,
}

impl Product {
    fn new(
        x: burn::tensor::Tensor<4>,
        experts: burn::tensor::Tensor<3, burn::tensor::Int>,
        outputs: usize,
    ) -> Self {
        let ([rows, tokens, slots], input) = (experts.dims(), x.dims()[3]);
        let (x, experts) = (primitive(x), in_order(experts));
        let y = empty(&x, [rows, tokens, slots, outputs], x.dtype);
        Self { x, experts, y, sizes: [tokens, slots, input], outputs }
    }

    /// The weight of a block, and how many of its neighbours are read at once.
    fn weight(&self, StackBlock { numbers: weight, .. }: &StackBlock) -> (CubeTensor, usize) {
        let weight = primitive(weight.clone());
        let fours = comes_in_fours(&self.x) && comes_in_fours(&weight);
        (weight, if fours { 4 } else { 1 })
    }

    fn block(&self, StackBlock { members, rows, .. }: &StackBlock) -> BlockLaunch {
        BlockLaunch::new(members.start, members.len(), rows.start, rows.len(), self.outputs)
    }

    fn result(self) -> burn::tensor::Tensor<4> {
        burn::tensor::Tensor::from_primitive::<Cube>(self.y)
    }
}

pub(super) fn few(ExpertLinear { x, weight, experts }: ExpertLinear) -> burn::tensor::Tensor<4> {
    let ([_, output, _], pairs, device) = (weight.shape(), experts.shape().num_elements(), x.device());
    let product = Product::new(x, experts, output);
    let [tokens, slots, input] = product.sizes;
    for block in weight.blocks() {
        let Sharing { splits, workgroups, .. } = Sharing::new(1, input, block.rows.len(), &device);
        let (weight, width) = product.weight(block);
        expert_linear::launch(
            &product.y.client,
            count(workgroups * pairs),
            CubeDim::new_1d(LANES as u32),
            address_type([&product.x, &weight, &product.experts, &product.y]),
            width,
            product.x.clone().into_tensor_arg(),
            weight.into_tensor_arg(),
            product.experts.clone().into_tensor_arg(),
            product.y.clone().into_tensor_arg(),
            product.block(block),
            tokens,
            slots,
            input,
            pairs,
            workgroups * pairs,
            splits,
            dtype_to_storage_type(product.x.dtype),
        );
    }
    product.result()
}

pub(super) fn many(ExpertLinear { x, weight, experts }: ExpertLinear) -> burn::tensor::Tensor<4> {
    let ([members, output, _], pairs) = (weight.shape(), experts.shape().num_elements());
    let Tiles { tile, tiles, outputs } = Tiles::new(pairs, members);
    let product = Product::new(x, experts, output);
    let [tokens, slots, input] = product.sizes;
    let order = empty(&product.x, [tiles, tile], DType::I32);
    expert_groups::launch(
        &order.client,
        count(1),
        CubeDim::new_1d(LANES as u32),
        product.experts.clone().into_tensor_arg(),
        order.clone().into_tensor_arg(),
        pairs,
        members,
        tile,
        tiles,
    );
    for block in weight.blocks() {
        let workgroups = tiles * block.rows.len().div_ceil(outputs);
        let (weight, width) = product.weight(block);
        expert_tiles::launch(
            &product.y.client,
            count(workgroups),
            CubeDim::new_1d(LANES as u32),
            address_type([&product.x, &weight, &product.experts, &order, &product.y]),
            width,
            product.x.clone().into_tensor_arg(),
            weight.into_tensor_arg(),
            product.experts.clone().into_tensor_arg(),
            order.clone().into_tensor_arg(),
            product.y.clone().into_tensor_arg(),
            product.block(block),
            tokens,
            slots,
            input,
            tiles,
            workgroups,
            tile,
            dtype_to_storage_type(product.x.dtype),
        );
    }
    product.result()
}
