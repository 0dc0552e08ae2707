//! Formats whose blocks are single numbers: float32, float16 and bfloat16.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::formats::{Block, Fields, Layout};
use crate::streams::Parts;

pub(crate) static F32: Layout = Layout { largest: None, ..Layout::of::<f32, _, _>("f32", 0, None) };
pub(crate) static F16: Layout = Layout {
    name: "f16",
    ggml_type: Some(1),
    block: 1,
    block_bytes: 2,
    largest: None,
    unpack: unpack_f16,
    pack: pack_f16,
    streams: None,
    arrange: |_, _, _, _| {},
};
pub(crate) static BF16: Layout = Layout { largest: None, ..Layout::of::<bf16, _, _>("bf16", 30, None) };

impl Fields<4> for f32 {
    fn read(bytes: &[u8; 4]) -> Self {
        Self::from_le_bytes(*bytes)
    }

    fn write(&self, bytes: &mut [u8; 4]) {
        *bytes = self.to_le_bytes();
    }
}

impl Block<1, 4> for f32 {
    fn unpack(&self, numbers: &mut [f32; 1]) {
        *numbers = [*self];
    }

    fn pack(numbers: &[f32; 1]) -> Self {
        numbers[0]
    }

    fn parts(&self) -> Parts<1> {
        Parts::default()
    }
}

/// Number of float16 to convert at once. Most processors have instructions for several at a time, and each
/// call has overhead.
const AT_ONCE: usize = 64;

fn unpack_f16(bytes: &[u8], numbers: &mut [f32]) {
    let mut halves = [f16::ZERO; AT_ONCE];
    for (bytes, numbers) in bytes.chunks(2 * AT_ONCE).zip(numbers.chunks_mut(AT_ONCE)) {
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        let mut wide = [0.0; AT_ONCE];
        halves.convert_to_f32_slice(&mut wide);
        for (number, wide) in numbers.iter_mut().zip(wide) {
            *number = wide;
        }
    }
}

fn pack_f16(numbers: &[f32], bytes: &mut [u8]) {
    let mut wide = [0.0; AT_ONCE];
    for (numbers, bytes) in numbers.chunks(AT_ONCE).zip(bytes.chunks_mut(2 * AT_ONCE)) {
        for (wide, number) in wide.iter_mut().zip(numbers) {
            *wide = *number;
        }
        let mut halves = [f16::ZERO; AT_ONCE];
        halves.convert_from_f32_slice(&wide);
        for (bytes, half) in bytes.as_chunks_mut().0.iter_mut().zip(halves) {
            *bytes = half.to_le_bytes();
        }
    }
}

impl Fields<2> for bf16 {
    fn read(bytes: &[u8; 2]) -> Self {
        Self::from_le_bytes(*bytes)
    }

    fn write(&self, bytes: &mut [u8; 2]) {
        *bytes = self.to_le_bytes();
    }
}

impl Block<1, 2> for bf16 {
    fn unpack(&self, numbers: &mut [f32; 1]) {
        *numbers = [self.to_f32()];
    }

    fn pack(numbers: &[f32; 1]) -> Self {
        Self::from_f32(numbers[0])
    }

    fn parts(&self) -> Parts<1> {
        Parts::default()
    }
}
