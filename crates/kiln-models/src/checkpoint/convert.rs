//! From the bytes of a file to the elements of a tensor.

use burn::tensor::Element;
use bytemuck::Pod;
use half::{bf16, f16, slice::HalfFloatSliceExt};
use kiln_core::Error;
use safetensors::Dtype;

/// Elements converted at a time, so that no second copy of a tensor is ever made.
const BLOCK: usize = 1 << 16;

/// Fills a buffer with the next bytes of a file.
pub(super) type Source<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<(), Error>;

/// Why numbers could not be had.
pub(super) enum Failed {
    /// The file could not be read.
    Read(Error),
    /// A sentence about a type that is not read, or a value that the wanted type cannot hold.
    Convert(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Read(error)
    }
}

/// What weights are held as.
pub(super) trait Number: Pod + Element {
    /// Decodes as many little-endian numbers of type `from` as there are in `numbers`.
    fn convert(source: Source<'_>, from: Dtype, numbers: &mut [Self]) -> Result<(), Failed>;
}

impl Number for f32 {
    fn convert(source: Source<'_>, from: Dtype, numbers: &mut [Self]) -> Result<(), Failed> {
        match from {
            Dtype::F32 => Ok(source(bytemuck::cast_slice_mut(numbers))?),
            Dtype::F16 => blocks::<f16, _>(source, numbers, |half, out| half.convert_to_f32_slice(out)),
            Dtype::BF16 => blocks::<bf16, _>(source, numbers, |half, out| half.convert_to_f32_slice(out)),
            _ => Err(unreadable(from)),
        }
    }
}

impl Number for f16 {
    fn convert(source: Source<'_>, from: Dtype, numbers: &mut [Self]) -> Result<(), Failed> {
        if from == Dtype::F16 {
            return Ok(source(bytemuck::cast_slice_mut(numbers))?);
        }
        by_way_of_f32(source, from, numbers, |wide, out| {
            out.convert_from_f32_slice(wide);
            match wide.iter().zip(&*out).find(|(w, h)| w.is_finite() && !h.is_finite()) {
                Some((value, _)) => {
                    Err(Failed::Convert(format!("holds {value}, beyond float16; load it as f32 (`dtype`)")))
                }
                None => Ok(()),
            }
        })
    }
}

impl Number for bf16 {
    fn convert(source: Source<'_>, from: Dtype, numbers: &mut [Self]) -> Result<(), Failed> {
        if from == Dtype::BF16 {
            return Ok(source(bytemuck::cast_slice_mut(numbers))?);
        }
        by_way_of_f32(source, from, numbers, |wide, out| {
            out.convert_from_f32_slice(wide);
            Ok(())
        })
    }
}

fn unreadable(from: Dtype) -> Failed {
    Failed::Convert(format!("is stored as {from:?}; F32, F16 and BF16 are read"))
}

fn by_way_of_f32<T>(
    source: Source<'_>,
    from: Dtype,
    numbers: &mut [T],
    convert: impl Fn(&[f32], &mut [T]) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let mut wide = vec![0.0; BLOCK.min(numbers.len())];
    for out in numbers.chunks_mut(BLOCK) {
        let wide = &mut wide[..out.len()];
        f32::convert(source, from, wide)?;
        convert(wide, out)?;
    }
    Ok(())
}

fn blocks<T: Pod, U>(
    source: Source<'_>,
    numbers: &mut [U],
    convert: impl Fn(&[T], &mut [U]),
) -> Result<(), Failed> {
    let mut stored: Vec<T> = bytemuck::zeroed_vec(BLOCK.min(numbers.len()));
    for out in numbers.chunks_mut(BLOCK) {
        let stored = &mut stored[..out.len()];
        source(bytemuck::cast_slice_mut(stored))?;
        convert(stored, out);
    }
    Ok(())
}
