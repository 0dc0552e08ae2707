//! Layout of the codes and scales of packed vectors.

use super::segments::{LANES, SEGMENT, Segment};

/// How the elements of a vector are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub head_dim: usize,
    pub bits: usize,
    /// Number of adjacent channels whose first code begins a word.
    pub channels: usize,
    /// Number of tokens that share the scale of a channel; `None` if adjacent channels of a token share one.
    pub tokens: Option<usize>,
}

/// Packed keys or values of one head, slot by slot.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    pub(super) words: &'a [u32],
    pub(super) scales: &'a [u32],
    pub(super) head_dim: usize,
    pub(super) bits: usize,
    /// Number of codes per word.
    pub(super) codes: usize,
    /// Number of words per token, and number of words that share a scale.
    pub(super) width: usize,
    pub(super) together: usize,
    /// Number of groups of a token's channels, and number of channels per group.
    pub(super) groups: usize,
    pub(super) channels: usize,
    /// Number of tokens that share the scales of channels, if channels have them.
    pub(super) tokens: Option<usize>,
}

/// Adjacent words of a token that share a scale, within [`LANES`] words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) group: usize,
}

impl<'a> Codes<'a> {
    /// Wraps the `words` and `scales` of slots. The first code of a word is in its lowest bits. A word of
    /// scales has a scale in the low half and an offset in the high half. Scales belong to the groups of a
    /// slot, or to each channel for a group of slots.
    pub fn new(words: &'a [u32], scales: &'a [u32], layout: Layout) -> Self {
        let Layout { head_dim, bits, channels, tokens } = layout;
        let codes = 32 / bits;
        let (groups, together) = (head_dim.div_ceil(channels.max(1)), channels.div_ceil(codes));
        Self {
            words,
            scales,
            head_dim,
            bits,
            codes,
            width: groups * together,
            together,
            groups,
            channels,
            tokens,
        }
    }

    /// Returns the words of a token as runs, in order.
    pub(super) fn runs(&self) -> Vec<Run> {
        let Self { width, together, .. } = *self;
        let mut runs = Vec::with_capacity(width.div_ceil(together.min(LANES)));
        let mut first = 0;
        while first < width {
            let group = first / together;
            let end = ((group + 1) * together).min((first / LANES + 1) * LANES);
            runs.push(Run { first, len: end - first, group });
            first = end;
        }
        runs
    }

    /// Moves the elements of a vector to the places of their codes: word by word, with room for all codes
    /// that fit in one.
    #[inline(always)]
    pub(super) fn place(&self, vector: &[f32], places: &mut [f32]) {
        let room = self.together * self.codes;
        let groups = vector.chunks(self.channels).zip(places.chunks_mut(room));
        for (group, places) in groups {
            places[..group.len()].copy_from_slice(group);
        }
    }

    /// Divides the numbers by the powers of 2 by which the codes at their places are too large, because codes
    /// are not shifted down one by one.
    #[inline(always)]
    pub(super) fn shrink(&self, places: &mut [f32]) {
        let Self { bits, codes, .. } = *self;
        let shift = shift(bits);
        for word in places.chunks_mut(codes) {
            for (c, number) in word.iter_mut().enumerate() {
                *number *= 1.0 / (1u32 << (c % shift * bits)) as f32;
            }
        }
    }

    /// Reads the scales and offsets of a segment whose groups are along channels: `[groups, SEGMENT]`,
    /// written only for the segment's tokens.
    #[inline(always)]
    pub(super) fn scales_of_tokens(&self, segment: Segment, scales: &mut [f32], offsets: &mut [f32]) {
        let groups = self.groups;
        let words = &self.scales[segment.slot * groups..][..segment.len * groups];
        for g in 0..groups {
            let scales = &mut scales[g * SEGMENT..][..segment.len];
            let offsets = &mut offsets[g * SEGMENT..][..segment.len];
            if groups == 1 {
                for i in 0..segment.len {
                    (scales[i], offsets[i]) = affine(words[i]);
                }
            } else {
                for i in 0..segment.len {
                    (scales[i], offsets[i]) = affine(words[i * groups + g]);
                }
            }
        }
    }

    /// Reads the scales and offsets of a segment whose groups are along tokens, at the places of the
    /// channels' codes.
    #[inline(always)]
    pub(super) fn scales_of_channels(&self, segment: Segment, scales: &mut [f32], offsets: &mut [f32]) {
        let group = segment.slot / self.tokens.unwrap_or(1);
        let words = &self.scales[group * self.head_dim..][..self.head_dim];
        let (scales, offsets) = (&mut scales[..words.len()], &mut offsets[..words.len()]);
        for i in 0..words.len() {
            (scales[i], offsets[i]) = affine(words[i]);
        }
    }
}

/// Number of codes of a word that are used before it is shifted. They span up to 16 bits, so that floats
/// represent them in place.
pub(super) const fn shift(bits: usize) -> usize {
    match bits {
        8 => 2,
        3 => 5,
        _ => 4,
    }
}

/// Returns the dot product, summed in one fixed order for each length.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            sums[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[l] += a * b;
    }
    sums.iter().sum()
}

/// Returns the scale and the offset in a word.
#[inline(always)]
pub fn affine(word: u32) -> (f32, f32) {
    (half_number(word & 0xffff), half_number(word >> 16))
}

/// Smallest positive float16 number.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// Converts a finite float16 number from its bits. Without branches, so that it is vectorized.
#[inline(always)]
fn half_number(half: u32) -> f32 {
    let normal = f32::from_bits(((half & 0x7fff) << 13) + 0x3800_0000);
    let small = (half & 0x3ff) as i32 as f32 * SMALLEST;
    let number = if half & 0x7c00 == 0 { small } else { normal };
    if half & 0x8000 == 0 { number } else { -number }
}
