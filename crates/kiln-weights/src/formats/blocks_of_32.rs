//! Blocks of 32 numbers with a scale, and a minimum in some formats: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

use crate::formats::bits::{bytes_of, codes_of};
use crate::formats::{Block, Layout, fields, inverse, largest, narrow, widen};
use crate::streams::{Parts, Streams};

pub(crate) static Q4_0: Layout = Layout::of::<Q4_0, _, _>("q4_0", 2, Some(Streams::of_32(4, 0, 8, false)));
pub(crate) static Q4_1: Layout = Layout::of::<Q4_1, _, _>("q4_1", 3, Some(Streams::of_32(4, 0, 0, true)));
pub(crate) static Q5_0: Layout = Layout::of::<Q5_0, _, _>("q5_0", 6, Some(Streams::of_32(4, 1, 16, false)));
pub(crate) static Q5_1: Layout = Layout::of::<Q5_1, _, _>("q5_1", 7, Some(Streams::of_32(4, 1, 0, true)));
pub(crate) static Q8_0: Layout = Layout::of::<Q8_0, _, _>("q8_0", 8, Some(Streams::of_32(8, 0, 128, false)));

fields! {
    /// `(code - 8) · scale`, with 4-bit codes (`block_q4_0` of ggml).
    struct Q4_0 {
        scale: [u8; 2],
        /// Byte i: code i, then code i + 16
        codes: [u8; 16],
    }
}

impl Block<32, 18> for Q4_0 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        centered(widen(self.scale), 8.0, &codes_of::<4, 16, 32, _>(&self.codes), numbers);
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let (scale, codes) = symmetric(numbers, 8.0);
        Self { scale, codes: bytes_of::<4, 16, _, _>(&codes) }
    }

    fn parts(&self) -> Parts<32> {
        let codes = codes_of::<4, 16, 32, _>(&self.codes);
        Parts { codes, scale: u16::from_le_bytes(self.scale).into(), ..Parts::default() }
    }
}

fields! {
    /// `code · scale + minimum`, with 4-bit codes (`block_q4_1` of ggml).
    struct Q4_1 {
        scale: [u8; 2],
        minimum: [u8; 2],
        /// Byte i: code i, then code i + 16
        codes: [u8; 16],
    }
}

impl Block<32, 20> for Q4_1 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        affine(widen(self.scale), widen(self.minimum), &codes_of::<4, 16, 32, _>(&self.codes), numbers);
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let (scale, minimum, codes) = between_extremes(numbers, 15.0);
        Self { scale, minimum, codes: bytes_of::<4, 16, _, _>(&codes) }
    }

    fn parts(&self) -> Parts<32> {
        let codes = codes_of::<4, 16, 32, _>(&self.codes);
        let (scale, minimum) = (u16::from_le_bytes(self.scale).into(), u16::from_le_bytes(self.minimum));
        Parts { codes, scale, minimum, ..Parts::default() }
    }
}

fields! {
    /// `(code - 16) · scale`, with 5-bit codes (`block_q5_0` of ggml).
    struct Q5_0 {
        scale: [u8; 2],
        /// Bit i: the highest bit of code i
        high: [u8; 4],
        /// Byte i: the low bits of code i, then those of code i + 16
        low: [u8; 16],
    }
}

impl Block<32, 22> for Q5_0 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        centered(widen(self.scale), 16.0, &five_bits(&self.high, &self.low), numbers);
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let (scale, codes) = symmetric(numbers, 16.0);
        let (high, low) = split_five_bits(&codes);
        Self { scale, high, low }
    }

    fn parts(&self) -> Parts<32> {
        let codes = five_bits(&self.high, &self.low);
        Parts { codes, scale: u16::from_le_bytes(self.scale).into(), ..Parts::default() }
    }
}

fields! {
    /// `code · scale + minimum`, with 5-bit codes (`block_q5_1` of ggml).
    struct Q5_1 {
        scale: [u8; 2],
        minimum: [u8; 2],
        /// Bit i: the highest bit of code i
        high: [u8; 4],
        /// Byte i: the low bits of code i, then those of code i + 16
        low: [u8; 16],
    }
}

impl Block<32, 24> for Q5_1 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        affine(widen(self.scale), widen(self.minimum), &five_bits(&self.high, &self.low), numbers);
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let (scale, minimum, codes) = between_extremes(numbers, 31.0);
        let (high, low) = split_five_bits(&codes);
        Self { scale, minimum, high, low }
    }

    fn parts(&self) -> Parts<32> {
        let codes = five_bits(&self.high, &self.low);
        let (scale, minimum) = (u16::from_le_bytes(self.scale).into(), u16::from_le_bytes(self.minimum));
        Parts { codes, scale, minimum, ..Parts::default() }
    }
}

fields! {
    /// `code · scale`, with signed 8-bit codes (`block_q8_0` of ggml).
    struct Q8_0 {
        scale: [u8; 2],
        codes: [u8; 32],
    }
}

impl Block<32, 34> for Q8_0 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        let scale = widen(self.scale);
        for (number, &code) in numbers.iter_mut().zip(&self.codes) {
            *number = scale * f32::from(code as i8);
        }
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let scale = largest(numbers).abs() / 127.0;
        let inverse = inverse(scale);
        Self { scale: narrow(scale), codes: numbers.map(|x| round(x * inverse) as i8 as u8) }
    }

    fn parts(&self) -> Parts<32> {
        let codes = self.codes.map(|code| code ^ 128);
        Parts { codes, scale: u16::from_le_bytes(self.scale).into(), ..Parts::default() }
    }
}

/// Rounds to the nearest integer, and halves away from 0, as in C. `f32::round` calls a function on
/// processors without an instruction for it.
fn round(x: f32) -> f32 {
    // With 0.5, the largest number below 0.5 would be rounded up to 1.
    const BELOW_HALF: f32 = 0.5_f32.next_down();
    (x + BELOW_HALF.copysign(x)) as i32 as f32
}

/// Computes `(code - half) · scale`.
fn centered(scale: f32, half: f32, codes: &[u8; 32], numbers: &mut [f32; 32]) {
    for (number, &code) in numbers.iter_mut().zip(codes) {
        *number = scale * (f32::from(code) - half);
    }
}

/// Computes `code · scale + minimum`.
fn affine(scale: f32, minimum: f32, codes: &[u8; 32], numbers: &mut [f32; 32]) {
    for (number, &code) in numbers.iter_mut().zip(codes) {
        *number = scale * f32::from(code) + minimum;
    }
}

/// Returns the scale that maps the number with the largest absolute value to `-half`, and the codes from 0 to
/// `2 · half - 1`.
fn symmetric(numbers: &[f32; 32], half: f32) -> ([u8; 2], [u8; 32]) {
    let scale = largest(numbers) / -half;
    let inverse = inverse(scale);
    // The sum is not negative, so truncation rounds to the nearest integer.
    let codes = numbers.map(|x| (x * inverse + (half + 0.5)).min(2.0 * half - 1.0) as u8);
    (narrow(scale), codes)
}

/// Returns the scale and the minimum that map the smallest and the largest number to the codes 0 and `max`,
/// and the codes.
fn between_extremes(numbers: &[f32; 32], max: f32) -> ([u8; 2], [u8; 2], [u8; 32]) {
    let low = numbers.iter().fold(f32::MAX, |low, &x| if x < low { x } else { low });
    let high = numbers.iter().fold(f32::MIN, |high, &x| if x > high { x } else { high });
    let scale = (high - low) / max;
    let inverse = inverse(scale);
    let codes = numbers.map(|x| ((x - low) * inverse + 0.5).min(max) as u8);
    (narrow(scale), narrow(low), codes)
}

fn five_bits(high: &[u8; 4], low: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    let mut codes = codes_of::<4, 16, 32, _>(low);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (high >> i & 1) as u8 * 16;
    }
    codes
}

fn split_five_bits(codes: &[u8; 32]) -> ([u8; 4], [u8; 16]) {
    let high = codes.iter().enumerate().fold(0, |high, (i, code)| high | u32::from(code >> 4) << i);
    (high.to_le_bytes(), bytes_of::<4, 16, _, _>(codes))
}
