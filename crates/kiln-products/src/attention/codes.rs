//! Where the codes and the scales of packed vectors lie, and which of them are worked on together.

use std::ops::Range;

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// Slots that are worked on together, at most. What a query makes of its keys depends on their positions alone, so segments
/// begin at positions that are multiples of it, at the turn of a ring and at groups of tokens, never where a query begins to see.
pub(super) const SEGMENT: usize = 64;

/// How the numbers of a vector are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub head_dim: usize,
    pub bits: usize,
    /// Neighbouring channels whose first code begins a word.
    pub channels: usize,
    /// Tokens that share the scale of a channel; `None` where neighbouring channels of a token share one.
    pub tokens: Option<usize>,
}

/// Packed keys or values of one head, slot by slot.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    pub(super) words: &'a [u32],
    pub(super) scales: &'a [u32],
    pub(super) head_dim: usize,
    pub(super) bits: usize,
    /// Codes of a word
    pub(super) codes: usize,
    /// Words of a token, and how many of them share a scale.
    pub(super) width: usize,
    pub(super) together: usize,
    /// Groups of the channels of a token, and channels of a group.
    pub(super) groups: usize,
    pub(super) channels: usize,
    /// Tokens that share the scales of channels, where these have them.
    pub(super) tokens: Option<usize>,
}

/// Neighbouring slots that hold neighbouring positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) position: usize,
    pub(super) slot: usize,
    /// [`SEGMENT`] at most
    pub(super) len: usize,
}

/// Neighbouring words of a token that share a scale, within [`LANES`] words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) group: usize,
}

impl<'a> Codes<'a> {
    /// `words` and `scales` of slots. The first code of a word is in its lowest bits, and a scale in those of a word of scales, whose
    /// highest bits have the offset. Scales are those of the groups of a slot, or those of each channel for the slots of a group.
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

    /// The words of a token, in order.
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

    /// Puts the numbers of a vector where their codes are: word by word, with room for all codes that fit in one.
    #[inline(always)]
    pub(super) fn place(&self, vector: &[f32], places: &mut [f32]) {
        let room = self.together * self.codes;
        let groups = vector.chunks(self.channels).zip(places.chunks_mut(room));
        for (group, places) in groups {
            places[..group.len()].copy_from_slice(group);
        }
    }

    /// Divides what is at places by the powers of 2 by which codes are too large that are not shifted down one by one.
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

    /// The scales and offsets of a segment along channels: `[groups, SEGMENT]`, of which those of its tokens are written.
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

    /// The scales and offsets of a segment along tokens, where the codes of channels are.
    #[inline(always)]
    pub(super) fn scales_of_channels(&self, segment: Segment, scales: &mut [f32], offsets: &mut [f32]) {
        let group = segment.slot / self.tokens.unwrap_or(1);
        let words = &self.scales[group * self.head_dim..][..self.head_dim];
        let (scales, offsets) = (&mut scales[..words.len()], &mut offsets[..words.len()]);
        for i in 0..words.len() {
            (scales[i], offsets[i]) = affine(words[i]);
        }
    }

    /// The segments of `positions` in a ring of slots whose first one holds `origin`. The first segment may begin before.
    pub(super) fn segments(
        &self,
        positions: &Range<usize>,
        origin: usize,
        slots: usize,
    ) -> impl Iterator<Item = Segment> + use<> {
        let together = self.tokens.unwrap_or(1);
        let Range { start, end } = *positions;
        let mut next = start / SEGMENT * SEGMENT;
        let all = std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let position = next;
            let slot = (position as i64 - origin as i64).rem_euclid(slots as i64) as usize;
            let whole = SEGMENT - position % SEGMENT;
            let group = if together == 1 { whole } else { together - slot % together };
            let len = whole.min(group).min(slots - slot).min(end - position);
            next += len;
            Some(Segment { position, slot, len })
        });
        all.filter(move |segment| segment.position + segment.len > start)
    }
}

/// How many codes of a word are used before it is shifted. They have up to 16 bits, so that floats hold them where they are.
pub(super) const fn shift(bits: usize) -> usize {
    match bits {
        8 => 2,
        3 => 5,
        _ => 4,
    }
}

/// The sum of products, in one order for each length.
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

/// A scale and an offset, of a word.
#[inline(always)]
pub fn affine(word: u32) -> (f32, f32) {
    (half_number(word & 0xffff), half_number(word >> 16))
}

/// The smallest float16 number that is not 0.
const SMALLEST: f32 = 1.0 / (1 << 24) as f32;

/// The float16 number of these bits, which is finite. Without branches, so that it is done in vectors.
#[inline(always)]
fn half_number(half: u32) -> f32 {
    let normal = f32::from_bits(((half & 0x7fff) << 13) + 0x3800_0000);
    let small = (half & 0x3ff) as i32 as f32 * SMALLEST;
    let number = if half & 0x7c00 == 0 { small } else { normal };
    if half & 0x8000 == 0 { number } else { -number }
}
