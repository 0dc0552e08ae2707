//! Lanes for every machine, in plain Rust ([`Instructions::Plain`](crate::Instructions::Plain)).

use half::bf16;

use crate::{Lanes, Work};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

impl Lanes for Portable {
    type Words = [u32; 16];
    type Floats = [f32; 16];
    type Pairs = [u32; 16];

    const REGISTERS: usize = 4;
    const LARGEST_PAIR: usize = 0;
    const SUBTRACTS_128: bool = true;

    #[inline(always)]
    fn words(self, words: &[u32; 16]) -> [u32; 16] {
        *words
    }

    #[inline(always)]
    fn word_array(self, words: [u32; 16]) -> [u32; 16] {
        words
    }

    #[inline(always)]
    fn integers(self, integer: i32) -> [u32; 16] {
        [integer.cast_unsigned(); 16]
    }

    #[inline(always)]
    fn shift_right(self, words: [u32; 16], by: u32) -> [u32; 16] {
        words.map(|word| word >> by)
    }

    #[inline(always)]
    fn shift_left(self, words: [u32; 16], by: u32) -> [u32; 16] {
        words.map(|word| word << by)
    }

    #[inline(always)]
    fn and(self, words: [u32; 16], mask: u32) -> [u32; 16] {
        words.map(|word| word & mask)
    }

    #[inline(always)]
    fn or(self, a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|lane| a[lane] | b[lane])
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16], bytes: [u32; 16]) -> [u32; 16] {
        bytes.map(|word| u32::from_le_bytes(word.to_le_bytes().map(|byte| table[usize::from(byte & 15)])))
    }

    #[inline(always)]
    fn unzip(self, a: [u32; 16], b: [u32; 16]) -> [[u32; 16]; 2] {
        let at = |place: usize| if place < 16 { a[place] } else { b[place - 16] };
        [0, 1].map(|odd| std::array::from_fn(|lane| at(2 * lane + odd)))
    }

    #[inline(always)]
    fn dot(self, sums: [u32; 16], bytes: [u32; 16], x: i32) -> [u32; 16] {
        dot(sums, bytes, x, 0)
    }

    #[inline(always)]
    fn no_pairs(self) -> [u32; 16] {
        self.integers(0)
    }

    #[inline(always)]
    fn add_pairs(self, pairs: [u32; 16], bytes: [u32; 16], x: i32) -> [u32; 16] {
        self.dot(pairs, bytes, x)
    }

    #[inline(always)]
    fn sum_pairs(self, sums: [u32; 16], pairs: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|lane| sums[lane].wrapping_add(pairs[lane]))
    }

    #[inline(always)]
    fn dot_wide(self, sums: [u32; 16], bytes: [u32; 16], x: i32) -> [u32; 16] {
        dot(sums, bytes, x, 128)
    }

    #[inline(always)]
    fn to_floats(self, integers: [u32; 16]) -> [f32; 16] {
        integers.map(|integer| integer.cast_signed() as f32)
    }

    #[inline(always)]
    fn splat(self, float: f32) -> [f32; 16] {
        [float; 16]
    }

    #[inline(always)]
    fn floats(self, floats: &[f32; 16]) -> [f32; 16] {
        *floats
    }

    #[inline(always)]
    fn pick(self, floats: &[f32; 16], lanes: [u32; 16]) -> [f32; 16] {
        lanes.map(|lane| floats[lane as usize & 15])
    }

    #[inline(always)]
    fn halves(self, halves: &[u16; 16]) -> [f32; 16] {
        halves.map(float_of_half)
    }

    #[inline(always)]
    fn bfloats(self, bfloats: &[u16; 16]) -> [f32; 16] {
        bfloats.map(|bits| bf16::from_bits(bits).to_f32())
    }

    #[inline(always)]
    fn bytes(self, bytes: &[u8; 16]) -> [f32; 16] {
        bytes.map(f32::from)
    }

    #[inline(always)]
    fn signed_bytes(self, bytes: &[u8; 16]) -> [f32; 16] {
        bytes.map(|byte| f32::from(byte.cast_signed()))
    }

    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }

    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
    }

    #[inline(always)]
    fn array(self, floats: [f32; 16]) -> [f32; 16] {
        floats
    }

    #[inline(always)]
    fn largest(self, floats: [[f32; 16]; 2]) -> f32 {
        let mut largest = [0.0f32; 16];
        for floats in floats {
            for lane in 0..16 {
                let size = floats[lane].abs();
                largest[lane] = if size > largest[lane] { size } else { largest[lane] };
            }
        }
        largest.iter().fold(0.0, |largest, &size| if size > largest { size } else { largest })
    }

    #[inline(always)]
    fn rounded(self, floats: [f32; 16]) -> ([i8; 16], i32) {
        /// Adding this rounds to an integer, which is then in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let mut bytes = [0; 16];
        for lane in 0..16 {
            let float = if floats[lane].is_nan() { 0.0 } else { floats[lane] };
            bytes[lane] = (float + ROUND).to_bits() as i8;
        }
        (bytes, bytes.iter().map(|&byte| i32::from(byte)).sum())
    }

    #[inline(always)]
    fn sums(self, floats: [[f32; 16]; 4]) -> [f32; 4] {
        let sum = |[a, b, c, d]: [f32; 4]| (a + c) + (b + d);
        floats.map(|floats| {
            let fours = floats.as_chunks().0;
            sum([sum(fours[0]), sum(fours[1]), sum(fours[2]), sum(fours[3])])
        })
    }

    #[inline(never)]
    fn call<W: Work>(self, work: W) -> W::Output {
        work.run(self)
    }
}

/// Converts a float16 number in a few instructions that compilers make vectors of: the bits of its exponent
/// and fraction, as those of a float32 number, are that number by 2^112 too small.
#[inline(always)]
fn float_of_half(bits: u16) -> f32 {
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    const INFINITY: u32 = 0x7f80_0000;
    let small = u32::from(bits & 0x7fff) << 13;
    let is_finite = bits & 0x7c00 != 0x7c00;
    let magnitude = if is_finite { (f32::from_bits(small) * SCALE).to_bits() } else { small | INFINITY };
    f32::from_bits(magnitude | u32::from(bits & 0x8000) << 16)
}

/// Adds to each sum the dot product of the four unsigned bytes of its lane, minus `subtracted` each, and the
/// four signed bytes of `x`.
#[inline(always)]
fn dot(sums: [u32; 16], bytes: [u32; 16], x: i32, subtracted: i32) -> [u32; 16] {
    let x = x.to_le_bytes().map(|byte| i32::from(byte.cast_signed()));
    std::array::from_fn(|lane| {
        let bytes = bytes[lane].to_le_bytes().map(|byte| i32::from(byte) - subtracted);
        let products = bytes[0] * x[0] + bytes[1] * x[1] + bytes[2] * x[2] + bytes[3] * x[3];
        sums[lane].wrapping_add(products.cast_unsigned())
    })
}
