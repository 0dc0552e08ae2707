//! Epilogue of the products, whatever the format of the weights: sums the lanes, then norms, gates, rotates
//! and writes the result.

use cubecl::prelude::*;

use super::{Info, Kind, Product, row_at};
use crate::{
    linear::{
        activation::{Activation, cube::activated},
        fours::Four,
    },
    runtime::launch::LANES,
};

/// Reduces, for each of `at_once` rows of x, the four sums of every `together` lanes. The partial sums that
/// are left are stored consecutively in `sums`.
#[cube]
pub(crate) fn add_up(
    sums: &mut Shared<[f32]>,
    lane: usize,
    #[comptime] together: usize,
    #[comptime] at_once: usize,
) {
    sync_cube();
    let first = comptime!(first_added(together));
    if comptime!(first > 1) {
        let left = comptime!(together / first);
        let is_mine = lane < comptime!(LANES / first * at_once);
        let begin = lane / left * together + lane % left;
        let mut sum = Four::new(0.0);
        if is_mine {
            for j in 0..first {
                #[unroll]
                for i in 0..4usize {
                    sum.insert(i, sum.extract(i) + sums[(begin + j * left) * 4 + i]);
                }
            }
        }
        sync_cube();
        if is_mine {
            #[unroll]
            for i in 0..4usize {
                sums[lane * 4 + i] = sum.extract(i);
            }
        }
        sync_cube();
    }
}

/// The number of partial sums that are in memory for each output, and that of outputs in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Partial {
    pub(crate) left: usize,
    pub(crate) outputs: usize,
}

impl Partial {
    /// The partial sums that [`add_up`] leaves of those of `together` lanes.
    pub(crate) fn of(together: usize) -> Self {
        Self { left: together / first_added(together), outputs: LANES / together * 4 }
    }
}

/// Sums the partial sums of output `output` of the workgroup in row `row`.
#[cube]
pub(crate) fn added_up(sums: &Shared<[f32]>, row: usize, output: usize, #[comptime] partial: Partial) -> f32 {
    let (left, outputs) = comptime!((partial.left, partial.outputs));
    let first = (row * outputs + output) / 4 * left;
    let mut sum = f32::new(0.0);
    for j in 0..left {
        // Outputs begin at different lanes, to use different banks.
        sum += sums[(first + (j + output / 4) % left) * 4 + output % 4];
    }
    sum
}

/// Number of lanes of `together` that are summed first.
fn first_added(together: usize) -> usize {
    if together > 16 { 16 } else { 1 }
}

/// A result with its bias, for a row of x whose sums are in memory, at a place of the workgroup.
#[cube]
fn result<E: Float>(
    sums: &Shared<[f32]>,
    bias: &Tensor<E>,
    own_row: usize,
    own_place: usize,
    row: usize,
    #[comptime] partial: Partial,
    #[comptime] biased: bool,
) -> f32 {
    let sum = added_up(sums, own_row, own_place, partial);
    if comptime!(biased) { sum + f32::cast_from(bias[row * bias.stride(0)]) } else { sum }
}

/// Sums all lanes and writes the results: for the rows of x from `first_row` on, and for the outputs of the
/// workgroup.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
pub(super) fn write_results<E: Float>(
    mut sums: Shared<[f32]>,
    products: &mut Array<Four>,
    squares: &Array<f32>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    info: &Info,
    first_row: usize,
    first_output: usize,
    #[comptime] product: Product,
) {
    let lane = UNIT_POS as usize;
    let most_rows = comptime!(product.most_rows);
    let together = comptime!(product.together());
    let at_once = comptime!(product.at_once());
    if comptime!(product.norm.is_some()) {
        #[unroll]
        for from in 0..comptime!(most_rows / at_once) {
            #[unroll]
            for r in 0..at_once {
                sums[lane * 4 + r] = squares[from * at_once + r];
            }
            add_up(&mut sums, lane, together, at_once);
            // The lanes that share the sums for four rows of the weight have gone over all of x.
            let left = comptime!(Partial::of(together).left);
            #[unroll]
            for r in 0..at_once {
                let mut sum = f32::new(0.0);
                for j in 0..left {
                    sum += sums[j * 4 + r];
                }
                let root = f32::sqrt(sum / f32::cast_from(info.input) + info.eps);
                products[from * at_once + r] /= Four::new(root);
            }
            sync_cube();
        }
    }
    #[unroll]
    for from in 0..comptime!(most_rows / at_once) {
        #[unroll]
        for r in 0..at_once {
            #[unroll]
            for i in 0..4usize {
                sums[(r * LANES + lane) * 4 + i] = products[from * at_once + r].extract(i);
            }
        }
        add_up(&mut sums, lane, together, at_once);
        write_rows::<E>(
            &sums,
            bias,
            residual,
            y,
            cosines,
            sines,
            info,
            first_row + from * at_once,
            first_output,
            at_once,
            comptime!(Partial::of(together)),
            product,
        );
        if comptime!(most_rows > at_once) {
            // All lanes have read the previous contents.
            sync_cube();
        }
    }
}

/// Writes the results of the outputs of the workgroup in the `at_once` rows of x whose sums are in memory.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
pub(super) fn write_rows<E: Float>(
    sums: &Shared<[f32]>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    info: &Info,
    first_row: usize,
    first_output: usize,
    #[comptime] at_once: usize,
    #[comptime] partial: Partial,
    #[comptime] product: Product,
) {
    let (tokens, rows, output) = (info.tokens, info.rows, info.output);
    let outputs = comptime!(partial.outputs);
    let (kind, biased) = comptime!((product.kind, product.biased));
    let mut i = UNIT_POS as usize;
    while i < outputs * at_once {
        let row = first_row + i / outputs;
        let place = first_output + i % outputs;
        let out = row_at(place, info, kind);
        let (own_row, own_place) = (i / outputs, i % outputs);
        if comptime!(matches!(kind, Kind::Gated(_))) {
            let activation = comptime!(match kind {
                Kind::Gated(activation) => activation,
                _ => Activation::Silu,
            });
            let half = output / 2;
            if row < rows && place % 4 < 2 && place / 4 * 2 + place % 2 < half {
                let gate = result::<E>(sums, bias, own_row, own_place, out, partial, biased);
                let up = result::<E>(sums, bias, own_row, own_place + 2, out + half, partial, biased);
                y[row * half + out] = E::cast_from(activated(gate, activation) * up);
            }
        } else if row < rows && place < output {
            let mut value = result::<E>(sums, bias, own_row, own_place, out, partial, biased);
            if comptime!(kind == Kind::Rotated) {
                let of_head = out % info.head_dim;
                if out < info.rotated && of_head < 2 * info.pairs {
                    let (sequence, token, pair) =
                        (row / tokens * info.each, row % tokens, of_head % info.pairs);
                    let at = sequence * cosines.stride(0) + token * cosines.stride(1);
                    let c = f32::cast_from(E::cast_from(cosines[at + pair * cosines.stride(2)]));
                    let at = sequence * sines.stride(0) + token * sines.stride(1);
                    let s = f32::cast_from(E::cast_from(sines[at + pair * sines.stride(2)]));
                    let is_first = of_head < info.pairs;
                    let other_place = select(is_first, own_place + 2, own_place - 2);
                    let other_row = select(is_first, out + info.pairs, out - info.pairs);
                    let other = result::<E>(sums, bias, own_row, other_place, other_row, partial, biased);
                    value = value * c + select(is_first, -other, other) * s;
                }
            }
            if comptime!(product.added) {
                let at = row / tokens * residual.stride(0) + row % tokens * residual.stride(1);
                value += f32::cast_from(residual[at + out * residual.stride(2)]);
            }
            y[row * output + out] = E::cast_from(value);
        }
        i += LANES;
    }
}
