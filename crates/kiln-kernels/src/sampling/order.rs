//! Integer keys in the same order as scores, for `#[cube]` functions. Infinity and NaN have keys, too. These
//! are the functions of `shaders/order.wgsl`.

use cubecl::prelude::*;

// Keys of -inf, of inf, and of NaN.
pub(crate) const LOWEST: u32 = 0x007f_ffff;
pub(crate) const HIGHEST: u32 = 0xff80_0000;
pub(crate) const NONE: u32 = 0xffff_ffff;

/// The largest score that has a bin of its own.
pub(crate) const LARGEST_BINNED: f32 = 1e6;

#[cube]
pub(crate) fn key_of(score: f32) -> u32 {
    let bits = u32::reinterpret(score);
    let size = bits & 0x7fff_ffffu32;
    // Both zeros have the same key.
    let key = select(bits > 0x8000_0000u32, !bits, size | 0x8000_0000u32);
    select(size > 0x7f80_0000u32, NONE, key)
}

#[cube]
pub(crate) fn score_of(key: u32) -> f32 {
    f32::reinterpret(select(key >= 0x8000_0000u32, key & 0x7fff_ffffu32, !key))
}

/// Whether a key at a place comes before another. Ties go to the lower place.
#[cube]
pub(crate) fn is_better(key: u32, place: u32, than_key: u32, than_place: u32) -> bool {
    key > than_key || (key == than_key && place < than_place)
}

/// The bin of a score. Bins are 0.25 wide; scores beyond ±[`LARGEST_BINNED`] fall into the first or last one.
#[cube]
pub(crate) fn bin_of(key: u32) -> i32 {
    let score = min(max(score_of(key), comptime!(-LARGEST_BINNED)), LARGEST_BINNED);
    i32::cast_from(f32::floor(score * 4.0))
}

/// `exp(score - largest score)`: the largest weighs 1.
#[cube]
pub(crate) fn weight(key: u32, largest: u32) -> f32 {
    let quotient = f32::exp(score_of(key) - score_of(largest));
    select(key <= LOWEST, 0.0, select(key == largest, 1.0, quotient))
}
