//! Linear layers on the CPU, by SIMD.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, Tensor, TensorData},
};
use pulp::{Simd, WithSimd};

use super::Linear;
use crate::{
    Matrix,
    native::{pieces, primitive, work},
};

/// Vectors that are multiplied by a weight while it is in a register.
const ROWS: usize = 4;

/// Numbers of each of these vectors that stay in the first cache while weights pass by.
const CHUNK: usize = 1024;

/// Bytes of weights that stay in the second cache while all vectors pass by.
const TILE: usize = 128 << 10;

/// `None` for what it is not made for: types other than float32, views with gaps, nothing at all.
pub(super) fn products_of(linear: &Linear) -> Option<Tensor<3>> {
    let Linear { x, weight: Matrix::Dense(weight), bias, residual } = linear;
    let [rows, tokens, input] = x.dims();
    let [output, _] = weight.dims();
    let is_f32 = |dtype| dtype == DType::F32;
    let others = bias.iter().map(Tensor::dtype).chain(residual.iter().map(Tensor::dtype));
    let all_f32 = others.chain([x.dtype(), weight.dtype()]).all(is_f32);
    if !all_f32 || rows * tokens * input * output == 0 {
        return None;
    }
    let (x, weight, bias) = (primitive(x.clone()), primitive(weight.clone()), bias.clone().map(primitive));
    let bias = match &bias {
        Some(bias) => Some(bias.as_slice()?),
        None => None,
    };
    let residual = residual.as_ref().map(|residual| primitive(residual.clone()).to_contiguous());
    let residual = match &residual {
        Some(residual) => Some(residual.as_slice()?),
        None => None,
    };
    let mut y = products(x.as_slice()?, weight.as_slice()?, bias, [rows * tokens, input, output]);
    if let Some(residual) = residual {
        y.iter_mut().zip(residual).for_each(|(y, residual): (&mut f32, &f32)| *y += residual);
    }
    let y = FlexTensor::from_data(TensorData::new(y, [rows, tokens, output]));
    Some(Tensor::from_primitive::<Flex>(y))
}

/// `[rows, output]` for x `[rows, input]` and weights `[output, input]`.
fn products(x: &[f32], weight: &[f32], bias: Option<&[f32]>, [rows, input, output]: [usize; 3]) -> Vec<f32> {
    let mut y = vec![0.0; rows * output];
    let products = rows * weight.len();
    let columns = output.div_ceil(pieces(products));
    let mut pieces: Vec<_> = weight
        .chunks(columns * input)
        .map(|weight| Products { x, weight, input, y: Vec::with_capacity(rows) })
        .collect();
    for row in y.chunks_mut(output) {
        pieces.iter_mut().zip(row.chunks_mut(columns)).for_each(|(piece, part)| piece.y.push(part));
    }
    work(products, pieces);
    if let Some(bias) = bias {
        for row in y.chunks_mut(output) {
            row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
    y
}

/// Some columns of the result: a slice of each row, and the weights for it.
struct Products<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    input: usize,
    y: Vec<&'a mut [f32]>,
}

// Loops throughout: what a closure computes would not be compiled for the instructions that were found.
impl WithSimd for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, weight, input, mut y } = self;
        let few = y.len() <= ROWS;
        // Long vectors do not fit in the first cache together. Then the first one goes alone, as fast as memory is,
        // and leaves the weights in the second cache for the others.
        let alone = if input > CHUNK { 1 } else { 0 };
        let (x_alone, x_others) = x.split_at(alone * input);
        let (y_alone, y_others) = y.split_at_mut(alone);
        let tile = (TILE / 4 / input).next_multiple_of(4).max(4);
        for (i, weight) in weight.chunks(tile * input).enumerate() {
            let column = i * tile;
            for y in y_alone.iter_mut() {
                block::<S, 1, 1, 4>(simd, [x_alone], weight, [y], column);
            }
            for (x, y) in x_others.chunks(ROWS * input).zip(y_others.chunks_mut(ROWS)) {
                match y {
                    [a] => block::<S, 1, 1, 4>(simd, [x], weight, [a], column),
                    [a, b] => block::<S, 2, 1, 4>(simd, split(x), weight, [a, b], column),
                    [a, b, c] => block::<S, 3, 1, 3>(simd, split(x), weight, [a, b, c], column),
                    [a, b, c, d] if few => block::<S, 4, 1, 2>(simd, split(x), weight, [a, b, c, d], column),
                    [a, b, c, d] => block::<S, 4, 2, 1>(simd, split(x), weight, [a, b, c, d], column),
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

/// M rows of x times all weights, N rows of these at a time.
#[inline(always)]
fn block<S: Simd, const M: usize, const N: usize, const K: usize>(
    simd: S,
    x: [&[f32]; M],
    weight: &[f32],
    y: [&mut &mut [f32]; M],
    column: usize,
) {
    let input = x[0].len();
    let chunk = if M == 1 { input } else { CHUNK };
    for start in (0..input).step_by(chunk) {
        let end = input.min(start + chunk);
        let x = cut(x, start, end);
        let groups = weight.chunks_exact(N * input);
        let rest = groups.remainder();
        let mut column = column;
        for group in groups {
            let dots = dots::<S, M, N, K>(simd, x, cut(split(group), start, end));
            for m in 0..M {
                for n in 0..N {
                    y[m][column + n] += dots[m][n];
                }
            }
            column += N;
        }
        for row in rest.chunks_exact(input) {
            let dots = dots::<S, M, 1, K>(simd, x, [&row[start..end]]);
            for m in 0..M {
                y[m][column] += dots[m][0];
            }
            column += 1;
        }
    }
}

#[inline(always)]
fn cut<const M: usize>(mut rows: [&[f32]; M], start: usize, end: usize) -> [&[f32]; M] {
    for m in 0..M {
        rows[m] = &rows[m][start..end];
    }
    rows
}

/// The dot product of each x with each w. K sums of each, because an addition waits for the one before it.
#[inline(always)]
fn dots<S: Simd, const M: usize, const N: usize, const K: usize>(
    simd: S,
    x: [&[f32]; M],
    w: [&[f32]; N],
) -> [[f32; N]; M] {
    let mut sums = [[[simd.splat_f32s(0.0); K]; N]; M];
    let mut x_vectors = [&[][..]; M];
    let mut w_vectors = [&[][..]; N];
    let whole = S::as_simd_f32s(x[0]).0.len();
    for m in 0..M {
        x_vectors[m] = &S::as_simd_f32s(x[m]).0[..whole];
    }
    for n in 0..N {
        w_vectors[n] = &S::as_simd_f32s(w[n]).0[..whole];
    }
    let mut i = 0;
    while i + K <= whole {
        for k in 0..K {
            for n in 0..N {
                let w = w_vectors[n][i + k];
                for m in 0..M {
                    sums[m][n][k] = simd.mul_add_e_f32s(w, x_vectors[m][i + k], sums[m][n][k]);
                }
            }
        }
        i += K;
    }
    while i < whole {
        for n in 0..N {
            for m in 0..M {
                sums[m][n][0] = simd.mul_add_e_f32s(w_vectors[n][i], x_vectors[m][i], sums[m][n][0]);
            }
        }
        i += 1;
    }
    let mut dots = [[0.0; N]; M];
    for m in 0..M {
        for n in 0..N {
            for k in 1..K {
                sums[m][n][0] = simd.add_f32s(sums[m][n][0], sums[m][n][k]);
            }
            dots[m][n] = simd.reduce_sum_f32s(sums[m][n][0]);
            for i in S::as_simd_f32s(x[m]).0.len() * S::F32_LANES..x[m].len() {
                dots[m][n] += x[m][i] * w[n][i];
            }
        }
    }
    dots
}
