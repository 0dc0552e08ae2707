// Scores as keys, which are integers in the same order: WGSL does not define comparisons of infinity and NaN.

// Keys of -inf, of inf, and of NaN.
const LOWEST = 0x007fffffu;
const HIGHEST = 0xff800000u;
const NONE = 0xffffffffu;
// The largest score that has a bin of its own.
const LARGEST_BINNED = 1000000.0;

fn key_of(score: f32) -> u32 {
    let bits = bitcast<u32>(score);
    let size = bits & 0x7fffffffu;
    if size > 0x7f800000u {
        return NONE;
    }
    // -0 and 0 have the same key.
    return select(size | 0x80000000u, ~bits, bits > 0x80000000u);
}

fn score_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

// Whether a key with its place comes before another. Of equal keys, the lower place comes first.
fn is_better(one: vec2<u32>, other: vec2<u32>) -> bool {
    return one.x > other.x || (one.x == other.x && one.y < other.y);
}

// Bins are 0.25 wide; scores beyond +-1e6 fall into the first or last bin.
fn bin_of(key: u32) -> i32 {
    return i32(floor(clamp(score_of(key), -LARGEST_BINNED, LARGEST_BINNED) * 4.0));
}

// exp(score - largest score): the largest weight is 1.
fn weight(key: u32, largest: u32) -> f32 {
    let quotient = exp(score_of(key) - score_of(largest));
    return select(select(quotient, 1.0, key == largest), 0.0, key <= LOWEST);
}
