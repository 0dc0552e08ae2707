//! Products in integers, of vectors that are rounded to bytes.

use std::marker::PhantomData;

use kiln_simd::{Lanes, Work};

use super::{
    Kernel,
    formats::{Block, Packed, RUN},
};

/// 32 numbers of a vector as signed bytes with a scale.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(super) struct Run {
    /// Four bytes each, from -127 to 127
    quads: [i32; 8],
    scale: f32,
    /// What a sum of products begins with, for each group of a weight, so that its offset is subtracted
    starts: [i32; 2],
    /// The sum of the numbers as they were rounded, for each group of a weight; that of their bytes, where the weight has zero points
    sums: [f32; 2],
}

/// Rounds vectors for weights of a format.
pub(super) struct Rounding<'a, P> {
    x: &'a [f32],
    runs: &'a mut [Run],
    format: PhantomData<P>,
}

impl<'a, P> Rounding<'a, P> {
    pub(super) fn new(x: &'a [f32], runs: &'a mut [Run]) -> Self {
        Self { x, runs, format: PhantomData }
    }
}

impl<P: Packed> Work for Rounding<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let offset = P::OFFSET - if P::WIDE && L::SUBTRACTS_128 { 128 } else { 0 };
        for (x, rounded) in self.x.as_chunks::<RUN>().0.iter().zip(self.runs) {
            *rounded = run::<P>(x, offset);
        }
    }
}

#[inline(always)]
fn run<P: Packed>(x: &[f32; RUN], offset: i32) -> Run {
    /// Adding it rounds to an integer, which the lowest bits then are.
    const ROUND: f32 = 12_582_912.0;

    // Eight maxima beside each other, which are vectorised.
    let mut sizes = [0.0f32; 8];
    for x in x.as_chunks::<8>().0 {
        for i in 0..8 {
            sizes[i] = if x[i].abs() > sizes[i] { x[i].abs() } else { sizes[i] };
        }
    }
    let largest = sizes.iter().fold(0.0f32, |largest, &size| if size > largest { size } else { largest });
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut bytes = [0i8; RUN];
    for i in 0..RUN {
        bytes[i] = (x[i] * inverse + ROUND).to_bits() as i8;
    }
    let (mut starts, mut sums) = ([0; 2], [0.0; 2]);
    for (group, bytes) in bytes.chunks_exact(RUN / P::GROUPS).enumerate() {
        let mut sum = 0;
        for &byte in bytes {
            sum += i32::from(byte);
        }
        starts[group] = -offset * sum;
        sums[group] = if P::HAS_ZEROS { sum as f32 } else { scale * sum as f32 };
    }
    Run { quads: bytemuck::cast(bytes), scale, starts, sums }
}

/// Codes times bytes.
pub(super) struct Integers<P>(PhantomData<P>);

impl<P: Packed> Kernel for Integers<P> {
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
                    for t in 0..T {
                        let x = &x[t][i * P::RUNS + run];
                        let mut sums = lanes.integers(x.starts[group]);
                        for q in group * 8 / P::GROUPS..(group + 1) * 8 / P::GROUPS {
                            sums = match P::WIDE {
                                true => lanes.dot_wide(sums, quads[q], x.quads[q]),
                                false => lanes.dot(sums, quads[q], x.quads[q]),
                            };
                        }
                        let scale = lanes.mul(scale, lanes.splat(x.scale));
                        let mut sums = lanes.to_floats(sums);
                        if P::HAS_ZEROS {
                            // Exact, as all are integers of less than 24 bits.
                            sums = lanes.mul_add(zeros, lanes.splat(x.sums[group]), sums);
                        }
                        totals[t] = lanes.mul_add(sums, scale, totals[t]);
                        if P::HAS_MINIMUM {
                            totals[t] = lanes.mul_add(minimum, lanes.splat(x.sums[group]), totals[t]);
                        }
                    }
                }
            }
        }
        totals
    }
}
