//! Lanes of x86-64 processors.
#![allow(
    unsafe_code,
    reason = "functions of instructions can be called where a value says that they are there"
)]

mod avx2;
mod avx512;

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _mm_add_ps, _mm_prefetch, _mm_storeu_ps, _mm256_castps256_ps128,
    _mm256_extractf128_ps,
};

pub(crate) use self::{avx2::Avx2, avx512::Avx512};
use crate::AHEAD;

/// Size of a cache line in bytes.
const LINE: usize = 64;

#[inline(always)]
fn prefetch<T>(data: &[T]) {
    let ahead = data.as_ptr().wrapping_byte_add(AHEAD);
    for line in 0..size_of_val(data).div_ceil(LINE) {
        // SAFETY: nothing is read, and prefetching an invalid address does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_byte_add(line * LINE).cast()) };
    }
}

/// Adds the lower four floats and the upper four.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
unsafe fn sum_halves(floats: __m256) -> [f32; 4] {
    let mut sums = [0.0; 4];
    unsafe {
        let sum = _mm_add_ps(_mm256_castps256_ps128(floats), _mm256_extractf128_ps::<1>(floats));
        _mm_storeu_ps(sums.as_mut_ptr(), sum);
    }
    sums
}
