//! K-quants: blocks of 256 numbers in groups of 16 or 32, whose scales are quantized, too: Q2_K to Q6_K.

use crate::formats::bits::{bytes_of, codes_of};
use crate::formats::search::{Groups, Tries, ZERO, affine, groups, nearest, symmetric, symmetric_descent};
use crate::formats::{Block, Layout, fields, filled, largest, narrow, widen};
use crate::streams::{GroupScales, Parts, Streams};

pub(crate) static Q2_K: Layout =
    Layout::of::<Q2K, _, _>("q2_k", 10, Some(Streams::of_256(2, 0, 0, 16, GroupScales::Nibbles)));
pub(crate) static Q3_K: Layout =
    Layout::of::<Q3K, _, _>("q3_k", 11, Some(Streams::of_256(2, 1, 4, 16, GroupScales::Signed)));
pub(crate) static Q4_K: Layout =
    Layout::of::<Q4K, _, _>("q4_k", 12, Some(Streams::of_256(4, 0, 0, 32, GroupScales::Bytes)));
pub(crate) static Q5_K: Layout =
    Layout::of::<Q5K, _, _>("q5_k", 13, Some(Streams::of_256(4, 1, 0, 32, GroupScales::Bytes)));
pub(crate) static Q6_K: Layout =
    Layout::of::<Q6K, _, _>("q6_k", 14, Some(Streams::of_256(4, 2, 32, 16, GroupScales::Signed)));

fields! {
    /// `scale · s · code - minimum · m`, with 2-bit codes, and a 4-bit s and m per 16 numbers (`block_q2_K`
    /// of ggml).
    struct Q2K {
        /// Byte i: s of group i, then m of group i
        groups: [u8; 16],
        /// Byte i of each 32: code i, then i + 32, i + 64 and i + 96
        codes: [u8; 64],
        scale: [u8; 2],
        minimum: [u8; 2],
    }
}

impl Q2K {
    fn affine(&self) -> Affine<16> {
        Affine {
            scale: self.scale,
            minimum: self.minimum,
            scales: self.groups.map(|group| group & 15),
            minimums: self.groups.map(|group| group >> 4),
            codes: codes_of::<2, 32, 256, _>(&self.codes),
        }
    }
}

impl Block<256, 84> for Q2K {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        self.affine().unpack(numbers);
    }

    fn parts(&self) -> Parts<256> {
        self.affine().parts()
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        const TRIES: Tries = Tries { max: 3.0, first: -0.5, count: 16, absolute: true };

        let numbers = groups::<16, 16>(numbers);
        let affine = Affine::pack(&numbers, &numbers.map(|lanes| lanes.map(f32::abs)), TRIES, 15.0);
        Self {
            groups: std::array::from_fn(|group| affine.scales[group] | affine.minimums[group] << 4),
            codes: bytes_of::<2, 32, _, _>(&affine.codes),
            scale: affine.scale,
            minimum: affine.minimum,
        }
    }
}

fields! {
    /// `scale · (s - 32) · (code - 4)`, with 3-bit codes, and a 6-bit s per 16 numbers (`block_q3_K` of
    /// ggml).
    struct Q3K {
        /// Byte i: the highest bits of codes i, i + 32, .. i + 224
        high: [u8; 32],
        /// Byte i of each 32: the low bits of code i, then of i + 32, i + 64 and i + 96
        low: [u8; 64],
        /// Byte i: the low bits of s of group i, then of group i + 8
        low_scales: [u8; 8],
        /// Byte i: the 2 high bits of s of groups i, i + 4, i + 8 and i + 12
        high_scales: [u8; 4],
        scale: [u8; 2],
    }
}

impl Q3K {
    fn scales_and_codes(&self) -> ([i8; 16], [u8; 256]) {
        let scales = joined(
            codes_of::<4, 8, 16, _>(&self.low_scales),
            codes_of::<2, 4, 16, _>(&self.high_scales).map(|high| high << 4),
        );
        let codes = joined(
            codes_of::<2, 32, 256, _>(&self.low),
            codes_of::<1, 32, 256, _>(&self.high).map(|high| high << 2),
        );
        (scales.map(|scale| scale as i8 - 32), codes)
    }
}

impl Block<256, 110> for Q3K {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        let (scales, codes) = self.scales_and_codes();
        unpack_symmetric(self.scale, scales, 4.0, &codes, numbers);
    }

    fn parts(&self) -> Parts<256> {
        let (scales, codes) = self.scales_and_codes();
        symmetric_parts(self.scale, scales, codes)
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        let numbers = groups(numbers);
        let (scale, scales, codes) = pack_symmetric(&numbers, symmetric_descent(&numbers, 4.0), 32.0, 4.0);
        let scales = scales.map(|scale| (scale + 32) as u8);
        let codes = codes.map(|code| (code + 4) as u8);
        Self {
            high: bytes_of::<1, 32, _, _>(&codes.map(|code| code >> 2)),
            low: bytes_of::<2, 32, _, _>(&codes),
            low_scales: bytes_of::<4, 8, _, _>(&scales),
            high_scales: bytes_of::<2, 4, _, _>(&scales.map(|scale| scale >> 4)),
            scale,
        }
    }
}

fields! {
    /// `scale · s · code - minimum · m`, with 4-bit codes, and a 6-bit s and m per 32 numbers (`block_q4_K`
    /// of ggml).
    struct Q4K {
        scale: [u8; 2],
        minimum: [u8; 2],
        /// See [`six_bits`].
        groups: [u8; 12],
        /// Byte i of each 32: code i, then i + 32
        codes: [u8; 128],
    }
}

impl Q4K {
    fn affine(&self) -> Affine<8> {
        let (scales, minimums) = six_bits(&self.groups);
        let codes = codes_of::<4, 32, 256, _>(&self.codes);
        Affine { scale: self.scale, minimum: self.minimum, scales, minimums, codes }
    }
}

impl Block<256, 144> for Q4K {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        self.affine().unpack(numbers);
    }

    fn parts(&self) -> Parts<256> {
        self.affine().parts()
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        const TRIES: Tries = Tries { max: 15.0, first: -1.0, count: 21, absolute: false };

        let numbers = groups::<32, 8>(numbers);
        let affine = Affine::pack(&numbers, &weights(&numbers), TRIES, 63.0);
        Self {
            scale: affine.scale,
            minimum: affine.minimum,
            groups: six_bits_bytes(&affine.scales, &affine.minimums),
            codes: bytes_of::<4, 32, _, _>(&affine.codes),
        }
    }
}

fields! {
    /// `scale · s · code - minimum · m`, with 5-bit codes, and a 6-bit s and m per 32 numbers (`block_q5_K`
    /// of ggml).
    struct Q5K {
        scale: [u8; 2],
        minimum: [u8; 2],
        /// See [`six_bits`].
        groups: [u8; 12],
        /// Byte i: the highest bits of codes i, i + 32, .. i + 224
        high: [u8; 32],
        /// Byte i of each 32: the low bits of code i, then of i + 32
        low: [u8; 128],
    }
}

impl Q5K {
    fn affine(&self) -> Affine<8> {
        let (scales, minimums) = six_bits(&self.groups);
        let codes = joined(
            codes_of::<4, 32, 256, _>(&self.low),
            codes_of::<1, 32, 256, _>(&self.high).map(|high| high << 4),
        );
        Affine { scale: self.scale, minimum: self.minimum, scales, minimums, codes }
    }
}

impl Block<256, 176> for Q5K {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        self.affine().unpack(numbers);
    }

    fn parts(&self) -> Parts<256> {
        self.affine().parts()
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        const TRIES: Tries = Tries { max: 31.0, first: -0.5, count: 16, absolute: false };

        let numbers = groups::<32, 8>(numbers);
        let affine = Affine::pack(&numbers, &weights(&numbers), TRIES, 63.0);
        Self {
            scale: affine.scale,
            minimum: affine.minimum,
            groups: six_bits_bytes(&affine.scales, &affine.minimums),
            high: bytes_of::<1, 32, _, _>(&affine.codes.map(|code| code >> 4)),
            low: bytes_of::<4, 32, _, _>(&affine.codes),
        }
    }
}

fields! {
    /// `scale · s · (code - 32)`, with 6-bit codes, and a signed byte s per 16 numbers (`block_q6_K` of
    /// ggml).
    struct Q6K {
        /// Byte i of each 64: the low bits of code i, then of i + 64
        low: [u8; 128],
        /// Byte i of each 32: the 2 high bits of code i, then of i + 32, i + 64 and i + 96
        high: [u8; 64],
        scales: [u8; 16],
        scale: [u8; 2],
    }
}

impl Q6K {
    fn scales_and_codes(&self) -> ([i8; 16], [u8; 256]) {
        let codes = joined(
            codes_of::<4, 64, 256, _>(&self.low),
            codes_of::<2, 32, 256, _>(&self.high).map(|high| high << 4),
        );
        (self.scales.map(|scale| scale as i8), codes)
    }
}

impl Block<256, 210> for Q6K {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        let (scales, codes) = self.scales_and_codes();
        unpack_symmetric(self.scale, scales, 32.0, &codes, numbers);
    }

    fn parts(&self) -> Parts<256> {
        let (scales, codes) = self.scales_and_codes();
        symmetric_parts(self.scale, scales, codes)
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        let numbers = groups(numbers);
        let (scale, scales, codes) = pack_symmetric(&numbers, symmetric(&numbers, 32.0), 128.0, 32.0);
        let codes = codes.map(|code| (code + 32) as u8);
        Self {
            low: bytes_of::<4, 64, _, _>(&codes),
            high: bytes_of::<2, 32, _, _>(&codes.map(|code| code >> 4)),
            scales: scales.map(|scale| scale as u8),
            scale,
        }
    }
}

/// A block of `G` groups with scales and minimums, with one byte per code.
struct Affine<const G: usize> {
    /// Common factor of the scales, a float16.
    scale: [u8; 2],
    /// Common factor of the minimums, a float16.
    minimum: [u8; 2],
    /// Multiples of `scale`, one per group.
    scales: [u8; G],
    /// Multiples of `minimum`, one per group.
    minimums: [u8; G],
    codes: [u8; 256],
}

impl<const G: usize> Affine<G> {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        let (scale, minimum) = (widen(self.scale), widen(self.minimum));
        let factors = self.scales.iter().zip(&self.minimums);
        let groups = numbers.chunks_exact_mut(256 / G).zip(self.codes.chunks_exact(256 / G));
        for ((numbers, codes), (&s, &m)) in groups.zip(factors) {
            let (scale, minimum) = (scale * f32::from(s), minimum * f32::from(m));
            for (number, &code) in numbers.iter_mut().zip(codes) {
                *number = scale * f32::from(code) - minimum;
            }
        }
    }

    fn parts(&self) -> Parts<256> {
        Parts {
            codes: self.codes,
            scales: filled(self.scales),
            minimums: filled(self.minimums),
            scale: u16::from_le_bytes(self.scale).into(),
            minimum: u16::from_le_bytes(self.minimum),
        }
    }

    /// Quantizes scales and minimums to codes up to `largest_code`. Then quantizes the numbers with the
    /// scales and minimums that these codes represent.
    fn pack<const N: usize>(
        numbers: &Groups<N, G>,
        weights: &Groups<N, G>,
        tries: Tries,
        largest_code: f32,
    ) -> Self {
        let (scales, minimums) = affine(numbers, weights, tries);
        let (scale, scales) = factors(scales, largest_code);
        let (minimum, minimums) = factors(minimums.map(|minimum| -minimum), largest_code);
        let group_scales = scales.map(|s| widen(scale) * f32::from(s));
        let group_minimums = minimums.map(|m| widen(minimum) * f32::from(m));
        let mut codes = [0; 256];
        for (i, lanes) in numbers.iter().enumerate() {
            for group in 0..G {
                let code = (lanes[group] + group_minimums[group]) / group_scales[group];
                let code = if group_scales[group] == 0.0 { 0.0 } else { code };
                codes[group * N + i] = nearest(code, 0.0, tries.max) as u8;
            }
        }
        Self { scale, minimum, scales, minimums, codes }
    }
}

/// Expresses non-negative numbers as integers up to `largest` times a float16.
fn factors<const G: usize>(numbers: [f32; G], largest: f32) -> ([u8; 2], [u8; G]) {
    let max = numbers.iter().fold(0.0_f32, |max, &x| max.max(x));
    let inverse = if max > 0.0 { largest / max } else { 0.0 };
    (narrow(max / largest), numbers.map(|x| nearest(inverse * x, 0.0, largest) as u8))
}

/// Returns the weight of each number's error: the root mean square of its group, plus its absolute value.
fn weights<const N: usize, const G: usize>(numbers: &Groups<N, G>) -> Groups<N, G> {
    let mut squares = [0.0; G];
    for x in numbers {
        for lane in 0..G {
            squares[lane] += x[lane] * x[lane];
        }
    }
    let mean = squares.map(|sum| (sum / N as f32).sqrt());
    numbers.map(|x| std::array::from_fn(|lane| mean[lane] + x[lane].abs()))
}

/// Unpacks groups of 16 numbers as `scale · s · (code - half)`.
fn unpack_symmetric(
    scale: [u8; 2],
    scales: [i8; 16],
    half: f32,
    codes: &[u8; 256],
    numbers: &mut [f32; 256],
) {
    let scale = widen(scale);
    let groups = numbers.as_chunks_mut::<16>().0.iter_mut().zip(codes.as_chunks::<16>().0);
    for ((numbers, codes), s) in groups.zip(scales) {
        let scale = scale * f32::from(s);
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = scale * (f32::from(code) - half);
        }
    }
}

/// Returns the parts of a block, given the bits of its float16 scale, the scales of groups, and the codes.
fn symmetric_parts(scale: [u8; 2], scales: [i8; 16], codes: [u8; 256]) -> Parts<256> {
    let scale = u16::from_le_bytes(scale).into();
    Parts { codes, scales: scales.map(|s| s as u8), scale, ..Parts::default() }
}

/// Quantizes scales to codes from `-largest_code` to `largest_code - 1`. Then quantizes the numbers to codes
/// from `-half` to `half - 1`, with the scales that these codes represent.
///
/// Returns the factor of all scales, their codes, and the codes of the numbers.
fn pack_symmetric(
    numbers: &Groups<16, 16>,
    scales: [f32; 16],
    largest_code: f32,
    half: f32,
) -> ([u8; 2], [i8; 16], [i8; 256]) {
    let largest_scale = largest(&scales);
    if largest_scale.abs() < ZERO {
        return (narrow(0.0), [0; 16], [0; 256]);
    }
    let to_code = -largest_code / largest_scale;
    let scale = narrow(1.0 / to_code);
    let scales = scales.map(|s| nearest(to_code * s, -largest_code, largest_code - 1.0) as i8);
    let group_scales = scales.map(|s| widen(scale) * f32::from(s));
    let mut codes = [0; 256];
    for (i, lanes) in numbers.iter().enumerate() {
        for group in 0..16 {
            let code = match group_scales[group] == 0.0 {
                true => 0.0,
                false => lanes[group] / group_scales[group],
            };
            codes[group * 16 + i] = nearest(code, -half, half - 1.0) as i8;
        }
    }
    (scale, scales, codes)
}

/// Combines the low and high bits of codes.
fn joined<const N: usize>(mut low: [u8; N], high: [u8; N]) -> [u8; N] {
    for (low, high) in low.iter_mut().zip(high) {
        *low |= high;
    }
    low
}

/// Unpacks eight scales and eight minimums of 6 bits from 12 bytes.
///
/// Bytes 0 to 3 are scales 0 to 3, and bytes 4 to 7 are minimums 0 to 3, in their low 6 bits. Their upper 2
/// bits are the high bits of scales and minimums 4 to 7. Bytes 8 to 11 hold the low 4 bits of these scales in
/// their lower half, and of these minimums in their upper half.
fn six_bits(bytes: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let low = |group: usize, minimum: usize| bytes[4 * minimum + group] & 63;
    let high = |group: usize, minimum: usize| {
        bytes[8 + group] >> (4 * minimum) & 15 | bytes[4 * minimum + group] >> 6 << 4
    };
    let both = |minimum: usize| {
        std::array::from_fn(|group| match group < 4 {
            true => low(group, minimum),
            false => high(group - 4, minimum),
        })
    };
    (both(0), both(1))
}

/// The inverse of [`six_bits`].
fn six_bits_bytes(scales: &[u8; 8], minimums: &[u8; 8]) -> [u8; 12] {
    std::array::from_fn(|byte| match byte {
        0..4 => scales[byte] | scales[byte + 4] >> 4 << 6,
        4..8 => minimums[byte - 4] | minimums[byte] >> 4 << 6,
        _ => scales[byte - 4] & 15 | minimums[byte - 4] << 4,
    })
}
