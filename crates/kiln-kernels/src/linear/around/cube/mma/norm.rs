//! The norm before a product: in its launch for up to eight rows, otherwise in one before it, because every
//! warp would compute it anew. x times a power of 2 near the reciprocal of its root mean square is multiplied
//! by the scales of the norm and rounded; what is left is a factor of the results. So float16 neither
//! overflows nor loses small numbers.

use burn::{backend::cubecl::dtype_to_storage_type, tensor::DType};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{Info, Place};
use crate::{
    linear::around::cube::InfoLaunch,
    norm::rms_norm::NormOrder,
    runtime::{
        launch::{LANES, address_type, count, empty, empty_like},
        tensor_cores::{EIGHT, WARP},
    },
};

/// The most rows of x whose norm is in the launch of the product.
pub(crate) const NORMED_ROWS: usize = 8;

/// Rows per workgroup of [`norm_rows`].
const ROWS: usize = 4;

/// The result of [`norm_rows`]: x, and the factors of results.
pub(crate) fn normed(
    x: CubeTensor,
    scales: &CubeTensor,
    norm: NormOrder,
    packed: bool,
    info: InfoLaunch,
) -> (CubeTensor, CubeTensor) {
    let rows = x.meta.shape().num_elements() / scales.meta.shape().num_elements();
    let (y, rests) = (empty_like(&x), empty(&x, [rows], DType::F32));
    norm_rows::launch(
        &x.client.clone(),
        count(rows.div_ceil(ROWS)),
        CubeDim::new_1d(LANES as u32),
        address_type([&x, &y]),
        // Sums of squares have the order of those in the launch of the product.
        if packed { 4 } else { EIGHT },
        x.clone().into_tensor_arg(),
        scales.clone().into_tensor_arg(),
        y.clone().into_tensor_arg(),
        rests.clone().into_tensor_arg(),
        info,
        norm,
        dtype_to_storage_type(x.dtype),
    );
    (y, rests)
}

/// Writes the rows of x, times powers of 2 and the scales of the norm, and the factors that are left. Bits
/// are those of a norm in the launch of the product.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn norm_rows<E: Float, N: Size>(
    x: &Tensor<Vector<E, N>>,
    scales: &Tensor<Vector<E, N>>,
    y: &mut Tensor<Vector<E, N>>,
    rests: &mut Tensor<f32>,
    info: &Info,
    #[comptime] norm: NormOrder,
    #[define(E)] _elem: ElemType,
) {
    let first_row = CUBE_POS * ROWS;
    if first_row >= info.rows {
        terminate!();
    }
    let norm = comptime!(Some(norm));
    let mut norms = Shared::<[f32]>::new_slice(comptime!(len_of(norm, ROWS)));
    write_norms(&mut norms, x, first_row, info, ROWS);
    let lane = UNIT_POS as usize;
    let vectors = info.input / x.vector_size();
    #[unroll]
    for r in 0..ROWS {
        let row = first_row + r;
        if row < info.rows {
            let mut i = lane;
            while i < vectors {
                let at = row * vectors + i;
                y[at] = scaled(x[at], scales[i], norms[r], norm);
                i += LANES;
            }
        }
    }
    if lane < ROWS && first_row + lane < info.rows {
        rests[first_row + lane] = norms[ROWS + lane];
    }
}

/// The memory that [`write_norms`] takes.
pub(super) fn len_of(norm: Option<NormOrder>, most_rows: usize) -> usize {
    if norm.is_some() { 2 * most_rows } else { 1 }
}

/// The powers of 2 of the rows of x that a lane has numbers of.
#[cube]
pub(super) fn powers_of(
    norms: &Shared<[f32]>,
    place: &Place,
    #[comptime] norm: Option<NormOrder>,
    #[comptime] most_rows: usize,
) -> Array<f32> {
    let eights = comptime!(most_rows / 8);
    let mut powers = Array::<f32>::new(eights);
    #[unroll]
    for n in 0..eights {
        powers[n] = 1.0;
        if comptime!(norm.is_some()) {
            powers[n] = norms[comptime!(8 * n) + place.eighth];
        }
    }
    powers
}

/// Numbers of x, times a power of 2 and the scales of the norm.
#[cube]
pub(super) fn scaled<E: Float, N: Size>(
    numbers: Vector<E, N>,
    scales: Vector<E, N>,
    power: f32,
    #[comptime] norm: Option<NormOrder>,
) -> Vector<E, N> {
    if comptime!(norm == Some(NormOrder::ScaleThenCast)) {
        let scales = Vector::<f32, N>::cast_from(scales) + Vector::new(1.0);
        Vector::cast_from(Vector::<f32, N>::cast_from(numbers) * Vector::new(power) * scales)
    } else {
        numbers * Vector::new(E::cast_from(power)) * scales
    }
}

/// Computes the norms of the rows of x of a workgroup: powers of 2, then what is left.
#[cube]
pub(super) fn write_norms<E: Float, N: Size>(
    norms: &mut Shared<[f32]>,
    x: &Tensor<Vector<E, N>>,
    first_row: usize,
    info: &Info,
    #[comptime] most_rows: usize,
) {
    /// Powers that float16 has.
    const LEAST: f32 = 1.0 / 16384.0;
    const MOST: f32 = 16384.0;

    /// Rows that a lane reads at the same time.
    const TOGETHER: usize = 4;

    let warps = comptime!(LANES / WARP);
    let (warp, lane) = (UNIT_POS as usize / WARP, UNIT_POS as usize % WARP);
    let width = x.vector_size();
    let vectors = info.input / width;
    let mut parts = Shared::<[f32]>::new_slice(comptime!(warps * most_rows));
    let mut row = 0usize.runtime();
    while row < most_rows && first_row + row < info.rows {
        let mut sums = Array::<f32>::new(TOGETHER);
        #[unroll]
        for r in 0..TOGETHER {
            sums[r] = 0.0;
        }
        let mut i = UNIT_POS as usize;
        while i < vectors {
            #[unroll]
            for r in 0..TOGETHER {
                let at = min(first_row + row + r, info.rows - 1) * vectors;
                sums[r] += squares_of(x[at + i], width);
            }
            i += LANES;
        }
        #[unroll]
        for r in 0..TOGETHER {
            // Functions of a warp are for the lanes that are there: all, after a barrier.
            sync_plane();
            let sum = plane_sum(sums[r]);
            if lane == 0 {
                parts[(row + r) * warps + warp] = sum;
            }
        }
        row += TOGETHER;
    }
    sync_cube();
    let row = UNIT_POS as usize;
    if row < most_rows {
        let mut sum = f32::new(0.0);
        #[unroll]
        for i in 0..warps {
            sum += parts[row * warps + i];
        }
        let whole = 1.0 / f32::sqrt(sum / f32::cast_from(info.input) + info.eps);
        let power = clamp(f32::reinterpret(u32::reinterpret(whole) & 0x7f80_0000u32), LEAST, MOST);
        norms[row] = power;
        norms[most_rows + row] = whole / power;
    }
    sync_cube();
}

/// The sum of the squares of some numbers.
#[cube]
fn squares_of<E: Float, N: Size>(numbers: Vector<E, N>, #[comptime] width: usize) -> f32 {
    let wide = Vector::<f32, N>::cast_from(numbers);
    let mut sum = wide.extract(0usize) * wide.extract(0usize);
    #[unroll]
    for d in 1..width {
        sum = fma(wide.extract(d), wide.extract(d), sum);
    }
    sum
}
