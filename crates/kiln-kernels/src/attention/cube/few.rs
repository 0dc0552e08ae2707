//! Functions that `attention_decode` and `attention_packed` share, which go over all keys with a few rows.

use cubecl::prelude::*;

use super::Four;

/// Reduces the numbers that all lanes left in memory to their maximum, and stores it in the first results.
#[cube]
pub(super) fn largest_of_lanes(
    memory: &Shared<[Four]>,
    results: &mut Shared<[Four]>,
    lane: usize,
    #[comptime] fours: usize,
) {
    sync_cube();
    if lane < comptime!(16 * fours) {
        let i = lane / fours * 16 * fours + lane % fours;
        let mut most = memory[i];
        #[unroll]
        for k in 1..16usize {
            most = max(most, memory[i + k * fours]);
        }
        results[lane] = most;
    }
    sync_cube();
    if lane < fours {
        let mut most = results[lane];
        #[unroll]
        for k in 1..16usize {
            most = max(most, results[k * fours + lane]);
        }
        results[lane] = most;
    }
    sync_cube();
}

/// Reduces the numbers that all lanes left in memory to their sum, and stores it in the first results.
#[cube]
pub(super) fn sum_of_lanes(
    memory: &Shared<[Four]>,
    results: &mut Shared<[Four]>,
    lane: usize,
    #[comptime] fours: usize,
) {
    sync_cube();
    if lane < comptime!(16 * fours) {
        let i = lane / fours * 16 * fours + lane % fours;
        let mut sum = memory[i];
        #[unroll]
        for k in 1..16usize {
            sum += memory[i + k * fours];
        }
        results[lane] = sum;
    }
    sync_cube();
    if lane < fours {
        let mut sum = results[lane];
        #[unroll]
        for k in 1..16usize {
            sum += results[k * fours + lane];
        }
        results[lane] = sum;
    }
    sync_cube();
}
