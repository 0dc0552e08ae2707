//! Dense weights. Lane 4 e + q has the eight q of each 32 numbers, which it reads at once: its parts of two
//! products, each along 16 numbers. Nothing passes through memory.

use cubecl::prelude::*;

use super::{
    Info, OF_LANE, Product, QUARTERS, Tile, Two, begins_of, multiply, no_sums_of_warp,
    norm::{self, powers_of, scaled, write_norms},
    place_of, vectors_of, write_results,
};
use crate::runtime::{
    launch::{LANES, write_permutation},
    tensor_cores::{EIGHT, Eight},
};

/// Times that a lane reads eight numbers of each row in a turn of the loop. Twice 64 bytes are a line of the
/// cache.
const STEPS: usize = 2;

/// Numbers of a row that a warp reads in a turn.
pub(super) const TURN: usize = STEPS * QUARTERS * EIGHT;

#[cube(launch, address_type = "dynamic")]
pub(crate) fn linear_mma<E: Float>(
    x: &Tensor<Eight<E>>,
    w: &Tensor<Eight<E>>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    scales: &Tensor<Eight<E>>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    rests: &Tensor<f32>,
    info: &Info,
    #[comptime] product: Product,
    #[comptime] tile: Tile,
    #[define(E)] _elem: ElemType,
) {
    write_permutation(comptime!(tile.permutation(product)));
    if CUBE_POS >= info.workgroups {
        terminate!();
    }
    let place = place_of(info, product);
    let (splits, eights) = comptime!((product.splits, product.most_rows / 8));
    let columns = info.input / EIGHT;
    let begins = begins_of(&place, info, w.stride(0) / EIGHT, product);
    let turns = info.input.div_ceil(TURN);
    let mut turn = place.warp % splits;
    let mut read = Array::<Eight<E>>::new(comptime!(OF_LANE * STEPS));
    read_turn(&mut read, w, &begins, turn, place.quarter, columns);

    let mut norms = Shared::<[f32]>::new_slice(comptime!(norm::len_of(product.norm, product.most_rows)));
    if comptime!(product.norm.is_some()) {
        write_norms(&mut norms, x, place.first_row, info, comptime!(product.most_rows));
    }
    let vectors = vectors_of(&place, info, columns, 0usize, product);
    let powers = powers_of(&norms, &place, comptime!(product.norm), comptime!(product.most_rows));

    let mut sums = no_sums_of_warp(product);
    while turn < turns {
        let first = turn * comptime!(STEPS * QUARTERS);
        turn += splits;
        let mut weights = Array::<Eight<E>>::new(comptime!(OF_LANE * STEPS));
        #[unroll]
        for i in 0..comptime!(OF_LANE * STEPS) {
            weights[i] = read[i];
        }
        read_turn(&mut read, w, &begins, turn, place.quarter, columns);
        #[unroll]
        for step in 0..STEPS {
            // Past the end of a row, the last numbers are read.
            let asked = first + comptime!(QUARTERS * step) + place.quarter;
            let column = if comptime!(tile.whole) { asked } else { min(asked, columns - 1) };
            let mut scale = Eight::<E>::new(E::from_int(1));
            if comptime!(product.norm.is_some()) {
                scale = scales[column];
            }
            #[unroll]
            for n in 0..eights {
                let mut numbers = x[vectors[n] + column];
                if comptime!(product.norm.is_some()) {
                    numbers = scaled(numbers, scale, powers[n], comptime!(product.norm));
                }
                if comptime!(!tile.whole) {
                    numbers = select(asked < columns, numbers, Eight::<E>::new(E::from_int(0)));
                }
                add_products::<E>(&mut sums, &weights, numbers, step, n, product, tile);
            }
        }
    }

    let mut memory = Shared::<[f32]>::new_aligned_slice(comptime!(8 * LANES), 16usize);
    write_results::<E>(
        &mut memory,
        &sums,
        &norms,
        rests,
        bias,
        residual,
        y,
        cosines,
        sines,
        &place,
        info,
        product,
        tile,
    );
}

/// Reads what a lane has of a turn. Past the end of a row, it reads the last numbers.
#[cube]
fn read_turn<E: Float>(
    read: &mut Array<Eight<E>>,
    w: &Tensor<Eight<E>>,
    begins: &Array<usize>,
    turn: usize,
    quarter: usize,
    columns: usize,
) {
    #[unroll]
    for step in 0..STEPS {
        let column =
            min(turn * comptime!(STEPS * QUARTERS) + comptime!(QUARTERS * step) + quarter, columns - 1);
        #[unroll]
        for i in 0..OF_LANE {
            read[comptime!(i * STEPS + step)] = w[begins[i] + column];
        }
    }
}

/// Adds the products of 32 numbers, of which the lane has eight in one of its rows of x.
#[cube]
fn add_products<E: Float>(
    sums: &mut Array<Two<f32>>,
    weights: &Array<Eight<E>>,
    numbers: Eight<E>,
    #[comptime] step: usize,
    #[comptime] n: usize,
    #[comptime] product: Product,
    #[comptime] tile: Tile,
) {
    let eights = comptime!(product.most_rows / 8);
    #[unroll]
    for i in 0..comptime!(OF_LANE / 2) {
        let place = comptime!(2 * i * eights + 2 * n);
        let mut own = Array::<Two<f32>>::new(2usize);
        own[0] = sums[place];
        own[1] = sums[comptime!(place + 1)];
        let (above, below) =
            (weights[comptime!(2 * i * STEPS + step)], weights[comptime!((2 * i + 1) * STEPS + step)]);
        #[unroll]
        for half in 0..2usize {
            let mut a = Array::<Two<E>>::new(4usize);
            let mut b = Array::<Two<E>>::new(2usize);
            #[unroll]
            for pair in 0..2usize {
                a[comptime!(2 * pair)] = two::<E>(above, comptime!(2 * half + pair));
                a[comptime!(2 * pair + 1)] = two::<E>(below, comptime!(2 * half + pair));
                b[pair] = two::<E>(numbers, comptime!(2 * half + pair));
            }
            own = multiply::<E>(&a, &b, &own, tile);
        }
        sums[place] = own[0];
        sums[comptime!(place + 1)] = own[1];
    }
}

/// Two neighbouring numbers.
#[cube]
fn two<E: Float>(numbers: Eight<E>, #[comptime] pair: usize) -> Two<E> {
    let mut two = Two::<E>::new(E::from_int(0));
    two.insert(0usize, numbers.extract(comptime!(2 * pair)));
    two.insert(1usize, numbers.extract(comptime!(2 * pair + 1)));
    two
}
