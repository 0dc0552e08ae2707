//! Vectors of sixteen lanes, on the instructions that the machine has.
//!
//! This is for code that is written once, over [`Lanes`], and compiled for each set of instructions. Most
//! important are products of bytes and float16 numbers, which the crate `pulp` does not have.
//!
//! **Invariant:** functions of instructions are `unsafe`, and are called only in this crate. A value of lanes
//! exists only if the machine has its instructions.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm32;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::atomic::{AtomicU8, Ordering};

/// Distance in bytes at which [`Lanes::prefetch`] requests memory: the amount that arrives during the latency
/// of one access.
pub const AHEAD: usize = 4096;

/// Sixteen lanes of 32 bits.
pub trait Lanes: Copy {
    /// Sixteen integers, or sixteen groups of four bytes.
    type Words: Copy;
    /// Sixteen float32 numbers.
    type Floats: Copy;
    /// Sums of pairs of products of bytes.
    type Pairs: Copy;

    /// Number of vectors of sixteen lanes that fit in the registers.
    const REGISTERS: usize;

    /// Largest sum of pairs; 0 if adding pairs is no faster than [`dot`](Self::dot).
    const LARGEST_PAIR: usize;

    /// Whether [`dot_wide`](Self::dot_wide) subtracts 128 from each byte.
    const SUBTRACTS_128: bool;

    fn words(self, words: &[u32; 16]) -> Self::Words;

    fn word_array(self, words: Self::Words) -> [u32; 16];

    /// Puts an integer into every lane.
    fn integers(self, integer: i32) -> Self::Words;

    fn shift_right(self, words: Self::Words, by: u32) -> Self::Words;

    fn shift_left(self, words: Self::Words, by: u32) -> Self::Words;

    fn and(self, words: Self::Words, mask: u32) -> Self::Words;

    fn or(self, a: Self::Words, b: Self::Words) -> Self::Words;

    /// Looks up the entries of a table by bytes from 0 to 15.
    fn look_up(self, table: &[u8; 16], bytes: Self::Words) -> Self::Words;

    /// Returns the words at even places of the concatenation of `a` and `b`, and those at odd places.
    fn unzip(self, a: Self::Words, b: Self::Words) -> [Self::Words; 2];

    /// Adds the dot product of four bytes, up to 127, with four signed bytes, from -127 up, which all lanes
    /// share.
    fn dot(self, sums: Self::Words, bytes: Self::Words, x: i32) -> Self::Words;

    /// Returns sums of pairs of products that are 0.
    fn no_pairs(self) -> Self::Pairs;

    /// Adds the products of [`dot`](Self::dot), summing only adjacent pairs; see
    /// [`LARGEST_PAIR`](Self::LARGEST_PAIR).
    fn add_pairs(self, pairs: Self::Pairs, bytes: Self::Words, x: i32) -> Self::Pairs;

    /// Adds sums of pairs to `sums`.
    fn sum_pairs(self, sums: Self::Words, pairs: Self::Pairs) -> Self::Words;

    /// Adds the dot product of four bytes with four signed bytes, from -127 up, which all lanes share; see
    /// [`SUBTRACTS_128`](Self::SUBTRACTS_128).
    fn dot_wide(self, sums: Self::Words, bytes: Self::Words, x: i32) -> Self::Words;

    /// Converts integers to floats.
    fn to_floats(self, integers: Self::Words) -> Self::Floats;

    /// Puts a float into every lane.
    fn splat(self, float: f32) -> Self::Floats;

    fn floats(self, floats: &[f32; 16]) -> Self::Floats;

    /// Selects floats by indices from 0 to 15.
    fn pick(self, floats: &[f32; 16], lanes: Self::Words) -> Self::Floats;

    /// Converts float16 numbers, given by their bits.
    fn halves(self, halves: &[u16; 16]) -> Self::Floats;

    /// Converts bfloat16 numbers, given by their bits.
    fn bfloats(self, bfloats: &[u16; 16]) -> Self::Floats;

    fn bytes(self, bytes: &[u8; 16]) -> Self::Floats;

    fn signed_bytes(self, bytes: &[u8; 16]) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// Computes `a b + c`, rounded once if the machine can.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    fn array(self, floats: Self::Floats) -> [f32; 16];

    /// Returns the largest absolute value of all lanes; 0 if all are NaN.
    fn largest(self, floats: [Self::Floats; 2]) -> f32;

    /// Rounds numbers from -127 to 127 to integers, halves to even ones, and also returns their sum. NaN
    /// becomes 0; larger numbers become anything.
    fn rounded(self, floats: Self::Floats) -> ([i8; 16], i32);

    /// Sums the lanes of each vector. Lanes 0 to 3 are added as `(0 + 2) + (1 + 3)`, and so are each next
    /// four; the four sums are added in the same order.
    fn sums(self, floats: [Self::Floats; 4]) -> [f32; 4];

    /// Requests the memory [`AHEAD`] bytes after `data`, for code that reads memory in order: hardware
    /// prefetchers stop at the end of a page. Does nothing if there is no stable function for it.
    #[inline(always)]
    fn prefetch<T>(self, _data: &[T]) {}

    /// Runs `work` in a function of its own, because a function that is too large to be inlined keeps its
    /// vectors in memory.
    fn call<W: Work>(self, work: W) -> W::Output;
}

/// A computation over lanes.
pub trait Work {
    type Output;

    /// Runs the computation. Implementations must be inlined, so that they are compiled for the instructions
    /// of `lanes`.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// Sets of instructions that lanes exist for, in ascending order of quality.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Instructions {
    /// The instructions that every machine has.
    Plain,
    /// 128 bits in WebAssembly.
    Simd128,
    Neon,
    /// NEON and its dot products.
    NeonDotprod,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX2, FMA, F16C and AVX-VNNI.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Instructions {
    pub const ALL: [Self; 7] =
        [Self::Plain, Self::Simd128, Self::Neon, Self::NeonDotprod, Self::Avx2, Self::AvxVnni, Self::Avx512];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Simd128 => "simd128",
            Self::Neon => "neon",
            Self::NeonDotprod => "neon-dotprod",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this machine has the instructions.
    pub fn are_here(self) -> bool {
        match self {
            Self::Plain => true,
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Self::Simd128 => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => aarch64::Neon::<false>::detect().is_some(),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => aarch64::Neon::<true>::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => x86::Avx2::<false>::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => x86::Avx2::<true>::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => x86::Avx512::detect().is_some(),
            #[allow(unreachable_patterns, reason = "which instructions remain depends on the machine")]
            _ => false,
        }
    }
}

/// Best set of instructions that [`run`] may use.
static LIMIT: AtomicU8 = AtomicU8::new(Instructions::Avx512 as u8);

/// Limits [`run`] to instructions no better than `best` from now on, as on machines without better ones.
pub fn limit(best: Instructions) {
    LIMIT.store(best as u8, Ordering::Relaxed);
}

/// Returns the set of instructions that [`run`] uses.
pub fn best() -> Instructions {
    let limit = LIMIT.load(Ordering::Relaxed);
    let allowed = |instructions: &Instructions| *instructions as u8 <= limit && instructions.are_here();
    Instructions::ALL.into_iter().rev().find(allowed).unwrap_or(Instructions::Plain)
}

/// Runs `work` with the best lanes of this machine.
pub fn run<W: Work>(work: W) -> W::Output {
    match best() {
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Instructions::Simd128 => return work.run(wasm32::Simd128),
        #[cfg(target_arch = "aarch64")]
        Instructions::NeonDotprod => {
            if let Some(lanes) = aarch64::Neon::<true>::detect() {
                return lanes.run(work);
            }
        }
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon => {
            if let Some(lanes) = aarch64::Neon::<false>::detect() {
                return lanes.run(work);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => {
            if let Some(lanes) = x86::Avx512::detect() {
                return lanes.run(work);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Instructions::AvxVnni => {
            if let Some(lanes) = x86::Avx2::<true>::detect() {
                return lanes.run(work);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => {
            if let Some(lanes) = x86::Avx2::<false>::detect() {
                return lanes.run(work);
            }
        }
        _ => {}
    }
    work.run(portable::Portable)
}
