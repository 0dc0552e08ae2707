//! Attention of a few queries over a range of positions: all scores, then all weights, then all values.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};

use super::{
    codes::Codes,
    dense::{Dense, DenseMixer, DenseScorer, Numbers, Vectors},
    keys::Scorer,
    segments::{LANES, SEGMENT, Segment, segments},
    values::Mixer,
};
use crate::{
    formats::{Bf16, F16, F32, Plain},
    functions::{exp, finite, tanh},
};

/// Queries, and the keys and values that they attend over.
#[derive(Debug)]
pub struct Few<'a> {
    /// `[rows, head_dim]`, multiplied by the scale of attention.
    pub queries: Vec<f32>,
    /// First and last position that each row sees.
    pub seen: Vec<(i32, i32)>,
    pub softcap: Option<f32>,
    pub source: Source<'a>,
    /// Position in the first slot, and number of slots.
    pub origin: usize,
    pub slots: usize,
    pub positions: Range<usize>,
    /// Results: for each row the largest score, the sum of weights, and the sums of values.
    pub part: &'a mut [f32],
}

/// Keys and values, in the form in which a buffer holds them.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    Dense(Dense<'a>),
    Packed { keys: Codes<'a>, values: Codes<'a> },
}

/// Computes the partial attention of each row over the positions. The bits of a row do not depend on the
/// other rows.
pub fn attend(few: Few<'_>) {
    kiln_simd::run(few);
}

/// Computes the scores of several queries over the same keys.
pub(super) trait Scores {
    /// Writes the scores of a segment, `stride` numbers apart from row to row. Numbers after them, up to
    /// [`SEGMENT`], are overwritten with anything.
    fn write<L: Lanes>(&mut self, lanes: L, segment: Segment, scores: &mut [f32], stride: usize);
}

/// Sums weighted values.
pub(super) trait Mixes {
    /// Adds the values of a segment. `weights` begin with those of its tokens, `stride` numbers apart from
    /// row to row.
    fn add<L: Lanes>(&mut self, lanes: L, segment: Segment, weights: &[f32], stride: usize);

    /// Writes the sums of a row, as wide as a value.
    fn write(&self, row: usize, mixed: &mut [f32]);
}

impl Work for Few<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.source {
            Source::Packed { keys, values } => {
                let (scorer, mixer) = (Scorer::new(keys, &self.queries), Mixer::new(values, self.seen.len()));
                let together = [keys.tokens, values.tokens].map(|tokens| tokens.unwrap_or(1));
                self.over(lanes, scorer, mixer, together, values.head_dim);
            }
            Source::Dense(dense) => match dense.numbers {
                Numbers::Float32(numbers) => self.over_dense::<L, F32>(lanes, numbers, dense),
                Numbers::Float16(numbers) => self.over_dense::<L, F16>(lanes, numbers, dense),
                Numbers::Bfloat16(numbers) => self.over_dense::<L, Bf16>(lanes, numbers, dense),
            },
        }
    }
}

impl Few<'_> {
    #[inline(always)]
    fn over_dense<L: Lanes, N: Plain>(self, lanes: L, [keys, values]: [&[N::Number]; 2], dense: Dense<'_>) {
        let Dense { widths, strides, latent, .. } = dense;
        let keys = Vectors::<N>::new(keys, widths[0], strides[0]);
        let values = || Vectors::<N>::new(values, widths[1], strides[1]);
        let parts = if latent { vec![keys, values()] } else { vec![keys] };
        let rows = self.seen.len();
        let scorer = DenseScorer::new(parts, &self.queries, rows);
        self.over(lanes, scorer, DenseMixer::new(values(), rows), [1, 1], widths[1]);
    }

    /// `together`: number of tokens that share the scales of keys, and of values. `width`: that of a value.
    #[inline(always)]
    fn over<L: Lanes>(
        self,
        lanes: L,
        mut scorer: impl Scores,
        mut mixer: impl Mixes,
        together: [usize; 2],
        width: usize,
    ) {
        let Self { queries: _, seen, softcap, source, origin, slots, positions, part } = self;
        let rows = seen.len();
        let base = positions.start / SEGMENT * SEGMENT;
        let places = (positions.end - base).next_multiple_of(LANES);
        // A segment writes a whole one, even if it is shorter.
        let stride = places + SEGMENT;
        let mut scores = vec![0.0; rows * stride];
        // Slots of positions that nobody sees may hold anything, and NaN times 0 is not 0. Packed vectors are
        // read in whole segments, so that lanes depend only on positions; their scales are finite.
        let first = match source {
            Source::Dense(_) => positions.start,
            Source::Packed { .. } => base,
        };
        let cut = |segment: Segment| segment.cut_before(first);
        for segment in segments(&positions, origin, slots, together[0]).map(cut) {
            scorer.write(lanes, segment, &mut scores[segment.position - base..], stride);
        }
        for ((scores, (from, to)), part) in
            scores.chunks_exact_mut(stride).zip(&seen).zip(part.chunks_exact_mut(width + 2))
        {
            let (scores, after) = scores.split_at_mut(places);
            after.fill(0.0);
            if let Some(cap) = softcap {
                for score in scores.iter_mut() {
                    *score = tanh(*score / cap) * cap;
                }
            }
            let first = ((*from).max(positions.start as i32) as usize).clamp(base, base + places) - base;
            let end = ((*to + 1).min(positions.end as i32).max(0) as usize)
                .clamp(base + first, base + places)
                - base;
            scores[..first].fill(f32::NEG_INFINITY);
            scores[end..].fill(f32::NEG_INFINITY);
            (part[0], part[1]) = weigh(scores);
        }
        for segment in segments(&positions, origin, slots, together[1]).map(cut) {
            mixer.add(lanes, segment, &scores[segment.position - base..], stride);
        }
        for (r, part) in part.chunks_exact_mut(width + 2).take(rows).enumerate() {
            mixer.write(r, &mut part[2..]);
        }
    }
}

/// Turns scores into weights. Returns the largest score, and the sum of the weights.
#[inline(always)]
fn weigh(scores: &mut [f32]) -> (f32, f32) {
    let scores = scores.as_chunks_mut::<LANES>().0;
    let mut largest = [f32::NEG_INFINITY; LANES];
    for scores in scores.iter() {
        for l in 0..LANES {
            largest[l] = if scores[l] > largest[l] { scores[l] } else { largest[l] };
        }
    }
    let mut all = f32::NEG_INFINITY;
    for l in 0..LANES {
        all = if largest[l] > all { largest[l] } else { all };
    }
    let mut sums = [0.0; LANES];
    for scores in scores {
        for l in 0..LANES {
            scores[l] = exp(scores[l] - finite(all));
            sums[l] += scores[l];
        }
    }
    let mut sum = 0.0;
    for l in 0..LANES {
        sum += sums[l];
    }
    (all, sum)
}
