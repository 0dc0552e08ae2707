//! Blocks for the data that PyTorch's quantizers store, with float32 scales: NF4, FP4, INT4, INT8. No file
//! contains these blocks: they are created when a folder is loaded.
//!
//! Source of NF4 and FP4: T. Dettmers et al., "QLoRA", <https://arxiv.org/abs/2305.14314>.

use crate::formats::bits::{bytes_of, codes_of};
use crate::formats::{Block, Layout, fields, filled, inverse, largest, put};
use crate::streams::{GroupScales, Parts, Streams, Table};

/// Largest absolute value to pack: half of the largest float32, so that the range from minimum to maximum
/// stays finite.
const LARGEST: Option<f32> = Some(f32::MAX / 2.0);

macro_rules! tables {
    ($($layout:ident $name:ident $text:literal,)*) => {
        $(
            pub(crate) static $layout: Layout = Layout {
                largest: LARGEST,
                ..Layout::in_no_file::<$name, _, _>(
                    $text,
                    Some(Streams::in_float32(64, 4, GroupScales::One).with_table(Table::$name)),
                )
            };

            fields! {
                /// `scale · table[code]`, with 4-bit codes.
                struct $name {
                    scale: [u8; 4],
                    /// Byte i of each 16: code i, then code i + 16
                    codes: [u8; 32],
                }
            }

            impl Block<64, 36> for $name {
                fn unpack(&self, numbers: &mut [f32; 64]) {
                    let (table, scale) = (Table::$name.numbers(), f32::from_le_bytes(self.scale));
                    for (number, code) in numbers.iter_mut().zip(codes_of::<4, 16, 64, _>(&self.codes)) {
                        *number = scale * table[usize::from(code & 15)];
                    }
                }

                fn pack(numbers: &[f32; 64]) -> Self {
                    let scale = largest(numbers).abs();
                    let codes = nearest(&Table::$name.numbers(), inverse(scale), numbers);
                    Self { scale: scale.to_le_bytes(), codes: bytes_of::<4, 16, _, _>(&codes) }
                }

                fn parts(&self) -> Parts<64> {
                    let codes = codes_of::<4, 16, 64, _>(&self.codes);
                    Parts { codes, scale: u32::from_le_bytes(self.scale), ..Parts::default() }
                }
            }
        )*
    };
}

tables! {
    NF4 Nf4 "nf4",
    FP4 Fp4 "fp4",
}

/// Returns the index of the table entry nearest to each scaled number; the first one of a tie.
fn nearest(table: &[f32; 16], inverse: f32, numbers: &[f32; 64]) -> [u8; 64] {
    let (mut codes, mut least) = ([0; 64], [f32::INFINITY; 64]);
    for (code, entry) in (0..).zip(table) {
        for i in 0..64 {
            let distance = (numbers[i] * inverse - entry).abs();
            let is_nearer = distance < least[i];
            least[i] = if is_nearer { distance } else { least[i] };
            codes[i] = if is_nearer { code } else { codes[i] };
        }
    }
    codes
}

macro_rules! integers {
    ($($layout:ident $name:ident $text:literal: $block:literal numbers of $bits:literal bits, $codes:literal bytes,)*) => {
        $(
            pub(crate) static $layout: Layout = Layout {
                largest: LARGEST,
                ..Layout::in_no_file::<$name, _, _>(
                    $text,
                    Some(Streams::in_float32($block, $bits, GroupScales::Zeros)),
                )
            };

            fields! {
                /// `scale · (code - zero)`.
                struct $name {
                    scale: [u8; 4],
                    zero: [u8; 1],
                    /// With 4 bits, byte i of each 16: code i, then code i + 16
                    codes: [u8; $codes],
                }
            }

            impl Block<$block, { 5 + $codes }> for $name {
                fn unpack(&self, numbers: &mut [f32; $block]) {
                    let (scale, zero) = (f32::from_le_bytes(self.scale), f32::from(self.zero[0]));
                    let codes = codes_of::<$bits, 16, $block, _>(&self.codes);
                    for (number, code) in numbers.iter_mut().zip(codes) {
                        *number = scale * (f32::from(code) - zero);
                    }
                }

                fn pack(numbers: &[f32; $block]) -> Self {
                    let (scale, zero, codes) = between_extremes(numbers, ((1 << $bits) - 1) as f32);
                    let codes = bytes_of::<$bits, 16, _, _>(&codes);
                    Self { scale: scale.to_le_bytes(), zero: [zero], codes }
                }

                fn parts(&self) -> Parts<$block> {
                    Parts {
                        codes: codes_of::<$bits, 16, $block, _>(&self.codes),
                        scales: filled(self.zero),
                        scale: u32::from_le_bytes(self.scale),
                        ..Parts::default()
                    }
                }
            }
        )*
    };
}

integers! {
    INT4_32 Int4In32 "int4_32": 32 numbers of 4 bits, 16 bytes,
    INT4_64 Int4In64 "int4_64": 64 numbers of 4 bits, 32 bytes,
    INT4_128 Int4In128 "int4_128": 128 numbers of 4 bits, 64 bytes,
    INT8 Int8 "int8": 32 numbers of 8 bits, 32 bytes,
}

/// Returns the scale, the zero point and the codes up to `max` that span the range from the smallest to the
/// largest number, extended to include 0.
fn between_extremes<const N: usize>(numbers: &[f32; N], max: f32) -> (f32, u8, [u8; N]) {
    let low = numbers.iter().fold(0.0, |low: f32, &x| if x < low { x } else { low });
    let high = numbers.iter().fold(0.0, |high: f32, &x| if x > high { x } else { high });
    let scale = (high - low) / max;
    let inverse = inverse(scale);
    let zero = (-low * inverse).round();
    // The sum is not negative, apart from rounding.
    let codes = numbers.map(|x| (x * inverse + (zero + 0.5)).min(max) as u8);
    (scale, zero.min(max) as u8, codes)
}

/// Writes a block. Codes take eight bits each if the block has enough bytes for them, otherwise four.
pub(crate) fn write(scale: f32, zero: Option<u8>, codes: &[u8], block: &mut [u8]) {
    let mut rest = block;
    put(&mut rest, &scale.to_le_bytes());
    if let Some(zero) = zero {
        put(&mut rest, &[zero]);
    }
    if rest.len() == codes.len() {
        rest.copy_from_slice(codes);
        return;
    }
    for (bytes, codes) in rest.as_chunks_mut().0.iter_mut().zip(codes.as_chunks::<32>().0) {
        *bytes = bytes_of::<4, 16, 32, 16>(codes);
    }
}
