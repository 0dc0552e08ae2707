//! Products in float32.

use std::marker::PhantomData;

use kiln_simd::Lanes;

use super::{
    Kernel,
    formats::{Block, Packed, Plain, RUN},
};

/// 32 numbers of a vector.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Run {
    numbers: [f32; RUN],
    /// Of the first sixteen and the others
    sums: [f32; 2],
}

/// Makes runs of vectors.
pub(super) fn fill(x: &[f32], runs: &mut [Run]) {
    let sum = |numbers: &[f32]| numbers.iter().sum::<f32>();
    for (&numbers, run) in x.as_chunks::<RUN>().0.iter().zip(runs) {
        *run = Run { numbers, sums: [sum(&numbers[..RUN / 2]), sum(&numbers[RUN / 2..])] };
    }
}

/// Codes as floats.
pub(super) struct Floats<P>(PhantomData<P>);

impl<P: Packed> Kernel for Floats<P> {
    type Run = Run;

    fn runs(columns: usize) -> usize {
        columns / RUN
    }

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(lanes: L, words: &[u32], x: [&[Run]; T]) -> [L::Floats; T] {
        let mut totals = [lanes.splat(0.0); T];
        for (i, words) in words.chunks_exact(P::WORDS).enumerate() {
            let block = Block::of::<P>(words);
            let whole = block.whole::<L, P>(lanes);
            let zeros = block.zeros::<L, P>(lanes);
            block.prefetch_scales::<L, P>(lanes);
            for run in 0..P::RUNS {
                block.prefetch_codes::<L, P>(lanes, run);
                let quads = block.quads::<L, P>(lanes, run);
                for group in 0..P::GROUPS {
                    let [scale, minimum] = block.of_group::<L, P>(lanes, whole, run * P::GROUPS + group);
                    let mut sums = [lanes.splat(0.0); T];
                    for q in group * 8 / P::GROUPS..(group + 1) * 8 / P::GROUPS {
                        for byte in 0..4 {
                            let code = lanes.and(lanes.shift_right(quads[q], byte as u32 * 8), 255);
                            let number = match &P::FLOATS {
                                Some(table) => lanes.pick(table, code),
                                None if P::HAS_ZEROS || P::OFFSET > 0 => {
                                    lanes.add(lanes.to_floats(code), zeros)
                                }
                                None => lanes.to_floats(code),
                            };
                            for t in 0..T {
                                let x = x[t][i * P::RUNS + run].numbers[4 * q + byte];
                                sums[t] = lanes.mul_add(number, lanes.splat(x), sums[t]);
                            }
                        }
                    }
                    for t in 0..T {
                        totals[t] = lanes.mul_add(sums[t], scale, totals[t]);
                        if P::HAS_MINIMUM {
                            let [first, second] = x[t][i * P::RUNS + run].sums;
                            let sum = match (P::GROUPS, group) {
                                (1, _) => first + second,
                                (_, 0) => first,
                                _ => second,
                            };
                            totals[t] = lanes.mul_add(minimum, lanes.splat(sum), totals[t]);
                        }
                    }
                }
            }
        }
        totals
    }
}

/// Weights that are floats.
pub(super) struct Numbers<N>(PhantomData<N>);

impl<N: Plain> Kernel for Numbers<N> {
    type Run = f32;

    fn runs(columns: usize) -> usize {
        columns
    }

    #[inline(always)]
    fn products<L: Lanes, const T: usize>(lanes: L, words: &[u32], x: [&[f32]; T]) -> [L::Floats; T] {
        // Two sums, which do not wait for each other.
        let mut totals = [[lanes.splat(0.0); T]; 2];
        let columns: &[N::Column] = bytemuck::cast_slice(words);
        // Of a length that is known, so that places are not checked again and again. No closures: those of arrays are not always inlined, and
        // then vectors would leave their registers.
        let mut cut = x;
        for t in 0..T {
            cut[t] = &x[t][..columns.len()];
        }
        let x = cut;
        let (twos, last) = columns.as_chunks::<2>();
        for (i, two) in twos.iter().enumerate() {
            lanes.prefetch(two);
            for half in 0..2 {
                let w = N::floats(lanes, &two[half]);
                for t in 0..T {
                    totals[half][t] = lanes.mul_add(w, lanes.splat(x[t][2 * i + half]), totals[half][t]);
                }
            }
        }
        for column in last {
            let w = N::floats(lanes, column);
            for t in 0..T {
                totals[0][t] = lanes.mul_add(w, lanes.splat(x[t][columns.len() - 1]), totals[0][t]);
            }
        }
        let [mut sums, others] = totals;
        for t in 0..T {
            sums[t] = lanes.add(sums[t], others[t]);
        }
        sums
    }
}
