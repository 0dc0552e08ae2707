//! Codes of 1, 2 or 4 bits in bytes.
//!
//! All formats of ggml share one scheme, with two parameters. `STRIDE` bytes hold `8 / BITS · STRIDE` codes. The lowest
//! bits of these bytes are the first `STRIDE` codes, the next bits are the next `STRIDE` codes, and so on.

/// Reads `N` codes.
pub(crate) fn codes_of<const BITS: usize, const STRIDE: usize, const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mask = (1 << BITS) - 1;
    let mut codes = [0; N];
    for (bytes, codes) in bytes.chunks_exact(STRIDE).zip(codes.chunks_exact_mut(STRIDE * 8 / BITS)) {
        for (plane, codes) in codes.chunks_exact_mut(STRIDE).enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (plane * BITS) & mask;
            }
        }
    }
    codes
}

/// Writes codes, of which only the lowest `BITS` bits are used, to `B` bytes.
pub(crate) fn bytes_of<const BITS: usize, const STRIDE: usize, const B: usize>(codes: &[u8]) -> [u8; B] {
    let mask = (1 << BITS) - 1;
    let mut bytes = [0; B];
    for (bytes, codes) in bytes.chunks_exact_mut(STRIDE).zip(codes.chunks_exact(STRIDE * 8 / BITS)) {
        for (plane, codes) in codes.chunks_exact(STRIDE).enumerate() {
            for (byte, code) in bytes.iter_mut().zip(codes) {
                *byte |= (code & mask) << (plane * BITS);
            }
        }
    }
    bytes
}
