//! From the bytes of a file to the elements of a tensor.

use burn::tensor::{DType, TensorData};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;

/// Elements converted at a time, so that no second copy of a tensor is ever made.
const BLOCK: usize = 1 << 14;

/// Decodes little-endian `bytes` of type `from` into elements of type `to`.
///
/// # Errors
/// A sentence about a type that cannot be read, or a value that `to` cannot hold.
pub(super) fn convert(bytes: &[u8], from: Dtype, to: DType, shape: Vec<usize>) -> Result<TensorData, String> {
    Ok(match to {
        DType::F32 => TensorData::new(to_f32(bytes, from)?, shape),
        DType::F16 => TensorData::new(to_f16(bytes, from)?, shape),
        DType::BF16 => TensorData::new(to_bf16(bytes, from)?, shape),
        _ => return Err(format!("weights cannot be held as {}", to.name())),
    })
}

fn unreadable(from: Dtype) -> String {
    format!("is stored as {from:?}; F32, F16 and BF16 are read")
}

fn to_f32(bytes: &[u8], from: Dtype) -> Result<Vec<f32>, String> {
    let mut out = Vec::new();
    match from {
        Dtype::F32 => return Ok(bytemuck::pod_collect_to_vec(bytes)),
        Dtype::F16 => blocks::<f16>(bytes, &mut out, |half, out| half.convert_to_f32_slice(out)),
        Dtype::BF16 => blocks::<bf16>(bytes, &mut out, |half, out| half.convert_to_f32_slice(out)),
        _ => return Err(unreadable(from)),
    }
    Ok(out)
}

fn to_f16(bytes: &[u8], from: Dtype) -> Result<Vec<f16>, String> {
    if from == Dtype::F16 {
        return Ok(bytemuck::pod_collect_to_vec(bytes));
    }
    let mut out = vec![f16::ZERO; elements(bytes, from)?];
    for (block, out) in bytes.chunks(BLOCK * from.bitsize() / 8).zip(out.chunks_mut(BLOCK)) {
        let wide = to_f32(block, from)?;
        out.convert_from_f32_slice(&wide);
        if let Some((value, _)) = wide.iter().zip(&*out).find(|(w, h)| w.is_finite() && !h.is_finite()) {
            return Err(format!("holds {value}, beyond float16; load it with --dtype f32"));
        }
    }
    Ok(out)
}

fn to_bf16(bytes: &[u8], from: Dtype) -> Result<Vec<bf16>, String> {
    if from == Dtype::BF16 {
        return Ok(bytemuck::pod_collect_to_vec(bytes));
    }
    let mut out = vec![bf16::ZERO; elements(bytes, from)?];
    for (block, out) in bytes.chunks(BLOCK * from.bitsize() / 8).zip(out.chunks_mut(BLOCK)) {
        out.convert_from_f32_slice(&to_f32(block, from)?);
    }
    Ok(out)
}

fn elements(bytes: &[u8], from: Dtype) -> Result<usize, String> {
    match from {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(bytes.len() / (from.bitsize() / 8)),
        _ => Err(unreadable(from)),
    }
}

fn blocks<T: bytemuck::Pod>(bytes: &[u8], out: &mut Vec<f32>, convert: impl Fn(&[T], &mut [f32])) {
    out.resize(bytes.len() / size_of::<T>(), 0.0);
    for (block, out) in bytes.chunks(BLOCK * size_of::<T>()).zip(out.chunks_mut(BLOCK)) {
        // A file may place a tensor at any byte.
        let aligned: Vec<T> = bytemuck::pod_collect_to_vec(block);
        convert(&aligned, out);
    }
}
