//! Formats whose blocks are single numbers: float32, float16 and bfloat16.

use half::{bf16, f16};

use crate::formats::{Block, Fields, Layout};

pub(crate) static F32: Layout = Layout { largest: None, ..Layout::of::<f32, _, _>("f32", 0) };
pub(crate) static F16: Layout = Layout { largest: None, ..Layout::of::<f16, _, _>("f16", 1) };
pub(crate) static BF16: Layout = Layout { largest: None, ..Layout::of::<bf16, _, _>("bf16", 30) };

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
}

impl Fields<2> for f16 {
    fn read(bytes: &[u8; 2]) -> Self {
        Self::from_le_bytes(*bytes)
    }

    fn write(&self, bytes: &mut [u8; 2]) {
        *bytes = self.to_le_bytes();
    }
}

impl Block<1, 2> for f16 {
    fn unpack(&self, numbers: &mut [f32; 1]) {
        *numbers = [self.to_f32()];
    }

    fn pack(numbers: &[f32; 1]) -> Self {
        Self::from_f32(numbers[0])
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
}
