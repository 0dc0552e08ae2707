//! Products of many tokens: a workgroup takes a tile of pairs that go to one expert, and some rows of its
//! matrix.

use cubecl::prelude::*;

use super::{Block, expert_of, vector_of};
use crate::{
    linear::{
        fours::{Four, dot, four},
        packed_reader::{ONE, Reading, TABLE, four_at, read_four, read_group, read_words, write_table},
    },
    runtime::launch::LANES,
};

/// Number of lanes that share four pairs, each with four rows of the matrix.
fn across_of(tile: usize) -> usize {
    4 * LANES / tile
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn expert_tiles<E: Float, N: Size>(
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
    let outputs = comptime!(4 * across_of(tile));
    // Fours of numbers along the sum that are in memory at the same time.
    let fours = comptime!(if tile < 32 { 2 } else { 4 });
    let first = workgroup % tiles * tile;
    let first_output = workgroup / tiles * outputs;
    let expert = expert_of(experts, usize::cast_from(max(order[first], 0)), block);
    // If the tile is empty or the expert is not in this block, nothing is computed.
    let is_here = order[first] >= 0 && expert < block.experts;

    // The vector that this lane loads a part of.
    let loads = lane < comptime!(fours * tile);
    let own = order[first + select(loads, lane / fours, 0usize)];
    let has_pair = loads && own >= 0;
    let at = vector_of(x, usize::cast_from(max(own, 0)), tokens, slots);

    let mut products = no_products();
    let mut vectors = Shared::<[Four]>::new_slice(comptime!(fours * tile));
    let mut weights = Shared::<[Four]>::new_slice(comptime!(fours * outputs));
    let columns = select(is_here, input.div_ceil(4), 0usize);
    let mut c = 0usize;
    while c < columns {
        let mut i = lane;
        while i < comptime!(fours * outputs) {
            // Indices past the last row read the last one.
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
        multiply(&mut products, &vectors, &weights, lane, tile, fours);
        sync_cube();
        c += fours;
    }
    write_tile::<E>(&products, order, y, block, first, first_output, is_here, tile);
}

/// Like `expert_tiles`, except that half a run of each row of `w` is in memory at a time. A lane reads it for
/// one row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn expert_tiles_packed<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<u32>,
    experts: &Tensor<i32>,
    order: &Tensor<i32>,
    y: &mut Tensor<E>,
    block: &Block,
    tokens: usize,
    slots: usize,
    input: usize,
    halves: usize,
    tiles: usize,
    workgroups: usize,
    #[comptime] tile: usize,
    #[comptime] reading: Reading,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let outputs = comptime!(4 * across_of(tile));
    let first = workgroup % tiles * tile;
    let first_output = workgroup / tiles * outputs;
    let expert = expert_of(experts, usize::cast_from(max(order[first], 0)), block);
    // If the tile is empty or the expert is not in this block, nothing is computed.
    let is_here = order[first] >= 0 && expert < block.experts;

    // The vector that this lane loads a part of.
    let loads = lane < comptime!(4 * tile);
    let own = order[first + select(loads, lane / 4, 0usize)];
    let has_pair = loads && own >= 0;
    let at = vector_of(x, usize::cast_from(max(own, 0)), tokens, slots);
    // The row that this lane reads. Indices past the last row read the last one.
    let row = expert * block.output + min(first_output + lane, block.output - 1);
    let begin = row * w.stride(0);

    let mut products = no_products();
    let mut table = Shared::<[f32]>::new_slice(TABLE);
    write_table(&mut table, reading);
    let mut vectors = Shared::<[Four]>::new_slice(comptime!(4 * tile));
    let mut weights = Shared::<[Four]>::new_slice(comptime!(4 * outputs));
    let end = select(is_here, halves, 0usize);
    let mut half = 0usize;
    while half < end {
        if lane < outputs {
            let words = read_words(w, begin, half, input, reading);
            let steps = comptime!(reading.steps());
            #[unroll]
            for pair in 0..2usize {
                let group = read_group(w, begin, half, pair, input, reading);
                #[unroll]
                for next in 0..2usize {
                    let read = read_four(&words, &table, pair, next, ONE, reading);
                    let numbers = (read - Four::new(group.zero)) * Four::new(group.scale * steps);
                    weights[comptime!(2 * pair + next) * outputs + lane] = numbers + Four::new(group.minimum);
                }
            }
        }
        if loads {
            let i = lane % 4;
            let c = half / 2 * 8 + half % 2 * 2 + i / 2 * 4 + i % 2;
            let mut numbers = Four::new(0.0);
            if has_pair {
                numbers = four_at::<E, N>(x, at, c, input, reading);
            }
            vectors[i * tile + lane / 4] = numbers;
        }
        sync_cube();
        multiply(&mut products, &vectors, &weights, lane, tile, 4usize);
        sync_cube();
        half += 1;
    }
    write_tile::<E>(&products, order, y, block, first, first_output, is_here, tile);
}

/// Zeros for the products of four vectors with four rows.
#[cube]
fn no_products() -> Array<Four> {
    let mut products = Array::<Four>::new(4usize);
    #[unroll]
    for r in 0..4usize {
        products[r] = Four::new(0.0);
    }
    products
}

/// Adds the products of a lane's four vectors and four rows, `across_of(tile)` apart, along `fours` fours in
/// memory.
#[cube]
fn multiply(
    products: &mut Array<Four>,
    vectors: &Shared<[Four]>,
    weights: &Shared<[Four]>,
    lane: usize,
    #[comptime] tile: usize,
    #[comptime] fours: usize,
) {
    let across = comptime!(across_of(tile));
    let outputs = comptime!(4 * across_of(tile));
    let quartet = lane / across * 4;
    let own_across = lane % across;
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
}

#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
fn write_tile<E: Float>(
    products: &Array<Four>,
    order: &Tensor<i32>,
    y: &mut Tensor<E>,
    block: &Block,
    first: usize,
    first_output: usize,
    is_here: bool,
    #[comptime] tile: usize,
) {
    let across = comptime!(across_of(tile));
    let lane = UNIT_POS as usize;
    let quartet = lane / across * 4;
    let own_across = lane % across;
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
