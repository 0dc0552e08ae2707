//! The `#[cube]` function for packed weights, on CUDA: factors of 16 bits, float32 sums. A warp unpacks a run
//! of some rows of the weight, and multiplies it. Each warp of a workgroup takes other runs.

use burn::backend::{Cube, cubecl::dtype_to_storage_type};
use cubecl::{cmma, prelude::*};

use crate::{
    linear::{
        Linear, are_of_one_type,
        matrix::Matrix,
        packed_reader::{ONE, Reading, read_four, read_group, read_run, write_table},
    },
    runtime::{
        kernel::Kernel,
        launch::{address_type, count, empty, in_order, in_rows, primitive, write_permutation},
        tensor_cores::{ALIGNMENT, EIGHT, Eight, SIZE, WARP, matrix, multiplies, zeros},
    },
};

/// With more rows, the weight is unpacked to memory. No GPU was there to measure it.
const MOST_ROWS: usize = 64;

/// Rows of x per workgroup.
const ROWS: usize = 32;

/// Numbers in a run.
const RUN: usize = 32;

/// Distance of two rows in memory, in eights. With one eight between them, matrices are read without
/// conflicts of banks.
const PITCH: usize = RUN / EIGHT + 1;

/// The compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tile {
    warps: usize,
    /// Rows of the weight per workgroup.
    outputs: usize,
    biased: bool,
    added: bool,
}

impl Tile {
    /// The tile for `output` rows of a weight, however many rows x has.
    fn new(output: usize, biased: bool, added: bool) -> Self {
        /// Workgroups that keep a GPU busy. No GPU was there to measure it.
        const BUSY: usize = 128;

        let (warps, outputs) = if output.div_ceil(64) < BUSY { (8, 32) } else { (4, 64) };
        Self { warps, outputs, biased, added }
    }

    /// Names the parameters.
    fn permutation(self) -> String {
        let bias = if self.biased { "-biased" } else { "" };
        let residual = if self.added { "-added" } else { "" };
        format!("{}{bias}{residual}", self.outputs)
    }
}

/// Parameters that are the same for all workgroups.
#[derive(CubeType, CubeLaunch)]
struct Info {
    input: usize,
    output: usize,
    rows: usize,
    workgroups: usize,
    /// [`ONE`]
    one: u32,
}

#[cube(launch, address_type = "dynamic")]
fn linear_tiles_packed<E: Float>(
    x: &Tensor<Eight<E>>,
    w: &Tensor<u32>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    info: &Info,
    #[comptime] tile: Tile,
    #[comptime] reading: Reading,
    #[define(E)] _elem: ElemType,
) {
    write_permutation(comptime!(format!("{}-{}", reading.format.name(), tile.permutation())));
    let workgroup = CUBE_POS;
    if workgroup >= info.workgroups {
        terminate!();
    }
    let (warps, outputs) = comptime!((tile.warps, tile.outputs));
    let (down, across) = comptime!((ROWS / SIZE, outputs / SIZE));
    let (warp, lane) = (UNIT_POS as usize / WARP, UNIT_POS as usize % WARP);
    // Neighbours read the same rows of the weight.
    let tiles = info.rows.div_ceil(ROWS);
    let first_row = workgroup % tiles * ROWS;
    let first_output = workgroup / tiles * outputs;
    let mut xs = Shared::<[Eight<E>]>::new_aligned_slice(comptime!(warps * ROWS * PITCH), ALIGNMENT);
    let mut ws = Shared::<[Eight<E>]>::new_aligned_slice(comptime!(warps * outputs * PITCH), ALIGNMENT);
    let mut table = Shared::<[f32]>::new_slice(16usize);
    write_table(&mut table, reading);
    let (own_xs, own_ws) = (warp * comptime!(ROWS * PITCH), warp * comptime!(outputs * PITCH));
    let mut sums = Sequence::<cmma::Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(down * across) {
        sums.push(zeros());
    }
    // Indices past the last row read the last one.
    let row = min(first_row + lane, info.rows - 1) * (info.input / EIGHT);
    let runs = info.input / RUN;
    let mut run = warp;
    while run < runs {
        #[unroll]
        for eight in 0..comptime!(RUN / EIGHT) {
            xs[own_xs + lane * PITCH + eight] = x[row + run * comptime!(RUN / EIGHT) + eight];
        }
        #[unroll]
        for part in 0..comptime!(outputs / WARP) {
            let of_tile = part * WARP + lane;
            let begin = min(first_output + of_tile, info.output - 1) * w.stride(0);
            unpack_run::<E>(&mut ws, own_ws + of_tile * PITCH, w, begin, run, &table, info, reading);
        }
        sync_plane();
        #[unroll]
        for step in 0..comptime!(RUN / SIZE) {
            let mut rows = Sequence::<cmma::Matrix<Eight<E>>>::new();
            #[unroll]
            for i in 0..down {
                let from = own_xs + comptime!(i * SIZE * PITCH + step * (SIZE / EIGHT));
                rows.push(matrix::<E>(&xs, from, PITCH, cmma::MatrixIdent::A, cmma::MatrixLayout::RowMajor));
            }
            #[unroll]
            for j in 0..across {
                let from = own_ws + comptime!(j * SIZE * PITCH + step * (SIZE / EIGHT));
                let columns =
                    matrix::<E>(&ws, from, PITCH, cmma::MatrixIdent::B, cmma::MatrixLayout::ColMajor);
                #[unroll]
                for i in 0..down {
                    let sum = &sums[comptime!(i * across + j)];
                    cmma::execute(&rows[i], &columns, sum, sum);
                }
            }
        }
        // The next run takes the same memory.
        sync_plane();
        run += warps;
    }
    let mut parts = Shared::<[f32]>::new_aligned_slice(comptime!(warps * SIZE * SIZE), ALIGNMENT);
    #[unroll]
    for i in 0..down {
        #[unroll]
        for j in 0..across {
            let from = warp * comptime!(SIZE * SIZE);
            cmma::store(
                parts.slice_mut(from, from + comptime!(SIZE * SIZE)),
                &sums[comptime!(i * across + j)],
                SIZE as u32,
                cmma::MatrixLayout::RowMajor,
            );
            sync_cube();
            let mut place = UNIT_POS as usize;
            while place < comptime!(SIZE * SIZE) {
                let row = first_row + comptime!(i * SIZE) + place / SIZE;
                let out = first_output + comptime!(j * SIZE) + place % SIZE;
                if row < info.rows && out < info.output {
                    let mut sum = f32::new(0.0);
                    #[unroll]
                    for of_warp in 0..warps {
                        sum += parts[comptime!(of_warp * SIZE * SIZE) + place];
                    }
                    if comptime!(tile.biased) {
                        sum += f32::cast_from(bias[out]);
                    }
                    if comptime!(tile.added) {
                        sum += f32::cast_from(residual[row * info.output + out]);
                    }
                    y[row * info.output + out] = E::cast_from(sum);
                }
                place += comptime!(warps * WARP);
            }
            sync_cube();
        }
    }
}

/// Unpacks a run of a row of the weight, into memory from `to` on.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
fn unpack_run<E: Float>(
    memory: &mut Shared<[Eight<E>]>,
    to: usize,
    w: &Tensor<u32>,
    begin: usize,
    run: usize,
    table: &Shared<[f32]>,
    info: &Info,
    #[comptime] reading: Reading,
) {
    let mut factors = Array::<f32>::new(2usize);
    let mut shifts = Array::<f32>::new(2usize);
    #[unroll]
    for pair in 0..2usize {
        let group = read_group(w, begin, 2 * run, pair, info.input, reading);
        let factor = group.scale * comptime!(reading.steps());
        factors[pair] = factor;
        shifts[pair] = fma(factor, -group.zero, group.minimum);
    }
    let mut words = Sequence::<Array<u32>>::new();
    read_run(&mut words, w, begin, run, info.input, reading);
    #[unroll]
    for half in 0..2usize {
        #[unroll]
        for pair in 0..2usize {
            let mut numbers = Eight::<E>::new(E::from_int(0));
            #[unroll]
            for four in 0..2usize {
                let codes = read_four(&words[half], table, pair, four, info.one, reading);
                #[unroll]
                for i in 0..4usize {
                    let number = fma(codes.extract(i), factors[pair], shifts[pair]);
                    numbers.insert(comptime!(4 * four + i), E::cast_from(number));
                }
            }
            memory[to + comptime!(2 * pair + half)] = numbers;
        }
    }
}

/// Whether x has up to 64 rows, the weight is packed, and the device multiplies matrices of the type. The
/// text is for NVIDIA's GPUs, whose warps have 32 lanes.
pub(in crate::linear) fn takes(linear: &Linear) -> bool {
    let [batch, tokens, input] = linear.x.dims();
    batch * tokens <= MOST_ROWS
        && matches!(linear.weight, Matrix::Packed(_))
        && input.is_multiple_of(RUN)
        && are_of_one_type(&linear.x, &linear.weight, linear.others())
        && multiplies(Linear::NAME, &primitive(linear.x.clone()), &linear.x.device())
}

/// Computes the product, if [`takes`] says so.
///
/// # Errors
/// Returns the inputs if the weight is not packed.
#[allow(clippy::result_large_err, reason = "as in `Kernel`")]
pub(in crate::linear) fn launch(linear: Linear) -> Result<burn::tensor::Tensor<3>, Linear> {
    let ([batch, tokens, input], output) = (linear.x.dims(), linear.weight.rows());
    let Matrix::Packed(matrix) = &linear.weight else { return Err(linear) };
    let matrix = matrix.clone();
    let Linear { x, bias, residual, .. } = linear;
    let (rows, elem) = (batch * tokens, dtype_to_storage_type(x.dtype()));
    let tile = Tile::new(output, bias.is_some(), residual.is_some());
    let workgroups = rows.div_ceil(ROWS) * output.div_ceil(tile.outputs);
    let (x, format) = (in_order(x), matrix.format());
    let words = in_rows(matrix.words);
    let bias = bias.map_or_else(|| empty(&x, [1], x.dtype), in_order);
    let residual = residual.map_or_else(|| empty(&x, [1, 1, 1], x.dtype), in_order);
    let y = empty(&x, [batch, tokens, output], x.dtype);
    let reading = Reading::new(format, &words, true);
    linear_tiles_packed::launch(
        &y.client.clone(),
        count(workgroups),
        CubeDim::new_1d((tile.warps * WARP) as u32),
        address_type([&x, &words, &bias, &residual, &y]),
        x.into_tensor_arg(),
        words.into_tensor_arg(),
        bias.into_tensor_arg(),
        residual.into_tensor_arg(),
        y.clone().into_tensor_arg(),
        InfoLaunch::new(input, output, rows, workgroups, ONE),
        tile,
        reading,
        elem,
    );
    Ok(burn::tensor::Tensor::from_primitive::<Cube>(y))
}
