//! Products of few tokens: a workgroup takes a pair and some rows of the matrix.

use cubecl::prelude::*;

use super::{Block, expert_of, vector_of};
use crate::{
    linear::{
        around::cube::{
            Partial, add_products_of_pair, add_up, added_up, numbers_of_pair, read_scaling, sum_of,
        },
        fours::{Four, dot, four, four_or_zero},
        packed_reader::{Reading, eight_at, read_run, write_table},
    },
    runtime::launch::{LANES, write_permutation},
};

/// Rows of the matrix per workgroup.
fn outputs_of(splits: usize) -> usize {
    LANES / (8 * splits) * 4
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn expert_linear<E: Float, N: Size>(
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
    let pair = workgroup % pairs;
    let expert = expert_of(experts, pair, block);
    let first_output = workgroup / pairs * comptime!(outputs_of(splits));
    let first = first_output + lane / together * 4;
    let at = vector_of(x, pair, tokens, slots);
    let columns = input.div_ceil(4);
    // If the expert is not in this block, nothing is computed.
    let end = select(expert < block.experts, columns, 0usize);
    let mut products = Four::new(0.0);
    let mut c = lane % together * 2;
    while c < end {
        let numbers = four::<E, N>(x, at, c, x.stride(3), input);
        let next = four_or_zero::<E, N>(x, at, c + 1, x.stride(3), input);
        #[unroll]
        for i in 0..4usize {
            // Indices past the last row read the last one.
            let own = expert * block.output + min(first + i, block.output - 1);
            let weights = four::<E, N>(w, own * w.stride(0), c, w.stride(1), input);
            let following = four_or_zero::<E, N>(w, own * w.stride(0), c + 1, w.stride(1), input);
            products.insert(i, products.extract(i) + dot(numbers, weights) + dot(next, following));
        }
        c += comptime!(2 * together);
    }
    let sums = Shared::<[f32]>::new_slice(comptime!(4 * LANES));
    write_sums::<E>(sums, products, y, block, pair, expert, first_output, splits);
}

/// Like `expert_linear`, except that lanes go along runs of `w`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn expert_linear_packed<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<u32>,
    experts: &Tensor<i32>,
    y: &mut Tensor<E>,
    block: &Block,
    tokens: usize,
    slots: usize,
    input: usize,
    runs: usize,
    one: u32,
    pairs: usize,
    workgroups: usize,
    #[comptime] splits: usize,
    #[comptime] reading: Reading,
    #[define(E)] _elem: ElemType,
) {
    write_permutation(comptime!(reading.format.name().to_owned()));
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let together = comptime!(8 * splits);
    let pair = workgroup % pairs;
    let expert = expert_of(experts, pair, block);
    let first_output = workgroup / pairs * comptime!(outputs_of(splits));
    let first = first_output + lane / together * 4;
    let at = vector_of(x, pair, tokens, slots);
    // First the numbers of the table, then sums.
    let mut memory = Shared::<[f32]>::new_slice(comptime!(4 * LANES));
    write_table(&mut memory, reading);
    let mut begins = Array::<usize>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        // Indices past the last row read the last one.
        begins[i] = (expert * block.output + min(first + i, block.output - 1)) * w.stride(0);
    }
    // If the expert is not in this block, nothing is computed.
    let end = select(expert < block.experts, runs, 0usize);
    let mut products = Four::new(0.0);
    let mut run = lane % together;
    while run < end {
        let scaling = read_scaling(w, &begins, run, input, reading);
        let mut words = Sequence::<Array<u32>>::new();
        #[unroll]
        for i in 0..4usize {
            read_run(&mut words, w, begins[i], run, input, reading);
        }
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for part in 0..2usize {
                let c = run * 8 + comptime!(2 * half + 4 * part);
                let (numbers, next) = eight_at::<E, N>(x, at, c, input, reading);
                let weights = numbers_of_pair(&words, half, 2usize, &memory, part, one, reading);
                let total = sum_of(numbers, next);
                products =
                    add_products_of_pair(products, numbers, next, total, &scaling, &weights, part, reading);
            }
        }
        run += together;
    }
    if comptime!(reading.table().is_some()) {
        // All lanes have read the table.
        sync_cube();
    }
    write_sums::<E>(memory, products, y, block, pair, expert, first_output, splits);
}

/// Adds up the sums of all lanes and writes results.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
fn write_sums<E: Float>(
    mut sums: Shared<[f32]>,
    products: Four,
    y: &mut Tensor<E>,
    block: &Block,
    pair: usize,
    expert: usize,
    first_output: usize,
    #[comptime] splits: usize,
) {
    let lane = UNIT_POS as usize;
    let together = comptime!(8 * splits);
    #[unroll]
    for i in 0..4usize {
        sums[lane * 4 + i] = products.extract(i);
    }
    add_up(&mut sums, lane, together, 1usize);
    let mut i = lane;
    while i < comptime!(outputs_of(splits)) {
        let output = first_output + i;
        if expert < block.experts && output < block.output {
            let sum = added_up(&sums, 0usize, i, comptime!(Partial::of(together)));
            y[pair * block.outputs + block.first_output + output] = E::cast_from(sum);
        }
        i += LANES;
    }
}
