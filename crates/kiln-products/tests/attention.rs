//! Tests that attention over packed keys and values equals attention over the unpacked numbers, with every
//! set of instructions, and that the result of a row does not depend on the other rows.

use kiln_products::attention::{Codes, Few, Layout, Source, attend};
use kiln_simd::Instructions;

/// Number of slots of the buffers, in which positions begin at an origin, and wrap.
const SLOTS: usize = 192;
const ORIGIN: usize = 64;
const POSITIONS: std::ops::Range<usize> = 70..249;

/// Enough rows for tiles of every size.
const ROWS: usize = 7;

/// Source of random numbers.
struct Random(u32);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 ^ (self.0 >> 15)
    }

    /// Returns a number from -1 to 1.
    fn number(&mut self) -> f32 {
        (self.word() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Packed vectors, and their numbers: `[SLOTS, head_dim]`.
struct Buffer {
    words: Vec<u32>,
    scales: Vec<u32>,
    numbers: Vec<f32>,
    layout: Layout,
}

impl Buffer {
    fn new(layout: Layout, random: &mut Random) -> Self {
        let Layout { head_dim, bits, channels, tokens } = layout;
        let (codes, groups) = (32 / bits, head_dim.div_ceil(channels));
        let width = groups * channels.div_ceil(codes);
        let mut words = vec![0; SLOTS * width];
        let count = tokens.map_or(SLOTS * groups, |tokens| SLOTS.div_ceil(tokens) * head_dim);
        let pairs: Vec<[half::f16; 2]> = (0..count)
            .map(|_| [random.number().abs() * 0.2, random.number()].map(half::f16::from_f32))
            .collect();
        let scales = pairs
            .iter()
            .map(|[scale, offset]| u32::from(scale.to_bits()) | u32::from(offset.to_bits()) << 16);
        let mut numbers = Vec::with_capacity(SLOTS * head_dim);
        for slot in 0..SLOTS {
            for d in 0..head_dim {
                let (group, place) = (d / channels, d % channels);
                let code = random.word() >> (32 - bits);
                words[slot * width + group * channels.div_ceil(codes) + place / codes] |=
                    code << (place % codes * bits);
                let [scale, offset] = match tokens {
                    Some(tokens) => pairs[slot / tokens * head_dim + d],
                    None => pairs[slot * groups + group],
                };
                numbers.push(code as f32 * scale.to_f32() + offset.to_f32());
            }
        }
        Self { words, scales: scales.collect(), numbers, layout }
    }

    fn codes(&self) -> Codes<'_> {
        Codes::new(&self.words, &self.scales, self.layout)
    }

    /// Returns the vector at a position.
    fn at(&self, position: usize) -> &[f32] {
        &self.numbers[(position - ORIGIN) % SLOTS * self.layout.head_dim..][..self.layout.head_dim]
    }
}

/// Computes for each of some rows the largest score, the sum of weights, and the sums of values.
fn attended(
    keys: &Buffer,
    values: &Buffer,
    queries: &[f32],
    seen: &[(i32, i32)],
    softcap: Option<f32>,
) -> Vec<f32> {
    let mut part = vec![f32::NAN; seen.len() * (keys.layout.head_dim + 2)];
    attend(Few {
        queries: queries.to_vec(),
        seen: seen.to_vec(),
        softcap,
        source: Source::Packed { keys: keys.codes(), values: values.codes() },
        origin: ORIGIN,
        slots: SLOTS,
        positions: POSITIONS,
        part: &mut part,
    });
    part
}

/// Computes the expected result of a row from unpacked numbers: the largest score, the sum of weights, and
/// the sums of values.
fn wanted(keys: &Buffer, values: &Buffer, query: &[f32], seen: (i32, i32), softcap: Option<f32>) -> Vec<f64> {
    let visible: Vec<usize> =
        POSITIONS.filter(|&position| (seen.0..=seen.1).contains(&(position as i32))).collect();
    let product = |position: &usize| -> f64 {
        let score = query.iter().zip(keys.at(*position)).map(|(q, k)| f64::from(q * k)).sum();
        softcap.map_or(score, |cap| (score / f64::from(cap)).tanh() * f64::from(cap))
    };
    let scores: Vec<f64> = visible.iter().map(product).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let mut row = vec![largest, weights.iter().sum()];
    row.extend((0..query.len()).map(|d| {
        visible
            .iter()
            .zip(&weights)
            .map(|(&position, weight)| weight * f64::from(values.at(position)[d]))
            .sum::<f64>()
    }));
    row
}

#[test]
fn attention_over_packed_keys_equals_unpacked_with_all_instructions() {
    let mut random = Random(3);
    let seen: Vec<(i32, i32)> = (0..ROWS as i32).map(|row| (71 + 3 * row, 240 + row)).collect();
    for bits in [1, 2, 3, 4, 8] {
        for (head_dim, channels, tokens) in [
            (64, 64, None),
            (64, 32, None),
            (80, 32, None),
            (64, 64, Some(32)),
            (96, 96, Some(64)),
            (200, 200, Some(8)),
        ] {
            let layout = Layout { head_dim, bits, channels, tokens };
            let [keys, values] = [(); 2].map(|()| Buffer::new(layout, &mut random));
            let scale = 1.0 / (head_dim as f32 * (1 << bits) as f32);
            let queries: Vec<f32> = (0..ROWS * head_dim).map(|_| random.number() * scale).collect();
            for instructions in Instructions::ALL.into_iter().filter(|instructions| instructions.are_here()) {
                kiln_simd::limit(instructions);
                for softcap in [None, Some(0.5)] {
                    let all = attended(&keys, &values, &queries, &seen, softcap);
                    for (row, got) in all.chunks(head_dim + 2).enumerate() {
                        let query = &queries[row * head_dim..][..head_dim];
                        let want = wanted(&keys, &values, query, seen[row], softcap);
                        let size = want[2..].iter().fold(want[1], |size, number| size.max(number.abs()));
                        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                            // Weights and sums of up to 200 terms, each of which loses only a few roundings.
                            let tolerance = if i == 0 { 1e-5 } else { size * 1e-5 };
                            assert!(
                                (f64::from(*got) - want).abs() <= tolerance,
                                "{layout:?} {instructions:?}, row {row}, number {i}: {got}, not {want}"
                            );
                        }
                        let alone = attended(&keys, &values, query, &seen[row..=row], softcap);
                        assert_eq!(alone, got, "{layout:?} {instructions:?}, row {row} alone");
                    }
                }
            }
        }
    }
}
