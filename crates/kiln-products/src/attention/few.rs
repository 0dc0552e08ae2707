//! Attention of a few queries over a range of positions.
#![allow(
    clippy::needless_range_loop,
    reason = "loops over the constants of a kernel are unrolled; several arrays share each index"
)]

use std::ops::Range;

use kiln_simd::{Lanes, Work};

use super::{
    codes::{Codes, LANES, SEGMENT},
    keys::Scorer,
    values::Mixer,
};
use crate::functions::{exp, finite, tanh};

/// Queries, and the packed keys and values that they attend over.
#[derive(Debug)]
pub struct Few<'a> {
    /// `[rows, head_dim]`, multiplied by the scale of attention.
    pub queries: Vec<f32>,
    /// First and last position that each row sees.
    pub seen: Vec<(i32, i32)>,
    pub softcap: Option<f32>,
    pub keys: Codes<'a>,
    pub values: Codes<'a>,
    /// Position in the first slot, and number of slots.
    pub origin: usize,
    pub slots: usize,
    pub positions: Range<usize>,
    /// Results: for each row the largest score, the sum of weights, and the sums of values.
    pub part: &'a mut [f32],
}

/// Computes the partial attention of each row over the positions. The bits of a row do not depend on the
/// other rows.
pub fn attend(few: Few<'_>) {
    kiln_simd::run(few);
}

impl Work for Few<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { queries, seen, softcap, keys, values, origin, slots, positions, part } = self;
        let rows = seen.len();
        let base = positions.start / SEGMENT * SEGMENT;
        let places = (positions.end - base).next_multiple_of(LANES);
        // A segment writes a whole one, even if it is shorter.
        let stride = places + SEGMENT;
        let mut scores = vec![0.0; rows * stride];
        let mut scorer = Scorer::new(keys, &queries);
        for segment in keys.segments(&positions, origin, slots) {
            scorer.write(lanes, segment, &mut scores[segment.position - base..], stride);
        }
        for ((scores, (from, to)), part) in
            scores.chunks_exact_mut(stride).zip(&seen).zip(part.chunks_exact_mut(values.head_dim + 2))
        {
            let (scores, behind) = scores.split_at_mut(places);
            behind.fill(0.0);
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
        let mut mixer = Mixer::new(values, rows);
        for segment in values.segments(&positions, origin, slots) {
            mixer.add(lanes, segment, &scores[segment.position - base..], stride);
        }
        for (r, part) in part.chunks_exact_mut(values.head_dim + 2).take(rows).enumerate() {
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
