//! Branch-free functions of numbers, so that loops over them are vectorized.

/// Computes `exp` of numbers up to 88, to within two roundings; 0 below -87. Without branches, so that it is
/// vectorized.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Adding this rounds to an integer, which is then in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    /// The logarithm of 2 with few digits, so that products with it are exact.
    const LN_2: f32 = 355.0 / 512.0;
    /// The logarithm of 2 minus `LN_2`.
    const LN_2_REST: f32 = -2.121_944_4e-4;

    let bound = if x < -87.0 { -87.0 } else { x };
    let rounded = bound * std::f32::consts::LOG2_E + ROUND;
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits());
    let whole = rounded - ROUND;
    // The minimax polynomial of Cephes, for numbers between minus and plus half the logarithm of 2.
    let r = bound - whole * LN_2 - whole * LN_2_REST;
    let p = 1.987_569_2e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 0.166_666_65;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let y = p * f32::from_bits(power.wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { y }
}

/// Returns the number to subtract from scores: 0 instead of negative infinity, from which infinity cannot be
/// subtracted.
#[inline(always)]
pub fn finite(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// Computes the hyperbolic tangent, to within a few roundings of 1.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let e = exp(-2.0 * x.abs());
    ((1.0 - e) / (1.0 + e)).copysign(x)
}
