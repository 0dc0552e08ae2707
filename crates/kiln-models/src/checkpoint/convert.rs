//! From the bytes of a file to the elements of a tensor.

use burn::tensor::Element;
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use safetensors::Dtype;

/// Elements converted at a time, so that no second copy of a tensor is ever made.
const BLOCK: usize = 1 << 14;

/// What weights are held as.
pub(super) trait Number: Pod + Element {
    /// Decodes little-endian `bytes` of type `from` into `numbers`, which are as many.
    ///
    /// # Errors
    /// A sentence about a type that cannot be read, or a value that this one cannot hold.
    fn convert(bytes: &[u8], from: Dtype, numbers: &mut [Self]) -> Result<(), String>;
}

impl Number for f32 {
    fn convert(bytes: &[u8], from: Dtype, numbers: &mut [Self]) -> Result<(), String> {
        match from {
            Dtype::F32 => copy(bytes, numbers),
            Dtype::F16 => blocks::<f16, _>(bytes, numbers, |half, out| half.convert_to_f32_slice(out)),
            Dtype::BF16 => blocks::<bf16, _>(bytes, numbers, |half, out| half.convert_to_f32_slice(out)),
            _ => return Err(unreadable(from)),
        }
        Ok(())
    }
}

impl Number for f16 {
    fn convert(bytes: &[u8], from: Dtype, numbers: &mut [Self]) -> Result<(), String> {
        if from == Dtype::F16 {
            copy(bytes, numbers);
            return Ok(());
        }
        by_way_of_f32(bytes, from, numbers, |wide, out| {
            out.convert_from_f32_slice(wide);
            match wide.iter().zip(&*out).find(|(w, h)| w.is_finite() && !h.is_finite()) {
                Some((value, _)) => Err(format!("holds {value}, beyond float16; load it with --dtype f32")),
                None => Ok(()),
            }
        })
    }
}

impl Number for bf16 {
    fn convert(bytes: &[u8], from: Dtype, numbers: &mut [Self]) -> Result<(), String> {
        if from == Dtype::BF16 {
            copy(bytes, numbers);
            return Ok(());
        }
        by_way_of_f32(bytes, from, numbers, |wide, out| {
            out.convert_from_f32_slice(wide);
            Ok(())
        })
    }
}

fn unreadable(from: Dtype) -> String {
    format!("is stored as {from:?}; F32, F16 and BF16 are read")
}

/// What is stored as it is held.
fn copy<T: Pod>(bytes: &[u8], numbers: &mut [T]) {
    bytemuck::cast_slice_mut(numbers).copy_from_slice(bytes);
}

fn by_way_of_f32<T>(
    bytes: &[u8],
    from: Dtype,
    numbers: &mut [T],
    convert: impl Fn(&[f32], &mut [T]) -> Result<(), String>,
) -> Result<(), String> {
    let mut wide = vec![0.0; BLOCK.min(numbers.len())];
    for (block, out) in bytes.chunks(BLOCK * from.bitsize() / 8).zip(numbers.chunks_mut(BLOCK)) {
        let wide = &mut wide[..out.len()];
        f32::convert(block, from, wide)?;
        convert(wide, out)?;
    }
    Ok(())
}

fn blocks<T: Pod, U>(bytes: &[u8], numbers: &mut [U], convert: impl Fn(&[T], &mut [U])) {
    for (block, out) in bytes.chunks(BLOCK * size_of::<T>()).zip(numbers.chunks_mut(BLOCK)) {
        // A file may place a tensor at any byte.
        let aligned: Vec<T> = bytemuck::pod_collect_to_vec(block);
        convert(&aligned, out);
    }
}
