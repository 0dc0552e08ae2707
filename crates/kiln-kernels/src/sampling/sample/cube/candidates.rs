//! Selects the tokens that processors may keep.

use cubecl::prelude::*;

use super::Share;
use crate::{
    runtime::launch::LANES,
    sampling::{
        order::{LARGEST_BINNED, bin_of, key_of, score_of, weight},
        sample::sharing::{BINS, TOPS},
    },
};

/// The lowest key such that, judged by the bins, all keys below it together weigh at most the tail.
#[cube]
fn lowest_of_bins(
    bins: &Tensor<u32>,
    row: usize,
    own: &Share,
    largest: u32,
    tail: f32,
    counts: &mut Shared<[u32]>,
    least: &mut Shared<[f32]>,
    most: &mut Shared<[f32]>,
) -> u32 {
    let lane = UNIT_POS as usize;
    let top = bin_of(largest);
    let score = score_of(largest);
    if lane < BINS {
        let bin = top - i32::cast_from(lane);
        let mut count = 0u32;
        for share in row * own.shares..(row + 1) * own.shares {
            let below = i32::cast_from(bins[share * (BINS + 1) + BINS]) - bin;
            if below >= 0 && below < comptime!(BINS as i32) {
                let at = usize::cast_from(u32::cast_from(bin) % comptime!(BINS as u32));
                count += bins[share * (BINS + 1) + at];
            }
        }
        // Lower and upper bounds of their weight.
        let begin = f32::cast_from(bin) / 4.0 - score;
        counts[lane] = count;
        least[lane] = f32::cast_from(count) * f32::exp(begin);
        most[lane] = f32::cast_from(count) * min(f32::exp(begin + 0.25), 1.0);
    }
    sync_cube();
    let mut counted = 0u32;
    let mut all = f32::new(0.0);
    for i in 0..BINS {
        counted += counts[i];
        all += least[i];
    }
    // A margin, because sums and exponentials are rounded.
    let limit = 0.99 * tail * all;
    let rest = f32::cast_from(u32::cast_from(own.vocab) - counted);
    let mut gone = rest * f32::exp(f32::cast_from(top - comptime!(BINS as i32 - 1)) / 4.0 - score);
    let mut left = comptime!(BINS as u32).runtime();
    let mut fits = gone <= limit;
    for i in 1..BINS {
        gone += most[BINS - i];
        if gone > limit {
            fits = false;
        }
        if fits {
            left -= 1u32;
        }
    }
    sync_cube();
    let known = left < comptime!(BINS as u32) && f32::abs(score) < LARGEST_BINNED;
    let lowest = f32::cast_from(top - (i32::cast_from(left) - 1)) / 4.0;
    select(known, key_of(lowest), 0u32)
}

#[cube(launch, address_type = "dynamic")]
pub(super) fn candidates(
    keys: &Tensor<u32>,
    tops: &Tensor<u32>,
    bins: &Tensor<u32>,
    list: &mut Tensor<u32>,
    found: &mut Tensor<f32>,
    own: &Share,
    top_k: u32,
    least: f32,
    tail: f32,
    #[comptime] listed: bool,
    #[comptime] counted: bool,
) {
    if CUBE_POS >= own.rows * own.shares {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut best = Shared::<[u32]>::new_slice(LANES);
    let mut cut = Shared::<[u32]>::new_slice(1usize);
    let mut counts = Shared::<[u32]>::new_slice(LANES);
    let mut kept = Shared::<[f32]>::new_slice(LANES);
    let mut others = Shared::<[f32]>::new_slice(LANES);
    let row = CUBE_POS / own.shares;
    let all = own.shares * TOPS;

    // The rank of a top is the number of tokens known to be at least as good.
    let mut top = 0u32;
    if lane < all {
        top = tops[(row * all + lane) * 2];
    }
    best[lane] = top;
    if lane == 0 {
        cut[0] = 0u32;
    }
    sync_cube();
    let mut largest = 0u32;
    let mut rank = 1u32;
    for i in 0..all {
        let other = best[i];
        largest = max(largest, other);
        if other > top || (other == top && i < lane) {
            rank += 1;
        }
    }
    if lane < all && rank == top_k {
        cut[0] = top;
    }
    sync_cube();
    let lowest = if comptime!(counted) {
        lowest_of_bins(bins, row, own, largest, tail, &mut counts, &mut kept, &mut others)
    } else {
        cut[0]
    };

    // Each lane takes neighbouring tokens.
    let first = CUBE_POS % own.shares * own.share;
    let end = min(first + own.share, own.vocab);
    let each = own.share.div_ceil(LANES);
    let from_token = min(first + lane * each, end);
    let to_token = min(from_token + each, end);
    let mut count = 0u32;
    let mut kept_mass = f32::new(0.0);
    let mut other_mass = f32::new(0.0);
    for token in from_token..to_token {
        let key = keys[row * own.vocab + token];
        let mass = weight(key, largest);
        if key >= lowest && mass >= least {
            count += 1;
            kept_mass += mass;
        } else {
            other_mass += mass;
        }
    }
    counts[lane] = count;
    kept[lane] = kept_mass;
    others[lane] = other_mass;
    let mut left = CUBE_DIM as usize / 2;
    while left > 0 {
        sync_cube();
        if lane < left {
            kept[lane] += kept[lane + left];
            others[lane] += others[lane + left];
        }
        left /= 2;
    }
    let mut step = 1usize;
    while step < CUBE_DIM as usize {
        sync_cube();
        let mut before = 0u32;
        if lane >= step {
            before = counts[lane - step];
        }
        sync_cube();
        counts[lane] += before;
        step *= 2;
    }
    if comptime!(listed) {
        let mut place = row * 2 * own.vocab + first + usize::cast_from(counts[lane] - count);
        for token in from_token..to_token {
            let key = keys[row * own.vocab + token];
            if key >= lowest && weight(key, largest) >= least {
                list[2 * place] = key;
                list[2 * place + 1] = u32::cast_from(token);
                place += 1;
            }
        }
    }
    if lane == LANES - 1 {
        found[CUBE_POS * 3] = f32::cast_from(counts[lane]);
        found[CUBE_POS * 3 + 1] = kept[0];
        found[CUBE_POS * 3 + 2] = others[0];
    }
}
