//! Tests that products equal those of the unpacked numbers, with every set of instructions, and that the bits
//! of one product do not depend on the others.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use kiln_products::{Group, products_of_groups};
use kiln_simd::Instructions;
use kiln_weights::{
    Format,
    streams::{Arithmetic, Order},
};

/// A number of rows that is not a multiple of sixteen, and columns for two of the longest blocks.
const SHAPE: [usize; 2] = [35, 512];

/// More vectors than those from which on kernels unpack rows, if they do.
const VECTORS: usize = 37;

/// Numbers of vectors for tiles of every width, with some left over.
const COUNTS: [usize; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33];

/// Rows and columns of matrices with more columns than the cache has room for: tiles of several vectors are
/// divided into parts. Pieces of the second matrix have several blocks of rows, with two threads.
const MATRICES_IN_PARTS: [(Format, [usize; 2]); 5] = [
    (Format::F16, [17, (64 << 10) + 289]),
    (Format::F16, [273, (8 << 10) + 289]),
    (Format::F32, [17, (64 << 10) + 289]),
    (Format::Q4_0, [17, (64 << 10) + 288]),
    (Format::Q6K, [17, (64 << 10) + 256]),
];

/// Held while a test limits instructions, which holds for the whole process.
static LIMIT: Mutex<()> = Mutex::new(());

/// Source of numbers from -2 to 2.
struct Numbers(u32);

impl Numbers {
    fn take(&mut self, count: usize) -> Vec<f32> {
        let mut next = || {
            self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.0 >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        (0..count).map(|_| next()).collect()
    }
}

/// Creates the words of a matrix, and its numbers.
fn matrix(format: Format, [rows, columns]: [usize; 2], numbers: &mut Numbers) -> (Vec<u32>, Vec<f32>) {
    let mut weights = numbers.take(rows * columns);
    let mut bytes = vec![0; format.bytes_of(weights.len()).unwrap()];
    format.pack(&weights, &mut bytes).unwrap();
    format.unpack(&bytes, &mut weights).unwrap();
    let mut words = vec![0u32; format.words(Order::Sixteens, rows, columns).unwrap()];
    format.arrange(Order::Sixteens, columns, &bytes, bytemuck::cast_slice_mut(&mut words)).unwrap();
    (words, weights)
}

/// Computes the products `[vectors, rows]`.
fn products(words: &[u32], format: Format, arithmetic: Arithmetic, x: &[f32]) -> Vec<f32> {
    let [rows, columns] = SHAPE;
    let vectors = x.len() / columns;
    let mut y = vec![f32::NAN; vectors * rows];
    let group = Group { vectors: 0..vectors, words, y: y.chunks_mut(rows).collect() };
    products_of_groups(x, columns, format, arithmetic, vec![group]).unwrap();
    y
}

/// Largest difference allowed between a product and that of the unpacked numbers: a rounding for each term
/// and one for each factor; and if vectors become bytes, half a step of the largest element of each.
fn tolerance(x: &[f32], weights: &[f32], arithmetic: Arithmetic) -> f32 {
    let terms: f32 = x.iter().zip(weights).map(|(x, w)| (x * w).abs()).sum();
    let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let sizes: f32 = weights.iter().map(|w| w.abs()).sum();
    let step = if arithmetic == Arithmetic::Integers { largest / 254.0 } else { 0.0 };
    // Minimums are about as large as weights, and are multiplied separately.
    4.0 * terms * f32::EPSILON * (x.len() as f32).sqrt() + step * sizes * 1.5 + 1e-3
}

#[test]
fn packed_products_equal_unpacked_ones_with_all_instructions() {
    let _limit = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut numbers = Numbers(7);
    let columns = SHAPE[1];
    let here: Vec<_> = Instructions::ALL.into_iter().filter(|instructions| instructions.are_here()).collect();
    for format in
        Format::ALL.into_iter().filter(|format| format.words(Order::Sixteens, 16, columns).is_some())
    {
        let (words, weights) = matrix(format, SHAPE, &mut numbers);
        let x = numbers.take(VECTORS * columns);
        for arithmetic in [Arithmetic::Floats, Arithmetic::Integers] {
            for &instructions in &here {
                kiln_simd::limit(instructions);
                let all = products(&words, format, arithmetic, &x);
                for (v, (x, y)) in x.chunks(columns).zip(all.chunks(SHAPE[0])).enumerate() {
                    for (row, (y, weights)) in y.iter().zip(weights.chunks(columns)).enumerate() {
                        let want: f32 = x.iter().zip(weights).map(|(x, w)| x * w).sum();
                        assert!(
                            (y - want).abs() <= tolerance(x, weights, arithmetic),
                            "{format:?} {arithmetic:?} {instructions:?}, vector {v}, row {row}: {y}, not {want}"
                        );
                    }
                }
                for count in COUNTS {
                    let some = products(&words, format, arithmetic, &x[..count * columns]);
                    assert_eq!(
                        some,
                        all[..some.len()],
                        "{format:?} {arithmetic:?} {instructions:?}, {count} vectors"
                    );
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_groups_or_parts_with_all_instructions() {
    let _limit = LIMIT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut numbers = Numbers(11);
    for (format, [rows, columns]) in MATRICES_IN_PARTS {
        let (words, _) = matrix(format, [rows, columns], &mut numbers);
        let x = numbers.take(VECTORS * columns);
        let is_plain = matches!(format, Format::F32 | Format::F16);
        for arithmetic in [Arithmetic::Floats, Arithmetic::Integers].into_iter().skip(is_plain.into()) {
            for instructions in Instructions::ALL.into_iter().filter(|instructions| instructions.are_here()) {
                kiln_simd::limit(instructions);
                let products = |ranges: &[Range<usize>]| {
                    let mut y = vec![f32::NAN; VECTORS * rows];
                    let mut results = y.chunks_mut(rows);
                    let group = |vectors: &Range<usize>| Group {
                        vectors: vectors.clone(),
                        words: &words,
                        y: results.by_ref().take(vectors.len()).collect(),
                    };
                    let groups = ranges.iter().map(group).collect();
                    products_of_groups(&x, columns, format, arithmetic, groups).unwrap();
                    y
                };
                let alone: Vec<_> = (0..VECTORS).map(|i| i..i + 1).collect();
                let together = products(&[0..1, 1..4, 4..4 + 33]);
                assert_eq!(together, products(&alone), "{format:?} {arithmetic:?} {instructions:?}");
            }
        }
    }
}

#[test]
fn words_of_the_wrong_length_are_rejected() {
    let mut y = [0.0; 16];
    let group = Group { vectors: 0..1, words: &[0; 3], y: vec![&mut y] };
    assert!(products_of_groups(&[0.0; 32], 32, Format::Q8_0, Arithmetic::Integers, vec![group]).is_none());
}
