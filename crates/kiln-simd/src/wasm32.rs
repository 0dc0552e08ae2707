//! Lanes of WebAssembly: four vectors.
//!
//! Relaxed instructions are not used: docs/decisions/0056.
#![allow(unsafe_code, reason = "loads and stores access quarters of arrays")]

use std::arch::wasm32::{
    f32x4_abs, f32x4_add, f32x4_convert_i32x4, f32x4_convert_u32x4, f32x4_extract_lane, f32x4_mul,
    f32x4_nearest, f32x4_pmax, f32x4_splat, i8x16_narrow_i16x8, i16x8_extadd_pairwise_i8x16,
    i16x8_extend_high_i8x16, i16x8_extend_low_i8x16, i16x8_narrow_i32x4, i16x8_shl, i16x8_shr, i32x4_add,
    i32x4_dot_i16x8, i32x4_extadd_pairwise_i16x8, i32x4_extend_high_i16x8, i32x4_extend_low_i16x8,
    i32x4_extract_lane, i32x4_mul, i32x4_shuffle, i32x4_splat, i32x4_trunc_sat_f32x4, u8x16_splat, u8x16_sub,
    u8x16_swizzle, u16x8_extend_high_u8x16, u16x8_extend_low_u8x16, u16x8_shr, u32x4_extend_high_u16x8,
    u32x4_extend_low_u16x8, u32x4_ge, u32x4_shl, u32x4_shr, u32x4_splat, v128, v128_and, v128_bitselect,
    v128_load, v128_or, v128_store,
};

use crate::{Lanes, Work};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Simd128;

/// Four vectors from the beginning of `numbers`, which are 64 bytes.
#[inline(always)]
fn loaded<T>(numbers: &[T; 16]) -> [v128; 4] {
    const { assert!(size_of::<T>() == 4) };
    let first = numbers.as_ptr().cast::<v128>();
    // SAFETY: each load is a quarter of the array.
    std::array::from_fn(|i| unsafe { v128_load(first.add(i)) })
}

#[inline(always)]
fn stored<T: Copy + Default>(vectors: [v128; 4]) -> [T; 16] {
    const { assert!(size_of::<T>() == 4) };
    let mut array = [T::default(); 16];
    let first = array.as_mut_ptr().cast::<v128>();
    for (i, vector) in vectors.into_iter().enumerate() {
        // SAFETY: each store is a quarter of the array.
        unsafe { v128_store(first.add(i), vector) };
    }
    array
}

#[inline(always)]
fn sixteen_bytes<T>(bytes: &[T; 16]) -> v128 {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: the array has as many bytes as a vector.
    unsafe { v128_load(bytes.as_ptr().cast()) }
}

/// Sixteen numbers of 16 bits, extended by zeros.
#[inline(always)]
fn extended(numbers: &[u16; 16]) -> [v128; 4] {
    let first = numbers.as_ptr().cast::<v128>();
    // SAFETY: each load is half of the array.
    let [a, b] = [0, 1].map(|i| unsafe { v128_load(first.add(i)) });
    [
        u32x4_extend_low_u16x8(a),
        u32x4_extend_high_u16x8(a),
        u32x4_extend_low_u16x8(b),
        u32x4_extend_high_u16x8(b),
    ]
}

/// Adds the dot products of four unsigned bytes with the four signed bytes of `x`.
#[inline(always)]
fn dot(sums: [v128; 4], bytes: [v128; 4], x: i32) -> [v128; 4] {
    let x = i32x4_splat(x);
    let (even, odd) = (i16x8_shr(i16x8_shl(x, 8), 8), i16x8_shr(x, 8));
    std::array::from_fn(|i| {
        let of_even = i32x4_dot_i16x8(v128_and(bytes[i], u32x4_splat(0x00ff_00ff)), even);
        let of_odd = i32x4_dot_i16x8(u16x8_shr(bytes[i], 8), odd);
        i32x4_add(sums[i], i32x4_add(of_even, of_odd))
    })
}

impl Lanes for Simd128 {
    type Words = [v128; 4];
    type Floats = [v128; 4];
    type Pairs = [v128; 4];

    const REGISTERS: usize = 4;
    const LARGEST_PAIR: usize = 0;
    const SUBTRACTS_128: bool = false;

    #[inline(always)]
    fn words(self, words: &[u32; 16]) -> [v128; 4] {
        loaded(words)
    }

    #[inline(always)]
    fn word_array(self, words: [v128; 4]) -> [u32; 16] {
        stored(words)
    }

    #[inline(always)]
    fn integers(self, integer: i32) -> [v128; 4] {
        [i32x4_splat(integer); 4]
    }

    #[inline(always)]
    fn shift_right(self, words: [v128; 4], by: u32) -> [v128; 4] {
        words.map(|words| u32x4_shr(words, by))
    }

    #[inline(always)]
    fn shift_left(self, words: [v128; 4], by: u32) -> [v128; 4] {
        words.map(|words| u32x4_shl(words, by))
    }

    #[inline(always)]
    fn and(self, words: [v128; 4], mask: u32) -> [v128; 4] {
        words.map(|words| v128_and(words, u32x4_splat(mask)))
    }

    #[inline(always)]
    fn or(self, a: [v128; 4], b: [v128; 4]) -> [v128; 4] {
        std::array::from_fn(|i| v128_or(a[i], b[i]))
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: [v128; 4]) -> [v128; 4] {
        bytes.map(|bytes| u8x16_swizzle(sixteen_bytes(table), bytes))
    }

    #[inline(always)]
    fn unzip(self, a: [v128; 4], b: [v128; 4]) -> [[v128; 4]; 2] {
        let pairs = [[a[0], a[1]], [a[2], a[3]], [b[0], b[1]], [b[2], b[3]]];
        [
            pairs.map(|[first, second]| i32x4_shuffle::<0, 2, 4, 6>(first, second)),
            pairs.map(|[first, second]| i32x4_shuffle::<1, 3, 5, 7>(first, second)),
        ]
    }

    #[inline(always)]
    fn dot(self, sums: [v128; 4], bytes: [v128; 4], x: i32) -> [v128; 4] {
        dot(sums, bytes, x)
    }

    #[inline(always)]
    fn no_pairs(self) -> [v128; 4] {
        self.integers(0)
    }

    #[inline(always)]
    fn add_pairs(self, pairs: [v128; 4], bytes: [v128; 4], x: i32) -> [v128; 4] {
        self.dot(pairs, bytes, x)
    }

    #[inline(always)]
    fn sum_pairs(self, sums: [v128; 4], pairs: [v128; 4]) -> [v128; 4] {
        std::array::from_fn(|i| i32x4_add(sums[i], pairs[i]))
    }

    #[inline(always)]
    fn dot_wide(self, sums: [v128; 4], bytes: [v128; 4], x: i32) -> [v128; 4] {
        dot(sums, bytes, x)
    }

    #[inline(always)]
    fn to_floats(self, integers: [v128; 4]) -> [v128; 4] {
        integers.map(|integers| f32x4_convert_i32x4(integers))
    }

    #[inline(always)]
    fn splat(self, float: f32) -> [v128; 4] {
        [f32x4_splat(float); 4]
    }

    #[inline(always)]
    fn floats(self, floats: &[f32; 16]) -> [v128; 4] {
        loaded(floats)
    }

    #[inline(always)]
    fn pick(self, floats: &[f32; 16], lanes: [v128; 4]) -> [v128; 4] {
        let table = loaded(floats);
        lanes.map(|lanes| {
            // The four bytes of a lane are adjacent. Bytes that a quarter of the table does not have give 0.
            let bytes = i32x4_add(u32x4_splat(0x0302_0100), i32x4_mul(lanes, u32x4_splat(0x0404_0404)));
            let quarter = |i: u8| u8x16_swizzle(table[usize::from(i)], u8x16_sub(bytes, u8x16_splat(16 * i)));
            v128_or(v128_or(quarter(0), quarter(1)), v128_or(quarter(2), quarter(3)))
        })
    }

    #[inline(always)]
    fn halves(self, halves: &[u16; 16]) -> [v128; 4] {
        extended(halves).map(|bits| {
            // The bits of exponent and fraction, as those of a float32 number, are that number by 2^112 too
            // small.
            let small = u32x4_shl(v128_and(bits, u32x4_splat(0x7fff)), 13);
            let finite = f32x4_mul(small, u32x4_splat((127 + 112) << 23));
            let not_finite = v128_or(small, u32x4_splat(0x7f80_0000));
            let is_not_finite = u32x4_ge(small, u32x4_splat(0x7c00 << 13));
            let sign = u32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16);
            v128_or(v128_bitselect(not_finite, finite, is_not_finite), sign)
        })
    }

    #[inline(always)]
    fn bfloats(self, bfloats: &[u16; 16]) -> [v128; 4] {
        extended(bfloats).map(|bits| u32x4_shl(bits, 16))
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 16]) -> [v128; 4] {
        let bytes = sixteen_bytes(bytes);
        let (first, second) = (u16x8_extend_low_u8x16(bytes), u16x8_extend_high_u8x16(bytes));
        [
            u32x4_extend_low_u16x8(first),
            u32x4_extend_high_u16x8(first),
            u32x4_extend_low_u16x8(second),
            u32x4_extend_high_u16x8(second),
        ]
        .map(|integers| f32x4_convert_u32x4(integers))
    }

    #[inline(always)]
    fn signed_bytes(self, bytes: &[u8; 16]) -> [v128; 4] {
        let bytes = sixteen_bytes(bytes);
        let (first, second) = (i16x8_extend_low_i8x16(bytes), i16x8_extend_high_i8x16(bytes));
        self.to_floats([
            i32x4_extend_low_i16x8(first),
            i32x4_extend_high_i16x8(first),
            i32x4_extend_low_i16x8(second),
            i32x4_extend_high_i16x8(second),
        ])
    }

    #[inline(always)]
    fn mul(self, a: [v128; 4], b: [v128; 4]) -> [v128; 4] {
        std::array::from_fn(|i| f32x4_mul(a[i], b[i]))
    }

    #[inline(always)]
    fn add(self, a: [v128; 4], b: [v128; 4]) -> [v128; 4] {
        std::array::from_fn(|i| f32x4_add(a[i], b[i]))
    }

    #[inline(always)]
    fn mul_add(self, a: [v128; 4], b: [v128; 4], c: [v128; 4]) -> [v128; 4] {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn array(self, floats: [v128; 4]) -> [f32; 16] {
        stored(floats)
    }

    #[inline(always)]
    fn largest(self, [a, b]: [[v128; 4]; 2]) -> f32 {
        // The first operand is the result if the other is NaN.
        let all =
            a.into_iter().chain(b).fold(f32x4_splat(0.0), |all, floats| f32x4_pmax(all, f32x4_abs(floats)));
        let halves = f32x4_pmax(all, i32x4_shuffle::<2, 3, 0, 1>(all, all));
        f32x4_extract_lane::<0>(f32x4_pmax(halves, i32x4_shuffle::<1, 0, 3, 2>(halves, halves)))
    }

    #[inline(always)]
    fn rounded(self, floats: [v128; 4]) -> ([i8; 16], i32) {
        // NaN becomes 0.
        let [a, b, c, d] = floats.map(|floats| i32x4_trunc_sat_f32x4(f32x4_nearest(floats)));
        let integers = i8x16_narrow_i16x8(i16x8_narrow_i32x4(a, b), i16x8_narrow_i32x4(c, d));
        let sums = i32x4_extadd_pairwise_i16x8(i16x8_extadd_pairwise_i8x16(integers));
        let halves = i32x4_add(sums, i32x4_shuffle::<2, 3, 0, 1>(sums, sums));
        let mut bytes = [0; 16];
        // SAFETY: the array has as many bytes as a vector.
        unsafe { v128_store(bytes.as_mut_ptr().cast(), integers) };
        (bytes, i32x4_extract_lane::<0>(halves) + i32x4_extract_lane::<1>(halves))
    }

    #[inline(always)]
    fn sums(self, floats: [[v128; 4]; 4]) -> [f32; 4] {
        let fours = |four: usize| {
            let [a, b, c, d] = floats.map(|floats| floats[four]);
            let halves =
                |a, b| f32x4_add(i32x4_shuffle::<0, 4, 1, 5>(a, b), i32x4_shuffle::<2, 6, 3, 7>(a, b));
            let (ab, cd) = (halves(a, b), halves(c, d));
            f32x4_add(i32x4_shuffle::<0, 1, 4, 5>(ab, cd), i32x4_shuffle::<2, 3, 6, 7>(ab, cd))
        };
        let sums = f32x4_add(f32x4_add(fours(0), fours(2)), f32x4_add(fours(1), fours(3)));
        let mut array = [0.0; 4];
        // SAFETY: the array has as many bytes as a vector.
        unsafe { v128_store(array.as_mut_ptr().cast(), sums) };
        array
    }

    #[inline(never)]
    fn call<W: Work>(self, work: W) -> W::Output {
        work.run(self)
    }
}
