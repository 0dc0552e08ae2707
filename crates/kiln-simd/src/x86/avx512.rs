//! Lanes of AVX-512 with VNNI: one vector.

use std::arch::{
    is_x86_feature_detected,
    x86_64::{
        __m512, __m512i, _mm_cvtsi32_si128, _mm_loadu_si128, _mm256_add_ps, _mm256_loadu_si256,
        _mm512_abs_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_broadcast_i32x4,
        _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps512_ps256, _mm512_castsi512_ps,
        _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32,
        _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_epi32, _mm512_dpbusd_epi32,
        _mm512_extractf32x8_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_max_ps,
        _mm512_mul_ps, _mm512_or_si512, _mm512_permutex2var_epi32, _mm512_permutexvar_ps,
        _mm512_reduce_max_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_epi32, _mm512_shuffle_epi8,
        _mm512_sll_epi32, _mm512_slli_epi32, _mm512_srl_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
        _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
    },
};

use super::{bytes_and_sum, prefetch, sum_halves};
use crate::{Lanes, Work};

/// Lanes of AVX-512.
///
/// **Invariant:** a value exists only if the machine has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        all.then_some(Self(()))
    }

    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        fn run<W: Work>(lanes: Avx512, work: W) -> W::Output {
            work.run(lanes)
        }
        // SAFETY: the existence of `self` proves that the instructions are available; AVX-512 F implies AVX2,
        // FMA and F16C.
        unsafe { run(self, work) }
    }
}

// SAFETY, for every function: the existence of `self` proves that the instructions are available. Loads and
// stores access whole arrays.
impl Lanes for Avx512 {
    type Words = __m512i;
    type Floats = __m512;
    type Pairs = __m512i;

    const REGISTERS: usize = 32;
    const LARGEST_PAIR: usize = 0;
    const SUBTRACTS_128: bool = false;

    #[inline(always)]
    fn words(self, words: &[u32; 16]) -> __m512i {
        unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
    }

    #[inline(always)]
    fn word_array(self, words: __m512i) -> [u32; 16] {
        let mut array = [0; 16];
        unsafe { _mm512_storeu_si512(array.as_mut_ptr().cast(), words) };
        array
    }

    #[inline(always)]
    fn integers(self, integer: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(integer) }
    }

    #[inline(always)]
    fn shift_right(self, words: __m512i, by: u32) -> __m512i {
        unsafe { _mm512_srl_epi32(words, _mm_cvtsi32_si128(by.cast_signed())) }
    }

    #[inline(always)]
    fn shift_left(self, words: __m512i, by: u32) -> __m512i {
        unsafe { _mm512_sll_epi32(words, _mm_cvtsi32_si128(by.cast_signed())) }
    }

    #[inline(always)]
    fn and(self, words: __m512i, mask: u32) -> __m512i {
        unsafe { _mm512_and_si512(words, _mm512_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: __m512i) -> __m512i {
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, bytes)
        }
    }

    #[inline(always)]
    fn unzip(self, a: __m512i, b: __m512i) -> [__m512i; 2] {
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
        }
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, bytes: __m512i, x: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sums, bytes, _mm512_set1_epi32(x)) }
    }

    #[inline(always)]
    fn no_pairs(self) -> __m512i {
        self.integers(0)
    }

    #[inline(always)]
    fn add_pairs(self, pairs: __m512i, bytes: __m512i, x: i32) -> __m512i {
        self.dot(pairs, bytes, x)
    }

    #[inline(always)]
    fn sum_pairs(self, sums: __m512i, pairs: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(sums, pairs) }
    }

    #[inline(always)]
    fn dot_wide(self, sums: __m512i, bytes: __m512i, x: i32) -> __m512i {
        self.dot(sums, bytes, x)
    }

    #[inline(always)]
    fn to_floats(self, integers: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(integers) }
    }

    #[inline(always)]
    fn splat(self, float: f32) -> __m512 {
        unsafe { _mm512_set1_ps(float) }
    }

    #[inline(always)]
    fn floats(self, floats: &[f32; 16]) -> __m512 {
        unsafe { _mm512_loadu_ps(floats.as_ptr()) }
    }

    #[inline(always)]
    fn pick(self, floats: &[f32; 16], lanes: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(lanes, _mm512_loadu_ps(floats.as_ptr())) }
    }

    #[inline(always)]
    fn halves(self, halves: &[u16; 16]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast())) }
    }

    #[inline(always)]
    fn bfloats(self, bfloats: &[u16; 16]) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bfloats.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 16]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn signed_bytes(self, bytes: &[u8; 16]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn array(self, floats: __m512) -> [f32; 16] {
        let mut array = [0.0; 16];
        unsafe { _mm512_storeu_ps(array.as_mut_ptr(), floats) };
        array
    }

    #[inline(always)]
    fn largest(self, [a, b]: [__m512; 2]) -> f32 {
        unsafe {
            // The second operand is the result if the first is NaN.
            let zero = _mm512_set1_ps(0.0);
            let sizes = _mm512_max_ps(_mm512_abs_ps(b), _mm512_max_ps(_mm512_abs_ps(a), zero));
            _mm512_reduce_max_ps(sizes)
        }
    }

    #[inline(always)]
    fn rounded(self, floats: __m512) -> ([i8; 16], i32) {
        unsafe {
            // NaN becomes the least integer, whose lowest bits are 0.
            bytes_and_sum(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(floats)))
        }
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            let fours = _mm512_add_ps(low, high);
            let halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps::<1>(fours));
            sum_halves(halves)
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, data: &[T]) {
        prefetch(data);
    }

    #[inline(never)]
    fn call<W: Work>(self, work: W) -> W::Output {
        self.run(work)
    }
}
