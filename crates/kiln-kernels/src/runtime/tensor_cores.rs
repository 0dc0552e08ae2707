//! Matrices of NVIDIA's tensor cores in `#[cube]` functions: float16 or bfloat16 factors, float32 sums. Texts
//! are for warps of 32 lanes.

use burn::{
    backend::cubecl::dtype_to_storage_type,
    tensor::{DType, Device},
};
use burn_cubecl::{CubeDevice, tensor::CubeTensor};
use cubecl::{
    cmma,
    ir::{DeviceProperties, ElemType, FloatKind, features::MmaConfig},
    prelude::*,
};

#[cfg(feature = "cuda")]
use crate::runtime::device::info::MatrixUnits;
use crate::runtime::device::opened::matrix_units;

/// Rows and columns of a matrix.
pub(crate) const SIZE: usize = 16;

/// Lanes in a warp.
pub(crate) const WARP: usize = 32;

/// Numbers that are written at once.
pub(crate) const EIGHT: usize = 8;

/// Bytes between addresses of memory that matrices may begin at.
#[cfg(feature = "cuda")]
pub(crate) const ALIGNMENT: usize = 32;

pub(crate) type Eight<E> = Vector<E, Const<EIGHT>>;

/// Reads a matrix from memory, whose rows are `pitch` eights apart.
#[cube]
pub(crate) fn matrix<E: Float>(
    memory: &Shared<[Eight<E>]>,
    from: usize,
    #[comptime] pitch: usize,
    #[comptime] ident: cmma::MatrixIdent,
    #[comptime] layout: cmma::MatrixLayout,
) -> cmma::Matrix<Eight<E>> {
    let to = from + comptime!((SIZE - 1) * pitch + SIZE / EIGHT);
    let stride = comptime!((pitch * EIGHT) as u32);
    cmma::Matrix::from_slice(ident, SIZE, SIZE, SIZE, layout, memory.slice(from, to), stride)
}

/// A matrix of sums that are 0.
#[cube]
pub(crate) fn zeros() -> cmma::Matrix<f32> {
    let (ident, layout) = comptime!((cmma::MatrixIdent::Accumulator, cmma::MatrixLayout::Undefined));
    cmma::Matrix::<f32>::from_value(ident, SIZE, SIZE, SIZE, layout, 0.0)
}

/// Whether `kernel` multiplies matrices of type `dtype` on `device`, which was opened by
/// [`open`](fn@crate::device::open). `tensor` is any tensor on it.
pub(crate) fn multiplies(kernel: &str, tensor: &CubeTensor, dtype: DType, device: &Device) -> bool {
    matches!(tensor.device, CubeDevice::Cuda(_))
        && matrix_units(device, kernel).is_some()
        && can_multiply(dtype, tensor.client.properties())
}

fn can_multiply(dtype: DType, properties: &DeviceProperties) -> bool {
    let (elem, sums) = (dtype_to_storage_type(dtype), ElemType::Float(FloatKind::F32));
    let [m, n, k] = [SIZE as u32; 3];
    let units = MmaConfig { a_type: elem, b_type: elem, cd_type: sums, m, n, k };
    properties.features.matmul.cmma.contains(&units)
}

/// Numbers along the sum in an instruction of a warp (`mma.sync`) for 16 by 8 results, if there is one: 16,
/// or 8 on devices of compute capability 7.5.
pub(crate) fn depth_of_products(dtype: DType, properties: &DeviceProperties) -> Option<usize> {
    let (elem, sums) = (dtype_to_storage_type(dtype), ElemType::Float(FloatKind::F32));
    let units = |k| MmaConfig { a_type: elem, b_type: elem, cd_type: sums, m: 16, n: 8, k };
    [16, 8].into_iter().find(|k| properties.features.matmul.mma.contains(&units(*k))).map(|k| k as usize)
}

/// The tensor cores of a device with these properties, if there are any.
#[cfg(feature = "cuda")]
pub(crate) fn units_of(properties: &DeviceProperties) -> Option<MatrixUnits> {
    let units =
        MatrixUnits { height: SIZE as u32, size: SIZE as u32, threads: WARP as u32, beside_lanes: true };
    can_multiply(DType::F16, properties).then_some(units)
}
