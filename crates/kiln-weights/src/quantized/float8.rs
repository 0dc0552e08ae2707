//! 8-bit floats.
//!
//! Source: P. Micikevicius et al., "FP8 Formats for Deep Learning", <https://arxiv.org/abs/2209.05433>;
//! `torch.float8_e4m3fn`.

/// Bits of the fraction.
const FRACTION: u32 = 3;

/// Converts an E4M3 number to float32, which is exact. It has 1 sign bit, 4 bits of exponent with bias 7, 3
/// of fraction, and no infinity.
pub(super) fn widen(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> FRACTION & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        // Subnormal numbers have no hidden 1.
        (0, _) => fraction * 2_f32.powi(-9),
        _ => (8.0 + fraction) * 2_f32.powi(exponent - 10),
    };
    if code >> 7 == 1 { -size } else { size }
}
