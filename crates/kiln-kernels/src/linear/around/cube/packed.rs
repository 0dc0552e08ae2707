//! Products with packed weights: codes are unpacked in registers and multiplied there.

use cubecl::prelude::*;

use super::{Info, Product, no_sums, row_at, write_results};
use crate::{
    linear::{
        fours::{Four, dot},
        packed_reader::{Reading, eight_at, read_four, read_group, read_run, read_words, write_table},
    },
    norm::rms_norm::NormOrder,
    runtime::launch::{LANES, write_permutation},
};

/// Like `linear`, except that lanes go along runs of `w`. With up to four rows of x, a turn of the loop takes
/// a whole run. With more, there are registers for half of one. The order of a sum is the same.
#[cube(launch, address_type = "dynamic")]
pub(super) fn linear_packed<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<u32>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    scales: &Tensor<Vector<E, N>>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    info: &Info,
    #[comptime] product: Product,
    #[comptime] reading: Reading,
    #[define(E)] _elem: ElemType,
) {
    write_permutation(comptime!(format!("{}-{}", reading.format.name(), product.permutation())));
    let workgroup = CUBE_POS;
    if workgroup >= info.workgroups {
        terminate!();
    }
    let (tokens, input, rows) = (info.tokens, info.input, info.rows);
    let lane = UNIT_POS as usize;
    let (most_rows, together) = comptime!((product.most_rows, product.together()));
    let (norm, kind) = comptime!((product.norm, product.kind));
    let tiles = rows.div_ceil(most_rows);
    let first_row = workgroup % tiles * most_rows;
    let first_output = workgroup / tiles * comptime!(product.outputs());
    let first = first_output + lane / together * 4;
    let (mut products, mut squares) = no_sums(most_rows);
    // First the numbers of the table, then sums.
    let mut memory = Shared::<[f32]>::new_slice(comptime!(4 * LANES * product.at_once()));
    write_table(&mut memory, reading);
    let mut begins = Array::<usize>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        // Indices past the last row read the last one.
        begins[i] = min(row_at(first + i, info, kind), info.output - 1) * w.stride(0);
    }
    let parts = comptime!(if most_rows > 4 { 1usize } else { 2usize });
    let mut part = 0usize;
    let mut run = lane % together;
    while run < info.runs {
        let scaling = read_scaling(w, &begins, run, input, reading);
        let mut words = Sequence::<Array<u32>>::new();
        #[unroll]
        for i in 0..4usize {
            if comptime!(parts == 2) {
                read_run(&mut words, w, begins[i], run, input, reading);
            } else {
                words.push(read_words(w, begins[i], 2 * run + part, input, reading));
            }
        }
        #[unroll]
        for of_turn in 0..parts {
            #[unroll]
            for pair in 0..2usize {
                let c = 8 * run + 2 * (part + of_turn) + comptime!(4 * pair);
                let weights = numbers_of_pair(&words, of_turn, parts, &memory, pair, info.one, reading);
                let mut own_scales = Array::<Four>::new(2usize);
                if comptime!(norm.is_some()) {
                    let (mut first, mut second) = eight_at::<E, N>(scales, 0usize, c, input, reading);
                    if comptime!(norm == Some(NormOrder::ScaleThenCast)) {
                        first += Four::new(1.0);
                        second += Four::new(1.0);
                    }
                    own_scales[0] = first;
                    own_scales[1] = second;
                }
                #[unroll]
                for r in 0..most_rows {
                    let row = min(first_row + r, rows - 1);
                    let at = row / tokens * x.stride(0) + row % tokens * x.stride(1);
                    let (mut numbers, mut next) = eight_at::<E, N>(x, at, c, input, reading);
                    // The sum of the numbers.
                    let mut total = f32::new(0.0);
                    if comptime!(norm.is_some()) {
                        squares[r] += dot(numbers, numbers) + dot(next, next);
                        total = dot_onto(dot(numbers, own_scales[0]), next, own_scales[1]);
                        numbers *= own_scales[0];
                        next *= own_scales[1];
                    } else {
                        total += sum_of(numbers, next);
                    }
                    products[r] = add_products_of_pair(
                        products[r],
                        numbers,
                        next,
                        total,
                        &scaling,
                        &weights,
                        pair,
                        reading,
                    );
                }
            }
        }
        if comptime!(parts == 2) {
            run += together;
        } else {
            run += part * together;
            part = 1 - part;
        }
    }
    if comptime!(reading.table().is_some()) {
        // All lanes have read the table.
        sync_cube();
    }
    write_results::<E>(
        memory,
        &mut products,
        &squares,
        bias,
        residual,
        y,
        cosines,
        sines,
        info,
        first_row,
        first_output,
        product,
    );
}

/// The scaling of a run of four rows: `Σ x w` in a pair of fours is `factor · Σ x read + shift · Σ x`,
/// because codes are multiplied as they are read. Each pair has four factors and four shifts. Symmetric
/// formats have no shifts: there it is `factor · (Σ x read - zero · Σ x)`.
#[derive(CubeType)]
pub(crate) struct Scaling {
    factors: Sequence<Four>,
    shifts: Sequence<Four>,
}

/// Reads the scaling of a run of the four rows that begin with the words `begins`.
#[cube]
pub(crate) fn read_scaling(
    w: &Tensor<u32>,
    begins: &Array<usize>,
    run: usize,
    input: usize,
    #[comptime] reading: Reading,
) -> Scaling {
    let mut factors = Sequence::<Four>::new();
    let mut shifts = Sequence::<Four>::new();
    #[unroll]
    for pair in 0..2usize {
        let mut factor = Four::new(1.0);
        let mut shift = Four::new(0.0);
        #[unroll]
        for i in 0..4usize {
            let of_pair = read_group(w, begins[i], 2 * run, pair, input, reading);
            let steps = of_pair.scale * comptime!(reading.steps());
            factor.insert(i, steps);
            if comptime!(reading.has_shifts()) {
                shift.insert(i, fma(steps, -of_pair.zero, of_pair.minimum));
            }
        }
        factors.push(factor);
        shifts.push(shift);
    }
    Scaling { factors, shifts }
}

/// Returns the codes in a pair of fours: the first four of each row, then the second. `words` has those of
/// `halves` halves of a run for each row.
#[cube]
pub(crate) fn numbers_of_pair(
    words: &Sequence<Array<u32>>,
    #[comptime] half: usize,
    #[comptime] halves: usize,
    table: &Shared<[f32]>,
    #[comptime] pair: usize,
    one: u32,
    #[comptime] reading: Reading,
) -> Array<Four> {
    let mut numbers = Array::<Four>::new(8usize);
    #[unroll]
    for i in 0..4usize {
        let words = &words[comptime!(i * halves + half)];
        numbers[i] = read_four(words, table, pair, 0usize, one, reading);
        numbers[comptime!(i + 4)] = read_four(words, table, pair, 1usize, one, reading);
    }
    numbers
}

/// Adds the products of a pair of fours of a vector, `numbers` and `next`, with each row. `total` is the sum
/// of the pair.
#[cube]
#[allow(clippy::too_many_arguments, reason = "they are registers")]
pub(crate) fn add_products_of_pair(
    sums: Four,
    numbers: Four,
    next: Four,
    total: f32,
    scaling: &Scaling,
    weights: &Array<Four>,
    #[comptime] pair: usize,
    #[comptime] reading: Reading,
) -> Four {
    let (factor, shift) = (scaling.factors[pair], scaling.shifts[pair]);
    let mut added = sums;
    let mut zero = f32::new(0.0);
    if comptime!(reading.is_symmetric()) {
        zero = total * comptime!(-reading.zero(pair));
    }
    #[unroll]
    for i in 0..4usize {
        let partial = if comptime!(reading.is_symmetric()) {
            dot_onto(zero, numbers, weights[i])
        } else {
            dot(numbers, weights[i])
        };
        let partial = dot_onto(partial, next, weights[comptime!(i + 4)]);
        let mut sum = fma(factor.extract(i), partial, added.extract(i));
        if comptime!(reading.has_shifts()) {
            sum = fma(shift.extract(i), total, sum);
        }
        added.insert(i, sum);
    }
    added
}

/// The sum of all numbers in two fours.
#[cube]
pub(crate) fn sum_of(numbers: Four, next: Four) -> f32 {
    let mut total = f32::new(0.0);
    #[unroll]
    for i in 0..4usize {
        total += numbers.extract(i) + next.extract(i);
    }
    total
}

/// `sum + Σ a b`.
#[cube]
fn dot_onto(sum: f32, a: Four, b: Four) -> f32 {
    let mut sum = sum;
    #[unroll]
    for d in 0..4usize {
        sum = fma(a.extract(d), b.extract(d), sum);
    }
    sum
}
