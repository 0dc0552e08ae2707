//! The first of three kernels that choose a token for each row: the scores of all tokens as keys (integers in
//! the same order, see [`order`](crate::sampling::order)), and the tops, the best token of every 32 lanes.

use cubecl::prelude::*;

use super::Share;
use crate::{
    runtime::launch::LANES,
    sampling::{
        order::{bin_of, is_better, key_of},
        sample::sharing::{BINS, TOPS},
    },
};

/// Number of lanes that find one top, the best of their tokens.
const TOGETHER: usize = LANES / TOPS;

/// The score of a logit after repetition penalty and temperature. Infinity and NaN are left as they are.
#[cube]
fn processed(logit: f32, penalized: bool, penalty: f32, temperature: f32) -> f32 {
    let mut score = logit;
    if (u32::reinterpret(logit) & 0x7fff_ffffu32) < 0x7f80_0000u32 {
        if penalized {
            score = select(score < 0.0, score * penalty, score / penalty);
        }
        if temperature != 1.0 {
            score /= temperature;
        }
    }
    score
}

/// Computes the keys and the tops of all tokens; `own.shares` workgroups per row, each with the neighboring
/// tokens of one share.
///
/// Reads `logits` `[rows, 1, vocab]` and, if `penalized`, `occurred` `[rows, vocab]`. Writes `tops`
/// `[rows, shares, TOPS, 2]`, a key and its token, with a key of 0 if there is none; if the token is sampled
/// (`draws`), `keys` `[rows, vocab]`; and if top_p needs them (`counted`), `bins` `[rows, shares, BINS + 1]`:
/// the number of tokens in each bin of scores, then the bin of the best token. Tokens that are `BINS` or more
/// bins below it are not counted.
#[cube(launch, address_type = "dynamic")]
pub(super) fn scores<E: Float>(
    logits: &Tensor<E>,
    occurred: &Tensor<i32>,
    keys: &mut Tensor<u32>,
    tops: &mut Tensor<u32>,
    bins: &mut Tensor<u32>,
    own: &Share,
    penalty: f32,
    temperature: f32,
    #[comptime] penalized: bool,
    #[comptime] draws: bool,
    #[comptime] counted: bool,
    #[define(E)] _elem: ElemType,
) {
    if CUBE_POS >= own.rows * own.shares {
        terminate!();
    }
    let lane = UNIT_POS as usize;
    let mut top_keys = Shared::<[u32]>::new_slice(LANES);
    let mut top_tokens = Shared::<[u32]>::new_slice(LANES);
    let row = CUBE_POS / own.shares;
    let first = CUBE_POS % own.shares * own.share;
    let end = min(first + own.share, own.vocab);

    let mut top_key = 0u32;
    let mut top_token = 0u32;
    let mut token = first + lane;
    while token < end {
        let mut penalize = false;
        if comptime!(penalized) {
            penalize = occurred[row * occurred.stride(0) + token * occurred.stride(1)] != 0;
        }
        let logit = f32::cast_from(logits[row * logits.stride(0) + token * logits.stride(2)]);
        let key = key_of(processed(logit, penalize, penalty, temperature));
        if comptime!(draws) {
            keys[row * own.vocab + token] = key;
        }
        if key > top_key {
            top_key = key;
            top_token = u32::cast_from(token);
        }
        token += LANES;
    }
    top_keys[lane] = top_key;
    top_tokens[lane] = top_token;
    let mut left = CUBE_DIM as usize / (2 * TOPS);
    while left > 0 {
        sync_cube();
        if lane % TOGETHER < left {
            let (key, token) = (top_keys[lane + left], top_tokens[lane + left]);
            if is_better(key, token, top_keys[lane], top_tokens[lane]) {
                top_keys[lane] = key;
                top_tokens[lane] = token;
            }
        }
        left /= 2;
    }
    let of_part = lane % TOGETHER;
    if of_part == 0 {
        let at = (CUBE_POS * LANES + lane) / TOGETHER * 2;
        tops[at] = top_keys[lane];
        tops[at + 1] = top_tokens[lane];
    }
    if comptime!(counted) {
        let counts = Shared::<[Atomic<u32>]>::new_slice(BINS);
        if lane < BINS {
            counts[lane].store(0u32);
        }
        sync_cube();
        let mut largest = 0u32;
        for i in 0..TOPS {
            largest = max(largest, top_keys[i * TOGETHER]);
        }
        let top = bin_of(largest);
        let mut token = first + lane;
        while token < end {
            let bin = bin_of(keys[row * own.vocab + token]);
            if top - bin < comptime!(BINS as i32) {
                let at = usize::cast_from(u32::cast_from(bin) % comptime!(BINS as u32));
                counts[at].fetch_add(1u32);
            }
            token += LANES;
        }
        sync_cube();
        if lane < BINS {
            let count = counts[lane].load();
            bins[CUBE_POS * (BINS + 1) + lane] = count;
        } else if lane == BINS {
            bins[CUBE_POS * (BINS + 1) + BINS] = u32::cast_from(top);
        }
    }
}
