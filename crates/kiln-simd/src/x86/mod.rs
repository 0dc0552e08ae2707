//! Lanes of x86-64 processors.
#![allow(
    unsafe_code,
    reason = "functions of instructions can be called where a value says that they are there"
)]

mod avx2;
mod avx512;

use std::arch::x86_64::{
    __m128i, __m256, _MM_HINT_T0, _mm_add_epi32, _mm_add_ps, _mm_cvtsi128_si32, _mm_prefetch, _mm_sad_epu8,
    _mm_set1_epi8, _mm_setzero_si128, _mm_storeu_ps, _mm_storeu_si128, _mm_unpackhi_epi64, _mm_xor_si128,
    _mm256_castps256_ps128, _mm256_extractf128_ps,
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
/// The machine must have AVX.
#[inline(always)]
unsafe fn sum_halves(floats: __m256) -> [f32; 4] {
    let mut sums = [0.0; 4];
    unsafe {
        let sum = _mm_add_ps(_mm256_castps256_ps128(floats), _mm256_extractf128_ps::<1>(floats));
        _mm_storeu_ps(sums.as_mut_ptr(), sum);
    }
    sums
}

/// Returns bytes, and their sum.
///
/// # Safety
/// The machine must have SSE2.
#[inline(always)]
unsafe fn bytes_and_sum(integers: __m128i) -> ([i8; 16], i32) {
    let mut bytes = [0; 16];
    unsafe {
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), integers);
        // Sums of unsigned bytes, each 128 too large.
        let unsigned = _mm_xor_si128(integers, _mm_set1_epi8(i8::MIN));
        let halves = _mm_sad_epu8(unsigned, _mm_setzero_si128());
        let sum = _mm_add_epi32(halves, _mm_unpackhi_epi64(halves, halves));
        (bytes, _mm_cvtsi128_si32(sum) - 16 * 128)
    }
}
