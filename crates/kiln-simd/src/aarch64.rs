//! Lanes of NEON, with its dot products where available: four vectors.
#![allow(
    unsafe_code,
    reason = "functions of instructions can be called where a value says that they are there"
)]

use std::arch::{
    aarch64::{
        float32x4_t, int8x16_t, int32x4_t, uint32x4_t, vabsq_f32, vaddlvq_s8, vaddq_f32, vaddq_s32,
        vaddq_u32, vandq_u32, vcombine_s8, vcombine_s16, vcvt_f32_f16, vcvtnq_s32_f32, vcvtq_f32_s32,
        vcvtq_f32_u32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32, veorq_u8, vfmaq_f32, vget_high_s8,
        vget_high_s16, vget_high_u8, vget_high_u16, vget_low_s8, vget_low_s16, vget_low_u8, vget_low_u16,
        vld1_u16, vld1q_f32, vld1q_s8, vld1q_u8, vld1q_u8_x4, vld1q_u32, vmaxnmq_f32, vmaxnmvq_f32,
        vmlaq_u32, vmovl_s8, vmovl_s16, vmovl_u8, vmovl_u16, vmovn_s16, vmovn_s32, vmull_s8, vmulq_f32,
        vorrq_u32, vpaddlq_s16, vpaddq_s32, vqtbl1q_u8, vqtbl4q_u8, vreinterpret_f16_u16,
        vreinterpretq_f32_f64, vreinterpretq_f32_u8, vreinterpretq_f32_u32, vreinterpretq_f64_f32,
        vreinterpretq_s8_s32, vreinterpretq_s8_u32, vreinterpretq_s32_u32, vreinterpretq_u8_u32,
        vreinterpretq_u32_s32, vreinterpretq_u32_u8, vshll_n_u16, vshlq_u32, vst1q_f32, vst1q_s8, vst1q_u32,
        vuzp1q_u32, vuzp2q_u32, vzip1q_f32, vzip1q_f64, vzip2q_f32, vzip2q_f64,
    },
    asm, is_aarch64_feature_detected,
};

use crate::{Lanes, Work};

/// Lanes of NEON, or of NEON with dot products.
///
/// **Invariant:** a value exists only if the machine has NEON and, if `DOT`, its dot products, which multiply
/// bytes in one instruction instead of six.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neon<const DOT: bool>(());

impl<const DOT: bool> Neon<DOT> {
    pub(crate) fn detect() -> Option<Self> {
        let all = is_aarch64_feature_detected!("neon") && (!DOT || is_aarch64_feature_detected!("dotprod"));
        all.then_some(Self(()))
    }

    pub(crate) fn run<W: Work>(self, work: W) -> W::Output {
        // Every machine of this architecture has NEON, so the function could be inlined; but tools look up
        // its machine code by name.
        #[inline(never)]
        #[target_feature(enable = "neon")]
        fn run<W: Work, L: Lanes>(lanes: L, work: W) -> W::Output {
            work.run(lanes)
        }
        #[target_feature(enable = "neon,dotprod")]
        fn run_with_dot<W: Work, L: Lanes>(lanes: L, work: W) -> W::Output {
            work.run(lanes)
        }
        // SAFETY: the existence of `self` proves that the instructions are available.
        unsafe { if DOT { run_with_dot(self, work) } else { run(self, work) } }
    }

    #[inline(always)]
    fn signed_dot(self, sums: [uint32x4_t; 4], bytes: [uint32x4_t; 4], x: i32) -> [uint32x4_t; 4] {
        let mut added = sums;
        for i in 0..4 {
            added[i] = unsafe {
                let (x, bytes) = (vreinterpretq_s8_s32(vdupq_n_s32(x)), vreinterpretq_s8_u32(bytes[i]));
                let sums = vreinterpretq_s32_u32(sums[i]);
                vreinterpretq_u32_s32(if DOT { dot(sums, bytes, x) } else { wide_dot(sums, bytes, x) })
            };
        }
        added
    }
}

/// Adds the products of four bytes with a single instruction.
///
/// # Safety
/// The machine must have the instruction.
#[inline(always)]
unsafe fn dot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // The intrinsic (`vdotq_s32`) is not stable in Rust.
    unsafe {
        asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sums
}

/// Computes the same as [`dot`] on every machine: products of two bytes fit in 16 bits.
///
/// # Safety
/// The machine must have NEON.
#[inline(always)]
unsafe fn wide_dot(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    unsafe {
        let first = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
        let second = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
        vaddq_s32(sums, vpaddq_s32(first, second))
    }
}

// SAFETY, for every function: the existence of `self` proves that the instructions are available. Loads and
// stores access quarters of arrays.
impl<const DOT: bool> Lanes for Neon<DOT> {
    type Words = [uint32x4_t; 4];
    type Floats = [float32x4_t; 4];
    type Pairs = [uint32x4_t; 4];

    const REGISTERS: usize = 8;
    const LARGEST_PAIR: usize = 0;
    const SUBTRACTS_128: bool = true;

    #[inline(always)]
    fn words(self, words: &[u32; 16]) -> [uint32x4_t; 4] {
        let first = words.as_ptr();
        unsafe {
            [vld1q_u32(first), vld1q_u32(first.add(4)), vld1q_u32(first.add(8)), vld1q_u32(first.add(12))]
        }
    }

    #[inline(always)]
    fn word_array(self, words: [uint32x4_t; 4]) -> [u32; 16] {
        let mut array = [0; 16];
        for (to, from) in array.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            unsafe { vst1q_u32(to.as_mut_ptr(), from) };
        }
        array
    }

    #[inline(always)]
    fn integers(self, integer: i32) -> [uint32x4_t; 4] {
        unsafe { [vdupq_n_u32(integer.cast_unsigned()); 4] }
    }

    #[inline(always)]
    fn shift_right(self, words: [uint32x4_t; 4], by: u32) -> [uint32x4_t; 4] {
        words.map(|words| unsafe { vshlq_u32(words, vdupq_n_s32(-by.cast_signed())) })
    }

    #[inline(always)]
    fn shift_left(self, words: [uint32x4_t; 4], by: u32) -> [uint32x4_t; 4] {
        words.map(|words| unsafe { vshlq_u32(words, vdupq_n_s32(by.cast_signed())) })
    }

    #[inline(always)]
    fn and(self, words: [uint32x4_t; 4], mask: u32) -> [uint32x4_t; 4] {
        words.map(|words| unsafe { vandq_u32(words, vdupq_n_u32(mask)) })
    }

    #[inline(always)]
    fn or(self, a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        std::array::from_fn(|i| unsafe { vorrq_u32(a[i], b[i]) })
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        bytes.map(|bytes| unsafe {
            vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_u32(bytes)))
        })
    }

    #[inline(always)]
    fn unzip(self, a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [[uint32x4_t; 4]; 2] {
        let (mut even, mut odd) = (a, a);
        for i in 0..4 {
            let [first, second] = if i < 2 { [a[2 * i], a[2 * i + 1]] } else { [b[2 * i - 4], b[2 * i - 3]] };
            (even[i], odd[i]) = unsafe { (vuzp1q_u32(first, second), vuzp2q_u32(first, second)) };
        }
        [even, odd]
    }

    #[inline(always)]
    fn dot(self, sums: [uint32x4_t; 4], bytes: [uint32x4_t; 4], x: i32) -> [uint32x4_t; 4] {
        self.signed_dot(sums, bytes, x)
    }

    #[inline(always)]
    fn no_pairs(self) -> [uint32x4_t; 4] {
        self.integers(0)
    }

    #[inline(always)]
    fn add_pairs(self, pairs: [uint32x4_t; 4], bytes: [uint32x4_t; 4], x: i32) -> [uint32x4_t; 4] {
        self.dot(pairs, bytes, x)
    }

    #[inline(always)]
    fn sum_pairs(self, sums: [uint32x4_t; 4], pairs: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        std::array::from_fn(|i| unsafe { vaddq_u32(sums[i], pairs[i]) })
    }

    #[inline(always)]
    fn dot_wide(self, sums: [uint32x4_t; 4], bytes: [uint32x4_t; 4], x: i32) -> [uint32x4_t; 4] {
        let signed = bytes.map(|bytes| unsafe {
            vreinterpretq_u32_u8(veorq_u8(vreinterpretq_u8_u32(bytes), vdupq_n_u8(128)))
        });
        self.signed_dot(sums, signed, x)
    }

    #[inline(always)]
    fn to_floats(self, integers: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        integers.map(|integers| unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(integers)) })
    }

    #[inline(always)]
    fn splat(self, float: f32) -> [float32x4_t; 4] {
        unsafe { [vdupq_n_f32(float); 4] }
    }

    #[inline(always)]
    fn floats(self, floats: &[f32; 16]) -> [float32x4_t; 4] {
        let first = floats.as_ptr();
        unsafe {
            [vld1q_f32(first), vld1q_f32(first.add(4)), vld1q_f32(first.add(8)), vld1q_f32(first.add(12))]
        }
    }

    #[inline(always)]
    fn pick(self, floats: &[f32; 16], lanes: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        let mut picked = self.splat(0.0);
        for i in 0..4 {
            picked[i] = unsafe {
                let table = vld1q_u8_x4(floats.as_ptr().cast());
                // The four bytes of a lane are adjacent.
                let bytes = vmlaq_u32(vdupq_n_u32(0x0302_0100), lanes[i], vdupq_n_u32(0x0404_0404));
                vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)))
            };
        }
        picked
    }

    #[inline(always)]
    fn halves(self, halves: &[u16; 16]) -> [float32x4_t; 4] {
        let (first, mut floats) = (halves.as_ptr(), self.splat(0.0));
        for i in 0..4 {
            floats[i] = unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(first.add(4 * i)))) };
        }
        floats
    }

    #[inline(always)]
    fn bfloats(self, bfloats: &[u16; 16]) -> [float32x4_t; 4] {
        let (first, mut floats) = (bfloats.as_ptr(), self.splat(0.0));
        for i in 0..4 {
            floats[i] = unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(first.add(4 * i)))) };
        }
        floats
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 16]) -> [float32x4_t; 4] {
        unsafe {
            let bytes = vld1q_u8(bytes.as_ptr());
            let (first, second) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(first))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(first))),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(second))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(second))),
            ]
        }
    }

    #[inline(always)]
    fn signed_bytes(self, bytes: &[u8; 16]) -> [float32x4_t; 4] {
        unsafe {
            let bytes = vld1q_s8(bytes.as_ptr().cast());
            let (first, second) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(first))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(first))),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(second))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(second))),
            ]
        }
    }

    #[inline(always)]
    fn mul(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        std::array::from_fn(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn add(self, a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        std::array::from_fn(|i| unsafe { vaddq_f32(a[i], b[i]) })
    }

    #[inline(always)]
    fn mul_add(self, a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        std::array::from_fn(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }

    #[inline(always)]
    fn array(self, floats: [float32x4_t; 4]) -> [f32; 16] {
        let mut array = [0.0; 16];
        for (to, from) in array.as_chunks_mut::<4>().0.iter_mut().zip(floats) {
            unsafe { vst1q_f32(to.as_mut_ptr(), from) };
        }
        array
    }

    #[inline(always)]
    fn largest(self, [a, b]: [[float32x4_t; 4]; 2]) -> f32 {
        // The number is the result if the other operand is NaN.
        let mut sizes = unsafe { vdupq_n_f32(0.0) };
        for floats in a.into_iter().chain(b) {
            sizes = unsafe { vmaxnmq_f32(vabsq_f32(floats), sizes) };
        }
        unsafe { vmaxnmvq_f32(sizes) }
    }

    #[inline(always)]
    fn rounded(self, floats: [float32x4_t; 4]) -> ([i8; 16], i32) {
        let mut bytes = [0; 16];
        unsafe {
            // NaN becomes 0.
            let [a, b, c, d] = floats.map(|floats| vcvtnq_s32_f32(floats));
            let low = vcombine_s16(vmovn_s32(a), vmovn_s32(b));
            let high = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
            let integers = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
            vst1q_s8(bytes.as_mut_ptr(), integers);
            (bytes, i32::from(vaddlvq_s8(integers)))
        }
    }

    #[inline(always)]
    fn sums(self, floats: [[float32x4_t; 4]; 4]) -> [f32; 4] {
        let fours = |four: usize| unsafe {
            let [a, b, c, d] = floats.map(|floats| floats[four]);
            let ab = vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b));
            let cd = vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d));
            let (ab, cd) = (vreinterpretq_f64_f32(ab), vreinterpretq_f64_f32(cd));
            let low = vreinterpretq_f32_f64(vzip1q_f64(ab, cd));
            vaddq_f32(low, vreinterpretq_f32_f64(vzip2q_f64(ab, cd)))
        };
        let mut sums = [0.0; 4];
        unsafe {
            let sum = vaddq_f32(vaddq_f32(fours(0), fours(2)), vaddq_f32(fours(1), fours(3)));
            vst1q_f32(sums.as_mut_ptr(), sum);
        }
        sums
    }

    #[inline(never)]
    fn call<W: Work>(self, work: W) -> W::Output {
        self.run(work)
    }
}
