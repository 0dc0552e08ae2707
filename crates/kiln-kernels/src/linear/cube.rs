//! The `#[cube]` function, which takes the steps of the shader.

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use cubecl::prelude::*;

use super::{Linear, Sharing};
use crate::{
    Matrix,
    launch::{LANES, address_type, comes_in_fours, count, empty, primitive},
};

/// As `vec4<f32>` of WGSL.
pub(crate) type Four = Vector<f32, Const<4>>;

/// Four numbers of a row of that many, those from 4 c on. What is beyond its end is 0, where fours do not end with it.
#[cube]
pub(crate) fn four<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let width = tensor.vector_size();
    if comptime!(width == 4) {
        Four::cast_from(tensor[at / 4 + c])
    } else {
        let mut numbers = Four::new(0.0);
        #[unroll]
        for i in 0..4usize {
            if 4 * c + i < len {
                numbers.insert(i, f32::cast_from(tensor[at + (4 * c + i) * stride]));
            }
        }
        numbers
    }
}

/// [`four`], also where 4 c is beyond the end of the row.
#[cube]
pub(crate) fn four_or_zero<E: Float, N: Size>(
    tensor: &Tensor<Vector<E, N>>,
    at: usize,
    c: usize,
    stride: usize,
    len: usize,
) -> Four {
    let mut numbers = Four::new(0.0);
    if 4 * c < len {
        numbers = four::<E, N>(tensor, at, c, stride, len);
    }
    numbers
}

/// Adds up, for each of `at_once` rows of x, the four sums of every `together` lanes. What is left of them follows each other in `sums`.
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

/// What was added up for the output of that number of the workgroup, in the row of that number.
#[cube]
pub(crate) fn added_up(sums: &Shared<[f32]>, row: usize, output: usize, #[comptime] together: usize) -> f32 {
    let left = comptime!(together / first_added(together));
    let outputs = comptime!(LANES / together * 4);
    let first = (row * outputs + output) / 4 * left;
    let mut sum = f32::new(0.0);
    for j in 0..left {
        // Outputs begin at different lanes, which are in different banks.
        sum += sums[(first + (j + output / 4) % left) * 4 + output % 4];
    }
    sum
}

/// `Σ a b`. Which products are joined with a sum is said here: compilers choose, and may choose another one in a kernel for
/// more rows.
#[cube]
pub(crate) fn dot(a: Four, b: Four) -> f32 {
    let mut sum = a.extract(0usize) * b.extract(0usize);
    #[unroll]
    for d in 1..4usize {
        sum = fma(a.extract(d), b.extract(d), sum);
    }
    sum
}

/// Lanes of `together` whose sums are added up first.
pub(crate) fn first_added(together: usize) -> usize {
    if together > 16 { 16 } else { 1 }
}

#[cube(launch, address_type = "dynamic")]
fn linear<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    w: &Tensor<Vector<E, N>>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    tokens: usize,
    input: usize,
    output: usize,
    rows: usize,
    workgroups: usize,
    #[comptime] most_rows: usize,
    #[comptime] splits: usize,
    #[comptime] biased: bool,
    #[comptime] added: bool,
    #[define(E)] _elem: ElemType,
) {
    let workgroup = CUBE_POS;
    if workgroup >= workgroups {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let together = comptime!(8 * splits);
    let outputs = comptime!(LANES / (8 * splits) * 4);
    let tiles = rows.div_ceil(most_rows);
    let first_row = workgroup % tiles * most_rows;
    let first_output = workgroup / tiles * outputs;
    let first = first_output + lane / together * 4;
    let mut products = Array::<Four>::new(most_rows);
    #[unroll]
    for r in 0..most_rows {
        products[r] = Four::new(0.0);
    }
    let columns = input.div_ceil(4);
    let mut c = lane % together * 2;
    while c < columns {
        let mut weights = Array::<Four>::new(8usize);
        #[unroll]
        for i in 0..4usize {
            // Those beyond the last are the last.
            let own = min(first + i, output - 1);
            weights[i] = four::<E, N>(w, own * w.stride(0), c, w.stride(1), input);
            weights[i + 4] = four_or_zero::<E, N>(w, own * w.stride(0), c + 1, w.stride(1), input);
        }
        #[unroll]
        for r in 0..most_rows {
            let row = min(first_row + r, rows - 1);
            let at = row / tokens * x.stride(0) + row % tokens * x.stride(1);
            let numbers = four::<E, N>(x, at, c, x.stride(2), input);
            let next = four_or_zero::<E, N>(x, at, c + 1, x.stride(2), input);
            let mut sums = products[r];
            #[unroll]
            for i in 0..4usize {
                sums.insert(i, sums.extract(i) + dot(numbers, weights[i]) + dot(next, weights[i + 4]));
            }
            products[r] = sums;
        }
        c += comptime!(2 * together);
    }
    // Rows whose sums are in memory together.
    let at_once = comptime!(if most_rows < 4 { most_rows } else { 4 });
    let mut sums = Shared::<[f32]>::new_slice(comptime!(4 * LANES * at_once));
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
        let mut i = lane;
        while i < outputs * at_once {
            let row = first_row + from * at_once + i / outputs;
            let out = first_output + i % outputs;
            if row < rows && out < output {
                let mut sum = added_up(&sums, i / outputs, i % outputs, together);
                if comptime!(biased) {
                    sum += f32::cast_from(bias[out * bias.stride(0)]);
                }
                if comptime!(added) {
                    let at = row / tokens * residual.stride(0) + row % tokens * residual.stride(1);
                    sum += f32::cast_from(residual[at + out * residual.stride(2)]);
                }
                y[row * output + out] = E::cast_from(sum);
            }
            i += LANES;
        }
        if comptime!(most_rows > at_once) {
            // All lanes have read what was there.
            sync_cube();
        }
    }
}

pub(super) fn launch(
    Linear { x, weight: Matrix::Dense(weight), bias, residual }: Linear,
) -> burn::tensor::Tensor<3> {
    let ([batch, tokens, input], [output, _]) = (x.dims(), weight.dims());
    let rows = batch * tokens;
    let (biased, added) = (bias.is_some(), residual.is_some());
    let Sharing { splits, together, workgroups } = Sharing::new(rows, input, output, &x.device());
    let (x, weight) = (primitive(x), primitive(weight));
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), primitive);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), primitive);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let elem = dtype_to_storage_type(x.dtype);
    let fours = comes_in_fours(&x) && comes_in_fours(&weight);
    linear::launch(
        &y.client,
        count(workgroups),
        CubeDim::new_1d(LANES as u32),
        address_type([&x, &weight, &bias, &residual, &y]),
        if fours { 4 } else { 1 },
        x.into_tensor_arg(),
        weight.into_tensor_arg(),
        bias.into_tensor_arg(),
        residual.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        tokens,
        input,
        output,
        rows,
        workgroups,
        together,
        splits,
        biased,
        added,
        elem,
    );
    burn::tensor::Tensor::from_primitive::<Cube>(y)
}
