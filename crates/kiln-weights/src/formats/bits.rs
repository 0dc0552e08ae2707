//! Packing of 1-, 2-, 4- and 8-bit codes into bytes.
//!
//! All ggml formats share one scheme with two parameters. `STRIDE` bytes hold `8 / BITS · STRIDE` codes. The
//! lowest bits of these bytes are the first `STRIDE` codes, the next bits are the next `STRIDE` codes, and so
//! on.

/// Reads `N` codes from `B` bytes.
#[inline]
pub(crate) fn codes_of<const BITS: usize, const STRIDE: usize, const N: usize, const B: usize>(
    bytes: &[u8; B],
) -> [u8; N] {
    let mut codes = [0; N];
    let planes = codes.as_chunks_mut::<STRIDE>().0.chunks_exact_mut(8 / BITS);
    for (bytes, planes) in bytes.as_chunks::<STRIDE>().0.iter().zip(planes) {
        for (plane, codes) in planes.iter_mut().enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (plane * BITS) & mask(BITS);
            }
        }
    }
    codes
}

/// Writes codes, of which only the lowest `BITS` bits are used, to `B` bytes.
#[inline]
pub(crate) fn bytes_of<const BITS: usize, const STRIDE: usize, const N: usize, const B: usize>(
    codes: &[u8; N],
) -> [u8; B] {
    let mut bytes = [0; B];
    let planes = codes.as_chunks::<STRIDE>().0.chunks_exact(8 / BITS);
    for (bytes, planes) in bytes.as_chunks_mut::<STRIDE>().0.iter_mut().zip(planes) {
        for (plane, codes) in planes.iter().enumerate() {
            for (byte, code) in bytes.iter_mut().zip(codes) {
                *byte |= (code & mask(BITS)) << (plane * BITS);
            }
        }
    }
    bytes
}

const fn mask(bits: usize) -> u8 {
    0xff >> (8 - bits)
}
