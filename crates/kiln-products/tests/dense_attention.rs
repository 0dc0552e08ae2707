//! Tests that attention over keys and values that are not packed equals its formula, with every type of
//! numbers and every set of instructions, and that the result of a row does not depend on the other rows.

use half::{bf16, f16};
use kiln_products::attention::{Dense, Few, Numbers, Source, attend};
use kiln_simd::Instructions;

/// Number of slots of the buffers, in which positions wrap before the last of them.
const SLOTS: usize = 192;
const ORIGIN: usize = 130;
const POSITIONS: std::ops::Range<usize> = 70..249;

/// Enough rows for tiles of every size.
const ROWS: usize = 7;

/// Numbers between two vectors.
const GAP: usize = 5;

#[derive(Clone, Copy, Debug)]
enum Type {
    Float32,
    Float16,
    Bfloat16,
}

/// Vectors in slots, [`GAP`] numbers apart. What nobody sees is NaN.
struct Buffer {
    width: usize,
    floats: Vec<f32>,
    bits: Vec<u16>,
}

impl Buffer {
    fn new(width: usize, of: Type, random: &mut impl FnMut() -> f32) -> Self {
        let mut floats = vec![f32::NAN; SLOTS * (width + GAP)];
        for position in POSITIONS {
            floats[slot(position) * (width + GAP)..][..width].fill_with(|| match of {
                Type::Float32 => random(),
                Type::Float16 => f16::from_f32(random()).to_f32(),
                Type::Bfloat16 => bf16::from_f32(random()).to_f32(),
            });
        }
        let bits = floats.iter().map(|float| match of {
            Type::Bfloat16 => bf16::from_f32(*float).to_bits(),
            _ => f16::from_f32(*float).to_bits(),
        });
        Self { width, bits: bits.collect(), floats }
    }

    fn at(&self, position: usize) -> &[f32] {
        &self.floats[slot(position) * (self.width + GAP)..][..self.width]
    }
}

fn slot(position: usize) -> usize {
    (position + SLOTS - ORIGIN) % SLOTS
}

#[derive(Clone, Copy, Debug)]
struct Given {
    of: Type,
    widths: [usize; 2],
    latent: bool,
    softcap: Option<f32>,
}

impl Given {
    /// Computes for each of some rows the largest score, the sum of weights, and the sums of values.
    fn attended(&self, [keys, values]: &[Buffer; 2], queries: &[f32], seen: &[(i32, i32)]) -> Vec<f32> {
        let mut part = vec![f32::NAN; seen.len() * (values.width + 2)];
        let numbers = match self.of {
            Type::Float32 => Numbers::Float32([&keys.floats, &values.floats]),
            Type::Float16 => Numbers::Float16([&keys.bits, &values.bits]),
            Type::Bfloat16 => Numbers::Bfloat16([&keys.bits, &values.bits]),
        };
        let strides = self.widths.map(|width| width + GAP);
        attend(Few {
            queries: queries.to_vec(),
            seen: seen.to_vec(),
            softcap: self.softcap,
            source: Source::Dense(Dense { numbers, widths: self.widths, strides, latent: self.latent }),
            origin: ORIGIN,
            slots: SLOTS,
            positions: POSITIONS,
            part: &mut part,
        });
        part
    }

    /// Computes the expected result of a row.
    fn wanted(&self, [keys, values]: &[Buffer; 2], query: &[f32], seen: (i32, i32)) -> Vec<f64> {
        let visible: Vec<usize> =
            POSITIONS.filter(|&position| (seen.0..=seen.1).contains(&(position as i32))).collect();
        let score = |position: &usize| -> f64 {
            let value = if self.latent { values.at(*position) } else { &[] };
            let key = keys.at(*position).iter().chain(value);
            let score = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            self.softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
        };
        let scores: Vec<f64> = visible.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let mixed = (0..values.width).map(|d| {
            let terms = visible.iter().zip(&weights);
            terms.map(|(&position, weight)| weight * f64::from(values.at(position)[d])).sum::<f64>()
        });
        [largest, weights.iter().sum()].into_iter().chain(mixed).collect()
    }
}

#[test]
fn attention_equals_its_formula_with_all_instructions() {
    let mut state = 7u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    // The last row sees nothing.
    let seen: Vec<(i32, i32)> =
        (0..ROWS as i32).map(|row| if row == 6 { (300, 200) } else { (71 + 3 * row, 240 + row) }).collect();
    let shapes =
        [([64, 64], false), ([24, 24], false), ([80, 80], false), ([7, 300], false), ([9, 72], true)];
    for (widths, latent) in shapes {
        for of in [Type::Float32, Type::Float16, Type::Bfloat16] {
            let buffers = widths.map(|width| Buffer::new(width, of, &mut random));
            let width = if latent { widths[0] + widths[1] } else { widths[0] };
            let queries: Vec<f32> = (0..ROWS * width).map(|_| random() / 2.0).collect();
            for instructions in Instructions::ALL.into_iter().filter(|instructions| instructions.are_here()) {
                kiln_simd::limit(instructions);
                for softcap in [None, Some(0.5)] {
                    let given = Given { of, widths, latent, softcap };
                    let all = given.attended(&buffers, &queries, &seen);
                    for (row, got) in all.chunks(widths[1] + 2).enumerate() {
                        let query = &queries[row * width..][..width];
                        let want = given.wanted(&buffers, query, seen[row]);
                        let size = want[1..].iter().fold(0.0, |size: f64, number| size.max(number.abs()));
                        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                            // Scores up to 10, and sums of up to 200 terms.
                            let tolerance = if i == 0 { 1e-5 } else { size * 1e-5 };
                            assert!(
                                f64::from(*got) == *want || (f64::from(*got) - want).abs() <= tolerance,
                                "{given:?} {instructions:?}, row {row}, number {i}: {got}, not {want}"
                            );
                        }
                        let alone = given.attended(&buffers, query, &seen[row..=row]);
                        assert_eq!(alone, got, "{given:?} {instructions:?}, row {row} alone");
                    }
                }
            }
        }
    }
}
