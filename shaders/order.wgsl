// Scores as keys, integers in the same order: WGSL does not say how it compares what is infinite or not a number.

// Keys of -inf, of inf, and of what is not a number.
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
    // There is one 0.
    return select(size | 0x80000000u, ~bits, bits > 0x80000000u);
}

fn score_of(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u));
}

// Whether a key with its place comes before another: of equal keys the first place does.
fn is_better(one: vec2<u32>, other: vec2<u32>) -> bool {
    return one.x > other.x || (one.x == other.x && one.y < other.y);
}

// Scores of a quarter have a bin together. Those that are so large that there is none are at an end.
fn bin_of(key: u32) -> i32 {
    return i32(floor(clamp(score_of(key), -LARGEST_BINNED, LARGEST_BINNED) * 4.0));
}

// exp(score - largest score): the largest weighs 1.
fn weight(key: u32, largest: u32) -> f32 {
    let quotient = exp(score_of(key) - score_of(largest));
    return select(select(quotient, 1.0, key == largest), 0.0, key <= LOWEST);
}
