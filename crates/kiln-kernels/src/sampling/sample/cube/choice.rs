//! The last of three kernels that choose a token for each row: the best of the row's tops, or a sample from
//! the tokens that top_k, top_p and min_p keep. [`Sample`](crate::Sample) has the formulas,
//! `shaders/sample.wgsl` the same steps.
//!
//! A threshold is found without sorting, three bits of the keys at a time. A place among candidates is found
//! by descending into one of eight parts at a time. Every sum has a fixed order.

use cubecl::prelude::*;

use super::Share;
use crate::{
    runtime::launch::LANES,
    sampling::{
        order::{HIGHEST, LOWEST, is_better, weight},
        sample::sharing::TOPS,
    },
};

/// Number of bins for three bits of a key, and number of parts that candidates are divided into. Each has an
/// equal share of the lanes.
const PARTS: usize = 8;
/// Number of lanes of a part.
const TOGETHER: usize = LANES / PARTS;

// Values of the parameter `what`, the quantity that is summed: the number of candidates, the number of
// candidates whose key is `Kept::lowest`, or the weights of the candidates that are kept.
const COUNT: u32 = 0;
const TIES: u32 = 1;
const WEIGHTS: u32 = 2;

/// The parameters of [`Sampling`](crate::Sampling) that remove candidates.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Filters {
    top_k: usize,
    tail: f32,
    min_p: f32,
}

/// The condition for the candidates of a row that are kept.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    /// Index of the row's first candidate in `entries`. Other indices of candidates are relative to it.
    first_entry: usize,
    /// The key of the largest score.
    largest: u32,
    /// The smallest key that is kept.
    lowest: u32,
    /// Index of the first candidate that is kept among those with key `lowest`.
    first: usize,
    /// The smallest weight that is kept; the largest weight is 1.
    least: f32,
}

/// One of several sums.
#[derive(CubeType, Clone, Copy)]
struct Pick {
    /// Index of the sum; from [`threshold`], a key.
    at: u32,
    /// Total of all sums before it.
    before: f32,
    sum: f32,
}

/// The key at index `i`. `listed`: whether `entries` has pairs of a key and a token, or only keys.
#[cube]
fn key_at(entries: &mut Tensor<u32>, i: usize, #[comptime] listed: bool) -> u32 {
    if comptime!(listed) { entries[2 * i] } else { entries[i] }
}

/// The amount that candidate `i` adds to a sum of the quantity `what`.
#[cube]
fn mass(
    entries: &mut Tensor<u32>,
    i: usize,
    kept: &Kept,
    #[comptime] listed: bool,
    #[comptime] what: u32,
) -> f32 {
    let mut mass = f32::new(1.0);
    if comptime!(what != COUNT) {
        let key = key_at(entries, kept.first_entry + i, listed);
        if comptime!(what == TIES) {
            mass = select(key == kept.lowest, 1.0, 0.0);
        } else {
            let own = weight(key, kept.largest);
            let left = key > kept.lowest || (key == kept.lowest && i >= kept.first);
            mass = select(left && own >= kept.least, own, 0.0);
        }
    }
    mass
}

/// Sums the lanes of each part, and stores the result at its first lane.
#[cube]
fn add_up(sum: f32, sums: &mut Shared<[f32]>) {
    let lane = UNIT_POS as usize;
    sums[lane] = sum;
    let mut left = CUBE_DIM as usize / (2 * PARTS);
    while left > 0 {
        sync_cube();
        if lane % TOGETHER < left {
            sums[lane] += sums[lane + left];
        }
        left /= 2;
    }
    sync_cube();
}

/// Picks the first of the sums `sums[0]`, `sums[step]`, .. at which the running total, from `before` on,
/// exceeds the limit, or else the last sum that is not 0.
#[cube]
fn pick(sums: &mut Shared<[f32]>, number: usize, step: usize, before: f32, limit: f32) -> Pick {
    let mut at = 0u32;
    let mut before_it = before;
    let mut its = f32::new(0.0);
    let mut all = before;
    let mut exceeds = false;
    for i in 0..number {
        let sum = sums[i * step];
        if sum > 0.0 && !exceeds {
            at = u32::cast_from(i);
            before_it = all;
            its = sum;
            all += sum;
            exceeds = all > limit;
        }
    }
    Pick { at, before: before_it, sum: its }
}

/// The weight of the `count` candidates that are kept.
#[cube]
fn total(entries: &mut Tensor<u32>, count: usize, kept: &Kept, sums: &mut Shared<[f32]>) -> f32 {
    let mut sum = f32::new(0.0);
    let mut i = UNIT_POS as usize;
    while i < count {
        sum += mass(entries, i, kept, true, WEIGHTS);
        i += LANES;
    }
    add_up(sum, sums);
    let mut all = f32::new(0.0);
    for i in 0..PARTS {
        all += sums[i * TOGETHER];
    }
    sync_cube();
    all
}

/// The smallest key such that `before` plus the sum of `what` over that key and all smaller ones exceeds the
/// limit. Determines three bits of the key per pass, from the highest on; the first pass has two bits.
#[cube]
fn threshold(
    entries: &mut Tensor<u32>,
    count: usize,
    kept: &Kept,
    before: f32,
    limit: f32,
    bins: &mut Shared<[f32]>,
    sums: &mut Shared<[f32]>,
    #[comptime] what: u32,
) -> Pick {
    let lane = UNIT_POS as usize;
    let mut mask = 0u32;
    let mut at = 0u32;
    let mut all_before = before;
    let mut its = f32::new(0.0);
    for pass in 0..11u32 {
        let shift = 30u32 - 3u32 * pass;
        for bin in 0..PARTS {
            bins[bin * LANES + lane] = 0.0;
        }
        let mut i = lane;
        while i < count {
            let key = key_at(entries, kept.first_entry + i, true);
            if (key & mask) == at {
                let bin = usize::cast_from((key >> shift) & 7u32) * LANES + lane;
                bins[bin] += mass(entries, i, kept, true, what);
            }
            i += LANES;
        }
        sync_cube();
        let mut sum = f32::new(0.0);
        let bin = lane / TOGETHER * LANES + lane % TOGETHER;
        for i in 0..PARTS {
            sum += bins[bin + i * TOGETHER];
        }
        add_up(sum, sums);
        let digit = pick(sums, PARTS, TOGETHER, all_before, limit);
        at |= digit.at << shift;
        all_before = digit.before;
        its = digit.sum;
        mask |= 7u32 << shift;
        sync_cube();
    }
    Pick { at, before: all_before, sum: its }
}

/// Index of the first candidate, from `first` on and before `last`, at which the running total of `what`,
/// from `before` on, exceeds the limit. `number`: an upper bound of `last - first`.
#[cube]
fn find(
    entries: &mut Tensor<u32>,
    first: usize,
    last: usize,
    number: usize,
    kept: &Kept,
    before: f32,
    limit: f32,
    sums: &mut Shared<[f32]>,
    #[comptime] listed: bool,
    #[comptime] what: u32,
) -> usize {
    let lane = UNIT_POS as usize;
    let mut begin = first;
    let mut end = last;
    let mut all_before = before;
    let mut width = number;
    while width > LANES {
        width = width.div_ceil(PARTS);
        let own = begin + lane / TOGETHER * width;
        let beyond = min(own + width, end);
        let mut sum = f32::new(0.0);
        let mut i = own + lane % TOGETHER;
        while i < beyond {
            sum += mass(entries, i, kept, listed, what);
            i += TOGETHER;
        }
        add_up(sum, sums);
        let part = pick(sums, PARTS, TOGETHER, all_before, limit);
        begin += usize::cast_from(part.at) * width;
        end = min(begin + width, end);
        all_before = part.before;
        sync_cube();
    }
    let mut own = f32::new(0.0);
    if begin + lane < end {
        own = mass(entries, begin + lane, kept, listed, what);
    }
    sums[lane] = own;
    sync_cube();
    let at = begin + usize::cast_from(pick(sums, LANES, 1usize, all_before, limit).at);
    sync_cube();
    at
}

/// Copies the candidates of all shares, which have gaps between them in the first half of the row's entries,
/// into a contiguous list in the second half. Returns their number.
#[cube]
fn list(entries: &mut Tensor<u32>, found: &Tensor<f32>, row: usize, own: &Share) -> usize {
    let first_found = row * 2 * own.vocab;
    let first_entry = first_found + own.vocab;
    let mut count = 0usize;
    for share in 0..own.shares {
        let more = usize::cast_from(found[(row * own.shares + share) * 3]);
        let mut i = UNIT_POS as usize;
        while i < more {
            let (to, at) = (2 * (first_entry + count + i), 2 * (first_found + share * own.share + i));
            entries[to] = entries[at];
            entries[to + 1] = entries[at + 1];
            i += LANES;
        }
        count += more;
    }
    // Entries of other lanes are read from here on.
    sync_storage();
    sync_cube();
    count
}

/// Samples a token from the candidates that top_k, top_p and min_p keep. `word`: a random number of 24 bits.
#[cube]
fn drawn(
    entries: &mut Tensor<u32>,
    found: &Tensor<f32>,
    row: usize,
    own: &Share,
    filters: &Filters,
    largest: u32,
    word: i32,
    bins: &mut Shared<[f32]>,
    sums: &mut Shared<[f32]>,
) -> u32 {
    let count = list(entries, found, row, own);
    let first_entry = (row * 2 + 1) * own.vocab;
    let all = Kept { first_entry, largest, lowest: 0u32, first: 0usize, least: f32::new(0.0) };
    let mut lowest = 0u32;
    if filters.top_k > 0 && filters.top_k < count {
        let limit = f32::cast_from(count - filters.top_k);
        lowest = threshold(entries, count, &all, f32::new(0.0), limit, bins, sums, COUNT).at;
    }
    let mut first = 0usize;
    if filters.tail > 0.0 {
        let kept = Kept { first_entry, largest, lowest, first: 0usize, least: f32::new(0.0) };
        // Weight of the tokens that are not candidates: top_p removes them first. After a top_k they are no
        // part of the distribution.
        let mut gone = f32::new(0.0);
        if filters.top_k == 0 {
            for share in 0..own.shares {
                gone += found[(row * own.shares + share) * 3 + 2];
            }
        }
        let limit = filters.tail * (gone + total(entries, count, &kept, sums));
        let last = threshold(entries, count, &kept, gone, limit, bins, sums, WEIGHTS);
        lowest = last.at;
        // Of the candidates with that key, the first are removed, as many as fit into the limit. If it is the
        // largest key of all, the last of them stays.
        let each = weight(last.at, largest);
        let ties = f32::round(last.sum / each) - select(last.at == largest, 1.0, 0.0);
        let go = min(max(f32::floor((limit - last.before) / each), 0.0), max(ties, 0.0));
        let tied = Kept { first_entry, largest, lowest, first: 0usize, least: f32::new(0.0) };
        let last_gone = find(entries, 0usize, count, count, &tied, f32::new(0.0), go - 0.5, sums, true, TIES);
        first = select(go > 0.0, last_gone + 1, 0);
    }
    let kept = Kept { first_entry, largest, lowest, first, least: filters.min_p };
    let limit = f32::cast_from(word) / 16777216.0 * total(entries, count, &kept, sums);
    let at = find(entries, 0usize, count, count, &kept, f32::new(0.0), limit, sums, true, WEIGHTS);
    entries[2 * (first_entry + at) + 1]
}

/// Samples a token from the whole vocabulary, when nothing removes tokens. `word`: a random number of 24
/// bits.
#[cube]
fn drawn_of_all(
    entries: &mut Tensor<u32>,
    found: &Tensor<f32>,
    row: usize,
    own: &Share,
    largest: u32,
    word: i32,
    sums: &mut Shared<[f32]>,
) -> u32 {
    let lane = UNIT_POS as usize;
    let mut its = f32::new(0.0);
    if lane < own.shares {
        its = found[(row * own.shares + lane) * 3 + 1];
    }
    sums[lane] = its;
    sync_cube();
    let mut all = f32::new(0.0);
    for share in 0..own.shares {
        all += sums[share];
    }
    let limit = f32::cast_from(word) / 16777216.0 * all;
    let share = pick(sums, own.shares, 1usize, f32::new(0.0), limit);
    sync_cube();
    let kept =
        Kept { first_entry: row * own.vocab, largest, lowest: 0u32, first: 0usize, least: f32::new(0.0) };
    let first = usize::cast_from(share.at) * own.share;
    let last = min(first + own.share, own.vocab);
    u32::cast_from(find(entries, first, last, own.share, &kept, share.before, limit, sums, false, WEIGHTS))
}

/// Chooses the token of each row; one workgroup per row.
///
/// Reads `tops` `[rows, shares, TOPS, 2]` (key and token), `found` `[rows, shares, 3]` (number of candidates,
/// their weight, weight of other tokens), and `words` `[rows, steps]`. `entries` is `[rows, 2, vocab, 2]`,
/// keys and tokens of candidates, if they are `listed`, else `[rows, vocab]`, the keys of all tokens. Writes
/// `chosen` `[rows, 1]`: -1 if the scores are not a distribution. Updates `used` `[rows]`, and, if
/// `penalized`, `occurred` `[rows, vocab]`. `draws`: whether the token is sampled.
#[cube(launch, address_type = "dynamic")]
pub(super) fn choice(
    tops: &Tensor<u32>,
    entries: &mut Tensor<u32>,
    found: &Tensor<f32>,
    words: &Tensor<i32>,
    used: &mut Tensor<i32>,
    occurred: &mut Tensor<i32>,
    chosen: &mut Tensor<i32>,
    own: &Share,
    filters: &Filters,
    #[comptime] penalized: bool,
    #[comptime] draws: bool,
    #[comptime] listed: bool,
) {
    let row = CUBE_POS;
    if row >= own.rows {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut top_keys = Shared::<[u32]>::new_slice(LANES);
    let mut top_tokens = Shared::<[u32]>::new_slice(LANES);
    let mut bins = Shared::<[f32]>::new_slice(comptime!(PARTS * LANES));
    let mut sums = Shared::<[f32]>::new_slice(LANES);
    let at_used = row * used.stride(0);
    let step = min(usize::cast_from(used[at_used]), words.shape(1) - 1);

    let number = own.shares * TOPS;
    let mut top_key = 0u32;
    let mut top_token = 0u32;
    if lane < number {
        top_key = tops[(row * number + lane) * 2];
        top_token = tops[(row * number + lane) * 2 + 1];
    }
    top_keys[lane] = top_key;
    top_tokens[lane] = top_token;
    let mut left = CUBE_DIM as usize / 2;
    while left > 0 {
        sync_cube();
        if lane < left {
            let (key, token) = (top_keys[lane + left], top_tokens[lane + left]);
            if is_better(key, token, top_keys[lane], top_tokens[lane]) {
                top_keys[lane] = key;
                top_tokens[lane] = token;
            }
        }
        left /= 2;
    }
    sync_cube();
    let largest = top_keys[0];
    let mut token = i32::cast_from(top_tokens[0]);
    if comptime!(draws) {
        let word = words[row * words.stride(0) + step * words.stride(1)];
        if comptime!(listed) {
            token =
                i32::cast_from(drawn(entries, found, row, own, filters, largest, word, &mut bins, &mut sums));
        } else {
            token = i32::cast_from(drawn_of_all(entries, found, row, own, largest, word, &mut sums));
        }
    }
    token = select(largest > LOWEST && largest < HIGHEST, token, -1);
    if lane == 0 {
        chosen[row] = token;
        used[at_used] = i32::cast_from(step) + 1;
        if comptime!(penalized) && token >= 0 {
            let at = row * occurred.stride(0) + usize::cast_from(token) * occurred.stride(1);
            occurred[at] = 1;
        }
    }
}
