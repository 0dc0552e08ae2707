//! Blocks whose codes are indices into a table of 16 values: IQ4_NL, IQ4_XS, MXFP4.

use half::bf16;

use crate::formats::bits::{bytes_of, codes_of};
use crate::formats::search::{best_fit, groups, nearest};
use crate::formats::{Block, Fields, Layout, fields, filled, inverse, largest, narrow, widen};
use crate::streams::{GroupScales, Parts, ScaleType, Streams};

pub(crate) static IQ4_NL: Layout =
    Layout { pack: pack_non_linear, ..Layout::of::<Iq4Nl, _, _>("iq4_nl", 20, Some(STREAMS)) };
pub(crate) static IQ4_XS: Layout = Layout::of::<Iq4Xs, _, _>(
    "iq4_xs",
    23,
    Some(Streams::of_256(4, 0, 0, 32, GroupScales::Signed).with_table(Table::NonLinear)),
);
pub(crate) static MXFP4: Layout =
    Layout { largest: Some(f32::MAX), ..Layout::of::<Mxfp4, _, _>("mxfp4", 39, Some(MX_STREAMS)) };

const STREAMS: Streams = Streams::of_32(4, 0, 0, false).with_table(Table::NonLinear);

const MX_STREAMS: Streams =
    Streams { scale: ScaleType::Bf16, ..Streams::of_32(4, 0, 0, false).with_table(Table::E2M1) };

/// A table of the values of 4-bit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Table {
    /// Table of IQ4_NL and IQ4_XS
    NonLinear,
    /// Table of MXFP4
    E2M1,
    /// Table of bitsandbytes' NF4: quantiles of a normal distribution, from -1 to 1
    Nf4,
    /// Table of bitsandbytes' FP4: 4-bit floats, the largest of which is 1
    Fp4,
}

impl Table {
    /// Returns the entries.
    pub const fn numbers(self) -> [f32; 16] {
        match self {
            Self::Nf4 => NF4,
            Self::Fp4 => FP4,
            Self::NonLinear => widened(&NON_LINEAR),
            Self::E2M1 => widened(&E2M1),
        }
    }

    /// Returns the entries, if all are integers.
    pub const fn integers(self) -> Option<&'static [i8; 16]> {
        match self {
            Self::NonLinear => Some(&NON_LINEAR),
            Self::E2M1 => Some(&E2M1),
            Self::Nf4 | Self::Fp4 => None,
        }
    }
}

const fn widened(integers: &[i8; 16]) -> [f32; 16] {
    let mut numbers = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        numbers[i] = integers[i] as f32;
        i += 1;
    }
    numbers
}

/// `get_4bit_type("nf4")` of bitsandbytes.
#[rustfmt::skip]
const NF4: [f32; 16] = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
];

/// `get_4bit_type("fp4")` of bitsandbytes.
#[rustfmt::skip]
const FP4: [f32; 16] = [
    0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25,
    0.0, -0.0052083335, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25,
];

/// `kvalues_iq4nl` of ggml: denser near 0, as weights are.
const NON_LINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `kvalues_mxfp4` of ggml: twice the values of a 4-bit float (E2M1), which has a sign, 2 bits of exponent
/// and 1 bit of fraction.
pub(crate) const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fields! {
    /// `scale · NON_LINEAR[code]`, with 4-bit codes (`block_iq4_nl` of ggml).
    struct Iq4Nl {
        scale: [u8; 2],
        /// Byte i: code i, then code i + 16
        codes: [u8; 16],
    }
}

impl Block<32, 18> for Iq4Nl {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        look_up(&NON_LINEAR, widen(self.scale), codes_of::<4, 16, 32, _>(&self.codes), numbers);
    }

    fn pack(numbers: &[f32; 32]) -> Self {
        let [scale] = non_linear_scales(&groups(numbers));
        Self::with_scale(numbers, scale)
    }

    fn parts(&self) -> Parts<32> {
        let codes = codes_of::<4, 16, 32, _>(&self.codes);
        Parts { codes, scale: u16::from_le_bytes(self.scale).into(), ..Parts::default() }
    }
}

impl Iq4Nl {
    fn with_scale(numbers: &[f32; 32], scale: f32) -> Self {
        let inverse = inverse(scale);
        let codes = numbers.map(|x| non_linear_code(inverse * x));
        Self { scale: narrow(scale), codes: bytes_of::<4, 16, _, _>(&codes) }
    }
}

/// Packs blocks as IQ4_NL, mostly in groups of eight blocks whose scales are searched in parallel lanes.
fn pack_non_linear(numbers: &[f32], bytes: &mut [u8]) {
    let mut blocks = bytes.as_chunks_mut().0.iter_mut();
    let (eights, rest) = numbers.as_chunks::<256>();
    for eight in eights {
        let scales: [f32; 8] = non_linear_scales(&groups(eight));
        for ((numbers, scale), block) in eight.as_chunks().0.iter().zip(scales).zip(&mut blocks) {
            Iq4Nl::with_scale(numbers, scale).write(block);
        }
    }
    for (numbers, block) in rest.as_chunks().0.iter().zip(blocks) {
        Iq4Nl::pack(numbers).write(block);
    }
}

fields! {
    /// `scale · (s - 32) · NON_LINEAR[code]`, with 4-bit codes, and a 6-bit s per 32 numbers (`block_iq4_xs`
    /// of ggml).
    struct Iq4Xs {
        scale: [u8; 2],
        /// Two bits per group: the high bits of s
        high_scales: [u8; 2],
        /// Four bits per group: the low bits of s
        low_scales: [u8; 4],
        /// Byte i of each 16: code i, then code i + 16
        codes: [u8; 128],
    }
}

impl Iq4Xs {
    /// Returns `s - 32` of each group.
    fn factors(&self) -> [i8; 8] {
        let high = codes_of::<2, 1, 8, _>(&self.high_scales);
        let low = codes_of::<4, 1, 8, _>(&self.low_scales);
        std::array::from_fn(|group| (high[group] << 4 | low[group]) as i8 - 32)
    }
}

impl Block<256, 136> for Iq4Xs {
    fn unpack(&self, numbers: &mut [f32; 256]) {
        let scale = widen(self.scale);
        let codes = codes_of::<4, 16, 256, _>(&self.codes);
        let groups = numbers.as_chunks_mut().0.iter_mut().zip(codes.as_chunks().0);
        for ((numbers, codes), factor) in groups.zip(self.factors()) {
            look_up(&NON_LINEAR, scale * f32::from(factor), *codes, numbers);
        }
    }

    fn pack(numbers: &[f32; 256]) -> Self {
        let scales = non_linear_scales(&groups::<32, 8>(numbers));
        let scale = -largest(&scales) / 32.0;
        let to_factor = inverse(scale);
        let factors = scales.map(|s| nearest(to_factor * s, -32.0, 31.0));
        let mut codes = [0; 256];
        let in_groups = codes.as_chunks_mut::<32>().0.iter_mut().zip(numbers.as_chunks::<32>().0);
        for ((codes, numbers), factor) in in_groups.zip(factors) {
            let inverse = inverse(scale * factor);
            *codes = numbers.map(|x| non_linear_code(inverse * x));
        }
        let factors = factors.map(|factor| (factor + 32.0) as u8);
        Self {
            scale: narrow(scale),
            high_scales: bytes_of::<2, 1, _, _>(&factors.map(|factor| factor >> 4)),
            low_scales: bytes_of::<4, 1, _, _>(&factors),
            codes: bytes_of::<4, 16, _, _>(&codes),
        }
    }

    fn parts(&self) -> Parts<256> {
        Parts {
            codes: codes_of::<4, 16, 256, _>(&self.codes),
            scales: filled(self.factors().map(|factor| factor as u8)),
            scale: u16::from_le_bytes(self.scale).into(),
            ..Parts::default()
        }
    }
}

fields! {
    /// `2^(exponent - 128) · E2M1[code]`, with 4-bit codes (`block_mxfp4` of ggml; OCP Microscaling Formats
    /// 1.0).
    struct Mxfp4 {
        exponent: [u8; 1],
        /// Byte i: code i, then code i + 16
        codes: [u8; 16],
    }
}

impl Block<32, 17> for Mxfp4 {
    fn unpack(&self, numbers: &mut [f32; 32]) {
        let [exponent] = self.exponent;
        look_up(&E2M1, half_power(exponent), codes_of::<4, 16, 32, _>(&self.codes), numbers);
    }

    /// Packs a block. The largest representable value is 1.5 times the largest power of two that does not
    /// exceed the largest number. Numbers beyond it are clamped, and lose up to a quarter.
    fn pack(numbers: &[f32; 32]) -> Self {
        /// Midpoints between values; a number at a midpoint becomes the value nearer to 0.
        const LIMITS: [f32; 7] = [0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0];

        let largest = largest(numbers).abs();
        let exponent = if largest > 0.0 { (largest.log2().floor() + 125.0) as u8 } else { 0 };
        let limits = LIMITS.map(|limit| limit * half_power(exponent));
        let codes = numbers.map(|x| {
            let size: u8 = limits.iter().map(|&limit| u8::from(x.abs() > limit)).sum();
            size | u8::from(x < 0.0 && size > 0) << 3
        });
        Self { exponent: [exponent], codes: bytes_of::<4, 16, _, _>(&codes) }
    }

    fn parts(&self) -> Parts<32> {
        let [exponent] = self.exponent;
        // A power of 2 is exact in bfloat16.
        let scale = bf16::from_f32(half_power(exponent)).to_bits().into();
        Parts { codes: codes_of::<4, 16, 32, _>(&self.codes), scale, ..Parts::default() }
    }
}

/// Writes a block of MXFP4 with these codes and this scale, a [`half_power`].
pub(crate) fn mxfp4_block(scale: f32, codes: &[u8; 32], block: &mut [u8; 17]) {
    let exponent = match scale.to_bits() {
        0x0020_0000 => 0,
        0x0040_0000 => 1,
        bits => (bits >> 23) as u8 + 1,
    };
    Mxfp4 { exponent: [exponent], codes: bytes_of::<4, 16, _, _>(codes) }.write(block);
}

/// Returns `2^(exponent - 128)`: half of the value of the exponent, because the values of the table are
/// doubled.
pub(crate) fn half_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        // Subnormal results.
        0..2 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    })
}

fn look_up(table: &[i8; 16], scale: f32, codes: [u8; 32], numbers: &mut [f32; 32]) {
    for (number, code) in numbers.iter_mut().zip(codes) {
        *number = scale * f32::from(table[usize::from(code & 15)]);
    }
}

/// Finds scales of groups, such that `scale · value` is close to the numbers: the best of 16 inverse scales
/// (`quantize_row_iq4_nl_impl` of ggml, with the number of tries that `quantize_iq4_nl` sets).
fn non_linear_scales<const G: usize>(numbers: &[[f32; G]; 32]) -> [f32; G] {
    let inverses = (-8..=7_i8).map(|stretch| {
        move |largest: f32| match stretch {
            -8 => 1.0 / (largest / 127.0),
            _ => (f32::from(stretch) - 127.0) / largest,
        }
    });
    let nearest = |x| {
        let mut value = f32::from(NON_LINEAR[0]);
        for step in STEPS {
            value += if x >= step.limit { step.height } else { 0.0 };
        }
        value
    };
    best_fit(numbers, inverses, nearest, |weight, x, value| weight * value * x)
}

/// Returns the index of the value nearest to `x`; the larger one of a tie.
fn non_linear_code(x: f32) -> u8 {
    STEPS.iter().map(|step| u8::from(x >= step.limit)).sum()
}

/// The step from one value of [`NON_LINEAR`] to the next.
#[derive(Clone, Copy)]
struct Step {
    /// Midpoint between the values.
    limit: f32,
    height: f32,
}

/// Comparing with all limits vectorises, while a search in the table does not.
const STEPS: [Step; 15] = {
    let mut steps = [Step { limit: 0.0, height: 0.0 }; 15];
    let mut i = 0;
    while i < 15 {
        let (low, high) = (NON_LINEAR[i] as f32, NON_LINEAR[i + 1] as f32);
        steps[i] = Step { limit: (low + high) / 2.0, height: high - low };
        i += 1;
    }
    steps
};
