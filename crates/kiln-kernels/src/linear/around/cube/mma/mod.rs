//! Products of 1 to 64 rows on NVIDIA's tensor cores. They take 16-bit factors and add up in float32. A
//! column of a product does not depend on the others, so that results are the same for any number of rows.
//!
//! A warp has 32 rows of the weight: two matrices of 16. Lane 4 e + q has numbers of the rows e, e + 8,
//! e + 16 and e + 24, and of the rows e, e + 8, .. of x: the same ones along the sum. Which these are is up
//! to [`packed`] and [`dense`].

mod dense;
mod norm;
mod packed;

use burn::tensor::{DType, Device};
use burn_cubecl::tensor::CubeTensor;
use cubecl::{cmma::MmaDefinition, prelude::*};

pub(super) use self::{
    dense::linear_mma,
    norm::{NORMED_ROWS, normed},
    packed::{Codes, linear_packed_mma},
};
use super::{
    Info, Product,
    results::{Partial, write_rows},
    row_at,
};
use crate::{
    linear::{around::Sharing, matrix::Matrix},
    runtime::{
        launch::{LANES, comes_in, enough, primitive},
        tensor_cores::{EIGHT, WARP, depth_of_products, multiplies},
    },
};

/// Rows of the weight per warp, and of those the ones that a lane has numbers of.
const OWN: usize = 32;
const OF_LANE: usize = OWN / 8;

/// Lanes that share a row.
const QUARTERS: usize = 4;

type Two<E> = Vector<E, Const<2>>;

/// The compile-time parameters of the kernels beside [`Product`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    /// Numbers along the sum in an instruction: 16, or 8 on devices of compute capability 7.5
    depth: usize,
    /// Whether x is bfloat16
    brain: bool,
    /// Whether a row has a whole number of turns
    whole: bool,
    /// Whether x comes from [`normed`], so that results have factors
    normed_before: bool,
}

impl Tile {
    /// The parameters for what [`normed`] returns.
    pub(super) fn after_norm(self) -> Self {
        Self { normed_before: true, ..self }
    }

    /// Names all parameters.
    fn permutation(self, product: Product) -> String {
        let part = if self.whole { "" } else { "-part" };
        let depth = if self.depth == 16 { "" } else { "-depth_8" };
        let before = if self.normed_before { "-normed_before" } else { "" };
        format!("{}{before}{part}{depth}", product.permutation())
    }
}

/// The most rows of x that the kernels are for. With more, packed weights are unpacked to memory, and
/// products are cubek's. No GPU was there to measure it.
pub(crate) const MOST_ROWS: usize = 64;

/// The instructions for the product of vectors and a weight of their type in `kernel`, if the device has
/// tensor cores for that type, and the weight has a layout that lanes can read.
pub(crate) fn tile_for(kernel: &str, weight: &Matrix) -> Option<Tile> {
    let dtype = weight.dtype();
    if dtype == DType::F32 {
        return None;
    }
    let (on_device, numbers) = match weight {
        Matrix::Dense(numbers) => {
            let numbers = primitive(numbers.clone());
            comes_in(EIGHT, &numbers).then_some((numbers, dense::TURN))?
        }
        Matrix::Packed(matrix) => (primitive(matrix.words.clone()), packed::turn_of(matrix.format())?),
    };
    let depth = depth_for(kernel, &on_device, dtype, &weight.device())?;
    let whole = weight.columns().is_multiple_of(numbers);
    Some(Tile { depth, brain: dtype == DType::BF16, whole, normed_before: false })
}

fn depth_for(kernel: &str, on_device: &CubeTensor, dtype: DType, device: &Device) -> Option<usize> {
    multiplies(kernel, on_device, dtype, device)
        .then(|| depth_of_products(dtype, on_device.client.properties()))
        .flatten()
}

/// Whether `kernel` has instructions for up to [`MOST_ROWS`] vectors `[rows, tokens, in]` of type `dtype` and
/// a weight that is packed, or dense without gaps.
pub(crate) fn has_tiles(
    kernel: &str,
    [rows, tokens, input]: [usize; 3],
    is_packed: bool,
    dtype: DType,
    device: &Device,
) -> bool {
    let on_device = || primitive(burn::tensor::Tensor::<1>::zeros([1], (device, dtype)));
    rows * tokens <= MOST_ROWS
        && (is_packed || input.is_multiple_of(EIGHT))
        && dtype != DType::F32
        && depth_for(kernel, &on_device(), dtype, device).is_some()
}

impl Sharing {
    /// The division of work for `rows` rows of x and a weight `[places, input]`.
    pub(super) fn by_mma(rows: usize, [places, input]: [usize; 2], device: &Device) -> Self {
        /// Warps that keep a GPU busy. No GPU was there to measure it.
        const WARPS: usize = 2048;
        /// The fewest numbers of a row that are worth a warp.
        const NUMBERS: usize = 128;
        /// The most rows of x that there are registers for.
        const MOST: usize = 32;

        let most = (input / NUMBERS).min(enough(device, WARPS) / places.div_ceil(OWN));
        let splits = 1 << most.clamp(1, LANES / WARP).ilog2();
        let together = rows.next_power_of_two().clamp(8, MOST);
        let workgroups = places.div_ceil(outputs_of(splits)) * rows.div_ceil(together);
        Self { splits, together, workgroups }
    }
}

/// Rows of the weight per workgroup.
fn outputs_of(splits: usize) -> usize {
    LANES / WARP / splits * OWN
}

/// The first rows of a workgroup, and the place of a lane in it.
#[derive(CubeType)]
struct Place {
    first_row: usize,
    first_output: usize,
    warp: usize,
    /// Which eighth of a warp, and which lane of it
    eighth: usize,
    quarter: usize,
}

#[cube]
fn place_of(info: &Info, #[comptime] product: Product) -> Place {
    let workgroup = CUBE_POS;
    let (warp, lane) = (UNIT_POS as usize / WARP, UNIT_POS as usize % WARP);
    let tiles = info.rows.div_ceil(product.most_rows);
    Place {
        first_row: workgroup % tiles * product.most_rows,
        first_output: workgroup / tiles * comptime!(outputs_of(product.splits)),
        warp,
        eighth: lane / QUARTERS,
        quarter: lane % QUARTERS,
    }
}

/// The first elements of the rows of the weight that a lane has numbers of. They are `stride` elements apart.
#[cube]
fn begins_of(place: &Place, info: &Info, stride: usize, #[comptime] product: Product) -> Array<usize> {
    let first = place.first_output + place.warp / product.splits * OWN;
    let mut begins = Array::<usize>::new(OF_LANE);
    #[unroll]
    for i in 0..OF_LANE {
        // Indices past the last row read the last one.
        let own = row_at(first + comptime!(8 * i) + place.eighth, info, comptime!(product.kind));
        begins[i] = min(own, info.output - 1) * stride;
    }
    begins
}

/// Element `own` of each row of x that a lane has numbers of. The rows are `stride` elements apart.
#[cube]
fn vectors_of(
    place: &Place,
    info: &Info,
    stride: usize,
    own: usize,
    #[comptime] product: Product,
) -> Array<usize> {
    let eights = comptime!(product.most_rows / 8);
    let mut vectors = Array::<usize>::new(eights);
    #[unroll]
    for n in 0..eights {
        let row = place.first_row + comptime!(8 * n) + place.eighth;
        vectors[n] = min(row, info.rows - 1) * stride + own;
    }
    vectors
}

/// Sums that are 0: for each matrix of the weight, and for each eight rows of x, those of two rows of the
/// weight.
#[cube]
fn no_sums_of_warp(#[comptime] product: Product) -> Array<Two<f32>> {
    let many = comptime!(OF_LANE * product.most_rows / 8);
    let mut sums = Array::<Two<f32>>::new(many);
    #[unroll]
    for i in 0..many {
        sums[i] = Two::<f32>::new(0.0);
    }
    sums
}

/// `sums + a b`, along 16 numbers: for the rows e and e + 8 of `a`, and two columns of `b`.
#[cube]
fn multiply<E: Float>(
    a: &Array<Two<E>>,
    b: &Array<Two<E>>,
    sums: &Array<Two<f32>>,
    #[comptime] tile: Tile,
) -> Array<Two<f32>> {
    let product = MmaDefinition::<E, E, f32>::new(16usize, 8usize, comptime!(tile.depth));
    if comptime!(tile.depth == 16) {
        product.execute(a, b, sums)
    } else {
        let (mut first, mut second) = (Array::<Two<E>>::new(2usize), Array::<Two<E>>::new(2usize));
        let (mut of_first, mut of_second) = (Array::<Two<E>>::new(1usize), Array::<Two<E>>::new(1usize));
        #[unroll]
        for i in 0..2usize {
            first[i] = a[i];
            second[i] = a[comptime!(i + 2)];
        }
        of_first[0] = b[0];
        of_second[0] = b[1];
        let sums = product.execute(&first, &of_first, sums);
        product.execute(&second, &of_second, &sums)
    }
}

/// Writes the results of the workgroup. `memory` has room for 8 rows of them.
#[cube]
#[allow(clippy::too_many_arguments, reason = "a launch has no fewer")]
fn write_results<E: Float>(
    memory: &mut Shared<[f32]>,
    sums: &Array<Two<f32>>,
    norms: &Shared<[f32]>,
    rests: &Tensor<f32>,
    bias: &Tensor<E>,
    residual: &Tensor<E>,
    y: &mut Tensor<E>,
    cosines: &Tensor<f32>,
    sines: &Tensor<f32>,
    place: &Place,
    info: &Info,
    #[comptime] product: Product,
    #[comptime] tile: Tile,
) {
    let (eights, splits) = comptime!((product.most_rows / 8, product.splits));
    let partial = comptime!(Partial { left: splits, outputs: outputs_of(splits) });
    #[unroll]
    for n in 0..eights {
        // All lanes have read the memory.
        sync_cube();
        #[unroll]
        for i in 0..OF_LANE {
            let pair = sums[comptime!(i / 2 * 2 * eights + 2 * n + i % 2)];
            let output = place.warp / splits * OWN + comptime!(8 * i) + place.eighth;
            #[unroll]
            for j in 0..2usize {
                let row = 2 * place.quarter + j;
                let mut sum = pair.extract(j);
                if comptime!(product.norm.is_some()) {
                    sum *= norms[comptime!(product.most_rows + 8 * n) + row];
                } else if comptime!(tile.normed_before) {
                    sum *= rests[min(place.first_row + comptime!(8 * n) + row, info.rows - 1)];
                }
                let four = (row * comptime!(partial.outputs) + output) / 4 * splits + place.warp % splits;
                memory[four * 4 + output % 4] = sum;
            }
        }
        sync_cube();
        write_rows::<E>(
            &*memory,
            bias,
            residual,
            y,
            cosines,
            sines,
            info,
            place.first_row + comptime!(8 * n),
            place.first_output,
            8usize,
            partial,
            product,
        );
    }
}
