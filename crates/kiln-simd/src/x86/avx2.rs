//! Lanes of AVX2 with FMA and F16C, and with AVX-VNNI where available: two vectors.

use std::arch::{
    is_x86_feature_detected,
    x86_64::{
        __m128i, __m256, __m256i, _CMP_ORD_Q, _mm_cvtsi32_si128, _mm_cvtss_f32, _mm_loadu_si128, _mm_max_ps,
        _mm_max_ss, _mm_movehl_ps, _mm_packs_epi16, _mm_shuffle_ps, _mm_unpackhi_epi64, _mm256_add_epi16,
        _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_and_si256, _mm256_andnot_ps, _mm256_blendv_ps,
        _mm256_broadcastsi128_si256, _mm256_castpd_ps, _mm256_castps_pd, _mm256_castps_si256,
        _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmp_ps,
        _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32,
        _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_dpbusd_avx_epi32, _mm256_extractf128_ps,
        _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_madd_epi16,
        _mm256_maddubs_epi16, _mm256_max_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packs_epi32,
        _mm256_permute4x64_epi64, _mm256_permutevar8x32_ps, _mm256_set1_epi8, _mm256_set1_epi16,
        _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_shuffle_epi8,
        _mm256_shuffle_ps, _mm256_sign_epi8, _mm256_sll_epi32, _mm256_slli_epi32, _mm256_srl_epi32,
        _mm256_storeu_ps, _mm256_storeu_si256, _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_pd,
        _mm256_unpacklo_ps, _mm256_xor_si256,
    },
};

use super::{bytes_and_sum, prefetch, sum_halves};
use crate::{Lanes, Work};

/// Lanes of AVX2, or of AVX2 with AVX-VNNI.
///
/// **Invariant:** a value exists only if the machine has AVX2, FMA and F16C and, if `VNNI`, AVX-VNNI, which
/// multiplies bytes in one instruction instead of three.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        all.then_some(Self(()))
    }

    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn run<W: Work, L: Lanes>(lanes: L, work: W) -> W::Output {
            work.run(lanes)
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn run_with_vnni<W: Work, L: Lanes>(lanes: L, work: W) -> W::Output {
            work.run(lanes)
        }
        // SAFETY: the existence of `self` proves that the instructions are available.
        unsafe { if VNNI { run_with_vnni(self, work) } else { run(self, work) } }
    }
}

// SAFETY, for every function: the existence of `self` proves that the instructions are available. Loads and
// stores are within arrays.
impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Words = [__m256i; 2];
    type Floats = [__m256; 2];
    type Pairs = [__m256i; 2];

    const REGISTERS: usize = 8;
    const LARGEST_PAIR: usize = if VNNI { 0 } else { i16::MAX as usize };
    const SUBTRACTS_128: bool = !VNNI;

    #[inline(always)]
    fn words(self, words: &[u32; 16]) -> [__m256i; 2] {
        let both = words.as_ptr().cast::<__m256i>();
        unsafe { [_mm256_loadu_si256(both), _mm256_loadu_si256(both.add(1))] }
    }

    #[inline(always)]
    fn word_array(self, words: [__m256i; 2]) -> [u32; 16] {
        let mut array = [0; 16];
        let both = array.as_mut_ptr().cast::<__m256i>();
        unsafe {
            _mm256_storeu_si256(both, words[0]);
            _mm256_storeu_si256(both.add(1), words[1]);
        }
        array
    }

    #[inline(always)]
    fn integers(self, integer: i32) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi32(integer); 2] }
    }

    #[inline(always)]
    fn shift_right(self, words: [__m256i; 2], by: u32) -> [__m256i; 2] {
        unsafe {
            let by = _mm_cvtsi32_si128(by.cast_signed());
            [_mm256_srl_epi32(words[0], by), _mm256_srl_epi32(words[1], by)]
        }
    }

    #[inline(always)]
    fn shift_left(self, words: [__m256i; 2], by: u32) -> [__m256i; 2] {
        unsafe {
            let by = _mm_cvtsi32_si128(by.cast_signed());
            [_mm256_sll_epi32(words[0], by), _mm256_sll_epi32(words[1], by)]
        }
    }

    #[inline(always)]
    fn and(self, words: [__m256i; 2], mask: u32) -> [__m256i; 2] {
        unsafe {
            let mask = _mm256_set1_epi32(mask.cast_signed());
            [_mm256_and_si256(words[0], mask), _mm256_and_si256(words[1], mask)]
        }
    }

    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, bytes[0]), _mm256_shuffle_epi8(table, bytes[1])]
        }
    }

    #[inline(always)]
    fn unzip(self, a: [__m256i; 2], b: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        let [[a, a_odd], [b, b_odd]] = [unzip_halves(a), unzip_halves(b)];
        [[a, b], [a_odd, b_odd]]
    }

    #[inline(always)]
    fn dot(self, sums: [__m256i; 2], bytes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        if VNNI {
            return self.dot_of_vnni(sums, bytes, x);
        }
        // Two products of up to 127 · 127 fit in 16 bits.
        self.sum_pairs(sums, self.add_pairs(self.no_pairs(), bytes, x))
    }

    #[inline(always)]
    fn no_pairs(self) -> [__m256i; 2] {
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn add_pairs(self, pairs: [__m256i; 2], bytes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        unsafe {
            let x = _mm256_set1_epi32(x);
            let [first, second] = [_mm256_maddubs_epi16(bytes[0], x), _mm256_maddubs_epi16(bytes[1], x)];
            [_mm256_add_epi16(pairs[0], first), _mm256_add_epi16(pairs[1], second)]
        }
    }

    #[inline(always)]
    fn sum_pairs(self, sums: [__m256i; 2], pairs: [__m256i; 2]) -> [__m256i; 2] {
        unsafe {
            let one = _mm256_set1_epi16(1);
            let [first, second] = [_mm256_madd_epi16(pairs[0], one), _mm256_madd_epi16(pairs[1], one)];
            [_mm256_add_epi32(sums[0], first), _mm256_add_epi32(sums[1], second)]
        }
    }

    #[inline(always)]
    fn dot_wide(self, sums: [__m256i; 2], bytes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        if VNNI {
            return self.dot_of_vnni(sums, bytes, x);
        }
        unsafe {
            let flip = _mm256_set1_epi8(-128);
            let signed = [_mm256_xor_si256(bytes[0], flip), _mm256_xor_si256(bytes[1], flip)];
            let (x, one) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            // The sign of a byte is moved to x; two products of up to 128 · 127 fit in 16 bits.
            let first =
                _mm256_maddubs_epi16(_mm256_sign_epi8(signed[0], signed[0]), _mm256_sign_epi8(x, signed[0]));
            let second =
                _mm256_maddubs_epi16(_mm256_sign_epi8(signed[1], signed[1]), _mm256_sign_epi8(x, signed[1]));
            let (first, second) = (_mm256_madd_epi16(first, one), _mm256_madd_epi16(second, one));
            [_mm256_add_epi32(sums[0], first), _mm256_add_epi32(sums[1], second)]
        }
    }

    #[inline(always)]
    fn to_floats(self, integers: [__m256i; 2]) -> [__m256; 2] {
        unsafe { [_mm256_cvtepi32_ps(integers[0]), _mm256_cvtepi32_ps(integers[1])] }
    }

    #[inline(always)]
    fn splat(self, float: f32) -> [__m256; 2] {
        unsafe { [_mm256_set1_ps(float); 2] }
    }

    #[inline(always)]
    fn floats(self, floats: &[f32; 16]) -> [__m256; 2] {
        unsafe { [_mm256_loadu_ps(floats.as_ptr()), _mm256_loadu_ps(floats.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn pick(self, floats: &[f32; 16], lanes: [__m256i; 2]) -> [__m256; 2] {
        unsafe {
            let [low, high] = self.floats(floats);
            let (first, second) = (lanes[0], lanes[1]);
            // The shift makes lanes from 8 up negative; the sign selects the half.
            let above = |lanes| _mm256_castsi256_ps(_mm256_slli_epi32::<28>(lanes));
            let a = _mm256_blendv_ps(
                _mm256_permutevar8x32_ps(low, first),
                _mm256_permutevar8x32_ps(high, first),
                above(first),
            );
            let b = _mm256_blendv_ps(
                _mm256_permutevar8x32_ps(low, second),
                _mm256_permutevar8x32_ps(high, second),
                above(second),
            );
            [a, b]
        }
    }

    #[inline(always)]
    fn halves(self, halves: &[u16; 16]) -> [__m256; 2] {
        let both = halves.as_ptr().cast::<__m128i>();
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(both)), _mm256_cvtph_ps(_mm_loadu_si128(both.add(1)))] }
    }

    #[inline(always)]
    fn bfloats(self, bfloats: &[u16; 16]) -> [__m256; 2] {
        let both = bfloats.as_ptr().cast::<__m128i>();
        unsafe {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(both));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(both.add(1)));
            let (a, b) = (_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b));
            [_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)]
        }
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 16]) -> [__m256; 2] {
        unsafe {
            let a = _mm_loadu_si128(bytes.as_ptr().cast());
            let b = _mm_unpackhi_epi64(a, a);
            [_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b))]
        }
    }

    #[inline(always)]
    fn signed_bytes(self, bytes: &[u8; 16]) -> [__m256; 2] {
        unsafe {
            let a = _mm_loadu_si128(bytes.as_ptr().cast());
            let b = _mm_unpackhi_epi64(a, a);
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b))]
        }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn array(self, floats: [__m256; 2]) -> [f32; 16] {
        let mut array = [0.0; 16];
        unsafe {
            _mm256_storeu_ps(array.as_mut_ptr(), floats[0]);
            _mm256_storeu_ps(array.as_mut_ptr().add(8), floats[1]);
        }
        array
    }

    #[inline(always)]
    fn largest(self, floats: [[__m256; 2]; 2]) -> f32 {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let mut sizes = _mm256_setzero_ps();
            for floats in floats {
                for half in floats {
                    // The second operand is the result if the first is NaN.
                    sizes = _mm256_max_ps(_mm256_andnot_ps(sign, half), sizes);
                }
            }
            let four = _mm_max_ps(_mm256_castps256_ps128(sizes), _mm256_extractf128_ps::<1>(sizes));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    fn rounded(self, [a, b]: [__m256; 2]) -> ([i8; 16], i32) {
        unsafe {
            let (a, b) = (_mm256_cvtps_epi32(or_zero(a)), _mm256_cvtps_epi32(or_zero(b)));
            // Each half of a vector is packed separately; then quarters are put in order.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            bytes_and_sum(_mm_packs_epi16(low, high))
        }
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [[__m256; 2]; 4]) -> [f32; 4] {
        unsafe {
            let (low, high) = (sums_of_fours(a[0], b[0], c[0], d[0]), sums_of_fours(a[1], b[1], c[1], d[1]));
            sum_halves(_mm256_add_ps(low, high))
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

impl<const VNNI: bool> Avx2<VNNI> {
    /// Adds dot products of bytes; only for values with `VNNI`.
    #[inline(always)]
    fn dot_of_vnni(self, sums: [__m256i; 2], bytes: [__m256i; 2], x: i32) -> [__m256i; 2] {
        unsafe {
            let x = _mm256_set1_epi32(x);
            [_mm256_dpbusd_avx_epi32(sums[0], bytes[0], x), _mm256_dpbusd_avx_epi32(sums[1], bytes[1], x)]
        }
    }
}

/// Returns the words at even places, and those at odd places. AVX2 must be available.
#[inline(always)]
fn unzip_halves([a, b]: [__m256i; 2]) -> [__m256i; 2] {
    unsafe {
        let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
        // Each half of a vector is shuffled separately; then quarters are put in order.
        let even = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
        let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
        [_mm256_permute4x64_epi64::<0b11_01_10_00>(even), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd)]
    }
}

/// Sums each four floats of `a`, `b`, `c` and `d`: for the first four of each, then for the others.
///
/// # Safety
/// The machine must have AVX.
#[inline(always)]
unsafe fn sums_of_fours(a: __m256, b: __m256, c: __m256, d: __m256) -> __m256 {
    unsafe {
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
        _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)))
    }
}

/// Replaces NaN by 0.
///
/// # Safety
/// The machine must have AVX.
#[inline(always)]
unsafe fn or_zero(floats: __m256) -> __m256 {
    unsafe { _mm256_and_ps(floats, _mm256_cmp_ps::<_CMP_ORD_Q>(floats, floats)) }
}
