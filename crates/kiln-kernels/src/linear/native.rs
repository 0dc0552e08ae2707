//! Linear layers on the CPU, with SIMD.
//!
//! Weights of models are packed where they are loaded (`kiln_products`). Other tensors are dense. Up to 127
//! vectors are multiplied by dense rows directly: each result is the sum of chunks of [`CHUNK`] products, and
//! each chunk is summed in the lanes of one vector. So the bits do not depend on how many vectors are
//! multiplied together, or on how weights are divided among threads. For [`MANY`] vectors, dense rows are
//! packed first: their sums have another order, which does not depend on these either.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{Tensor, TensorData},
};
use kiln_products::threads::share;
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order, SIXTEEN},
};
use pulp::{Simd, WithSimd};

use super::Linear;
use crate::{
    linear::{
        matrix::Matrix,
        packed::{PackedLayout, PackedMatrix},
    },
    runtime::native::{Storage, by_storage, pieces, primitive, work},
};

/// Vectors that are multiplied by a weight while it is in a register, with 16 registers.
const ROWS: usize = 4;

/// [`ROWS`] with the 32 registers of AVX-512. With four rows of weights, 24 registers hold sums, and weights
/// are read from the L2 cache a third less often.
const MOST_ROWS: usize = 6;

/// Products that are summed before their sum is added to the others. This many numbers of a few vectors stay
/// in the L1 cache while weights stream through.
const CHUNK: usize = 1024;

/// Bytes of weights, in float32, that stay in the L2 cache while all vectors stream through.
const TILE: usize = 128 << 10;

/// Number of vectors from which on it pays to pack dense rows first.
const MANY: usize = 128;

/// The most vectors that are multiplied by `weight` with the bits that each has alone.
pub(crate) fn most_exact_rows(weight: &Matrix) -> usize {
    match weight {
        Matrix::Dense(_) => MANY - 1,
        Matrix::Packed(_) => usize::MAX,
    }
}

/// Number of dense rows that are packed at a time: enough to share among many threads, and so many that
/// arranging the vectors anew for each part takes little time.
const PACKED: usize = 1024;

/// Computes the products. Returns `None` for unsupported inputs: mixed types, weights with gaps, and empty
/// tensors.
pub(super) fn products_of(linear: &Linear) -> Option<Tensor<3>> {
    let Linear { x, weight, bias, residual } = linear;
    let ([rows, tokens, input], output) = (x.dims(), weight.rows());
    let others = bias.iter().map(Tensor::dtype).chain(residual.iter().map(Tensor::dtype));
    let of_one_type = others.chain([weight.dtype()]).all(|dtype| dtype == x.dtype());
    if !of_one_type || rows * tokens * input * output == 0 {
        return None;
    }
    by_storage!(x.dtype(), E => products_in::<E>(linear), else None)
}

/// Computes the products in one type. Sums are float32, including bias and residual, and rounded once.
fn products_in<E: Storage>(linear: &Linear) -> Option<Tensor<3>> {
    let Linear { x, weight, bias, residual } = linear;
    let ([rows, tokens, input], output) = (x.dims(), weight.rows());
    let x = primitive(x.clone()).to_contiguous();
    let mut y = {
        let mut widened = Vec::new();
        let x = E::in_floats(x.as_slice()?, &mut widened);
        match weight {
            Matrix::Dense(weight) => {
                let weight = primitive(weight.clone());
                products::<E>(x, weight.as_slice()?, [rows * tokens, input, output])
            }
            Matrix::Packed(weight) => products_of_packed(x, weight)?,
        }
    };
    let mut widened = Vec::new();
    if let Some(bias) = bias {
        let bias = primitive(bias.clone()).to_contiguous();
        let bias = E::in_floats(bias.as_slice()?, &mut widened);
        for row in y.chunks_mut(output) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
    if let Some(residual) = residual {
        let residual = primitive(residual.clone()).to_contiguous();
        let residual = E::in_floats(residual.as_slice()?, &mut widened);
        y.iter_mut().zip(residual).for_each(|(y, residual)| *y += residual);
    }
    let y = FlexTensor::from_data(TensorData::new(E::of_floats(y), [rows, tokens, output]));
    Some(Tensor::from_primitive::<Flex>(y))
}

/// Returns `[vectors, output]` for x `[vectors, input]`, if the words are in the order that vector units
/// read.
fn products_of_packed(x: &[f32], weight: &PackedMatrix) -> Option<Vec<f32>> {
    let [output, input] = weight.shape;
    let words = primitive(weight.words.clone()).to_contiguous();
    let words = bytemuck::cast_slice(words.as_slice::<i32>()?);
    let mut y = vec![0.0; x.len() / input * output];
    let results: Vec<_> = y.chunks_mut(output).collect();
    let PackedLayout { format, order: Order::Sixteens } = weight.layout else {
        return None;
    };
    let group = kiln_products::Group { vectors: 0..results.len(), words, y: results };
    kiln_products::products_of_groups(x, input, format, weight.use_as.arithmetic, vec![group])?;
    Some(y)
}

/// Returns `[rows, output]` for x `[rows, input]` and weights `[output, input]`.
fn products<E: Storage>(x: &[f32], weight: &[E], [rows, input, output]: [usize; 3]) -> Vec<f32> {
    let mut y = vec![0.0; rows * output];
    products_of_groups(input, vec![Group { x, weight, y: y.chunks_mut(output).collect() }]);
    y
}

/// Vectors that are multiplied by the same weights.
pub(crate) struct Group<'a, E> {
    /// `[rows, input]`
    pub(crate) x: &'a [f32],
    /// `[output, input]`
    pub(crate) weight: &'a [E],
    /// The result of each row, `[output]`.
    pub(crate) y: Vec<&'a mut [f32]>,
}

/// Computes the products of each group.
pub(crate) fn products_of_groups<E: Storage>(input: usize, groups: Vec<Group<'_, E>>) {
    let (many, few): (Vec<_>, Vec<_>) = groups.into_iter().partition(|group| group.y.len() >= MANY);
    for group in many {
        products_of_many(input, group);
    }
    let products = few.iter().map(|group| group.y.len() * group.weight.len()).sum();
    let pieces_of_each = pieces(products).div_ceil(few.len().max(1));
    let mut all = Vec::new();
    for Group { x, weight, y } in few {
        let rows = (weight.len() / input).div_ceil(pieces_of_each).max(1);
        let piece = |weight| Products { x, weight, input, y: Vec::with_capacity(y.len()) };
        let first = all.len();
        all.extend(weight.chunks(rows * input).map(piece));
        for row in y {
            let parts = row.chunks_mut(rows);
            all[first..].iter_mut().zip(parts).for_each(|(piece, part)| piece.y.push(part));
        }
    }
    work(products, all);
}

/// Computes the products of a group by packing its weights in float32, some at a time.
fn products_of_many<E: Storage>(input: usize, Group { x, weight, mut y }: Group<'_, E>) {
    let mut words = vec![0; PACKED.min((weight.len() / input).next_multiple_of(SIXTEEN)) * input];
    for weight in weight.chunks(PACKED * input) {
        let rows = weight.len() / input;
        let words = &mut words[..rows.next_multiple_of(SIXTEEN) * input];
        let each = rows.div_ceil(pieces(weight.len())).next_multiple_of(SIXTEEN) * input;
        let parts = weight.chunks(each).zip(words.chunks_mut(each)).collect();
        share(weight.len(), parts, |(weight, words)| {
            let mut widened = Vec::new();
            let (bytes, words) =
                (bytemuck::cast_slice(E::in_floats(weight, &mut widened)), bytemuck::cast_slice_mut(words));
            let packed = Format::F32.arrange(Order::Sixteens, input, bytes, words);
            packed.expect("words have the size of the rows");
        });
        let y = y.iter_mut().filter_map(|y| y.split_off_mut(..rows)).collect();
        let group = kiln_products::Group { vectors: 0..x.len() / input, words, y };
        let computed =
            kiln_products::products_of_groups(x, input, Format::F32, Arithmetic::Floats, vec![group]);
        computed.expect("words match the rows");
    }
}

/// Some columns of the result: a slice of each row, and the weights for it.
struct Products<'a, E> {
    x: &'a [f32],
    weight: &'a [E],
    input: usize,
    y: Vec<&'a mut [f32]>,
}

// Loops throughout: a closure would not be compiled for the detected instruction set.
impl<E: Storage> WithSimd for Products<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, weight, input, mut y } = self;
        // Several long vectors do not fit in the L1 cache together. Then the first one goes alone, as fast as
        // memory allows, and leaves the weights in the L2 cache for the others.
        let alone = if input > CHUNK { 1 } else { 0 };
        let (x_alone, x_others) = x.split_at(alone * input);
        let (y_alone, y_others) = y.split_at_mut(alone);
        let tile = (TILE / 4 / input).next_multiple_of(4).max(4);
        let mut widened = Vec::new();
        for (i, weight) in weight.chunks(tile * input).enumerate() {
            let (weight, column) = (E::in_floats(weight, &mut widened), i * tile);
            for y in y_alone.iter_mut() {
                block::<S, 1, 4>(simd, [x_alone], weight, [y], column);
            }
            let many = match S::F32_LANES {
                16 => y_others.len() / MOST_ROWS * MOST_ROWS,
                _ => 0,
            };
            let (x_many, x_few) = x_others.split_at(many * input);
            let (y_many, y_few) = y_others.split_at_mut(many);
            for (x, y) in x_many.chunks(MOST_ROWS * input).zip(y_many.chunks_mut(MOST_ROWS)) {
                if let [a, b, c, d, e, f] = y {
                    block::<S, MOST_ROWS, 4>(simd, split(x), weight, [a, b, c, d, e, f], column);
                }
            }
            for (x, y) in x_few.chunks(ROWS * input).zip(y_few.chunks_mut(ROWS)) {
                match y {
                    [a] => block::<S, 1, 4>(simd, [x], weight, [a], column),
                    [a, b] => block::<S, 2, 4>(simd, split(x), weight, [a, b], column),
                    [a, b, c] => block::<S, 3, 2>(simd, split(x), weight, [a, b, c], column),
                    [a, b, c, d] => block::<S, 4, 2>(simd, split(x), weight, [a, b, c, d], column),
                    _ => {}
                }
            }
        }
    }
}

#[inline(always)]
fn split<const M: usize>(x: &[f32]) -> [&[f32]; M] {
    let input = x.len() / M;
    let mut rows = [&[][..]; M];
    for m in 0..M {
        rows[m] = &x[m * input..(m + 1) * input];
    }
    rows
}

/// M rows of x times all weights, N rows of weights at a time.
#[inline(always)]
fn block<S: Simd, const M: usize, const N: usize>(
    simd: S,
    x: [&[f32]; M],
    weight: &[f32],
    mut y: [&mut &mut [f32]; M],
    column: usize,
) {
    let input = x[0].len();
    if M == 1 {
        // Weights are read in order.
        for (i, weight) in weight.chunks(N * input).enumerate() {
            for start in (0..input).step_by(CHUNK) {
                let part = start..input.min(start + CHUNK);
                add_dots::<S, M, N>(simd, x, weight, &mut y, column + i * N, part);
            }
        }
        return;
    }
    for start in (0..input).step_by(CHUNK) {
        let part = start..input.min(start + CHUNK);
        for (i, weight) in weight.chunks(N * input).enumerate() {
            add_dots::<S, M, N>(simd, x, weight, &mut y, column + i * N, part.clone());
        }
    }
}

/// A part of the products of M rows of x and up to N rows of weights.
#[inline(always)]
fn add_dots<S: Simd, const M: usize, const N: usize>(
    simd: S,
    x: [&[f32]; M],
    weight: &[f32],
    y: &mut [&mut &mut [f32]; M],
    column: usize,
    part: Range<usize>,
) {
    let input = x[0].len();
    let x = cut(x, &part);
    if weight.len() == N * input {
        let dots = dots::<S, M, N>(simd, x, cut(split(weight), &part));
        for m in 0..M {
            for n in 0..N {
                y[m][column + n] += dots[m][n];
            }
        }
        return;
    }
    for (n, weight) in weight.chunks_exact(input).enumerate() {
        let dots = dots::<S, M, 1>(simd, x, [&weight[part.clone()]]);
        for m in 0..M {
            y[m][column + n] += dots[m][0];
        }
    }
}

#[inline(always)]
fn cut<'a, const M: usize>(mut rows: [&'a [f32]; M], part: &Range<usize>) -> [&'a [f32]; M] {
    for m in 0..M {
        rows[m] = &rows[m][part.start..part.end];
    }
    rows
}

/// The dot product of each x with each w: one sum of vectors for each pair, in the same order for every M and
/// N.
#[inline(always)]
fn dots<S: Simd, const M: usize, const N: usize>(simd: S, x: [&[f32]; M], w: [&[f32]; N]) -> [[f32; N]; M] {
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    let mut x_vectors = [&[][..]; M];
    let mut w_vectors = [&[][..]; N];
    let whole = S::as_simd_f32s(x[0]).0.len();
    for m in 0..M {
        x_vectors[m] = &S::as_simd_f32s(x[m]).0[..whole];
    }
    for n in 0..N {
        w_vectors[n] = &S::as_simd_f32s(w[n]).0[..whole];
    }
    for i in 0..whole {
        for n in 0..N {
            let w = w_vectors[n][i];
            for m in 0..M {
                sums[m][n] = simd.mul_add_e_f32s(w, x_vectors[m][i], sums[m][n]);
            }
        }
    }
    let mut dots = [[0.0; N]; M];
    for m in 0..M {
        for n in 0..N {
            dots[m][n] = simd.reduce_sum_f32s(sums[m][n]);
            for i in whole * S::F32_LANES..x[m].len() {
                dots[m][n] += x[m][i] * w[n][i];
            }
        }
    }
    dots
}

#[cfg(test)]
mod tests {
    use burn::tensor::f16;

    use super::*;

    /// The numbers of vectors are on both sides of the tiles' sizes, and the weights are packed in two parts.
    fn bits_do_not_depend_on_other_vectors<E: Storage>() {
        let (input, output) = (33, PACKED + 37);
        let numbers = |len: usize| (0..len).map(|i| (i * 7919 % 1009) as f32 / 997.0 - 0.5).collect();
        let x: Vec<f32> = numbers(400 * input);
        let weight = E::of_floats(numbers(output * input));
        let all = products(&x, &weight, [400, input, output]);
        for vectors in [MANY, MANY + 2, 200] {
            let some = products(&x[..vectors * input], &weight, [vectors, input, output]);
            assert_eq!(some, all[..vectors * output], "{vectors} vectors");
        }
        let few = products(&x[..3 * input], &weight, [3, input, output]);
        // Sums of 33 products below 0.3, in another order: each addition rounds by at most 2^-24 of the sum.
        let apart = few.iter().zip(&all).map(|(few, all)| (few - all).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-5, "{apart}");
    }

    #[test]
    fn bits_of_many_vectors_do_not_depend_on_the_others() {
        bits_do_not_depend_on_other_vectors::<f32>();
        bits_do_not_depend_on_other_vectors::<f16>();
    }
}
