//! Division of positions into segments.

use std::ops::Range;

/// Number of lanes per vector.
pub(super) const LANES: usize = 16;

/// Largest number of slots that are processed together. The results of a query must depend only on the
/// positions of its keys, so segments begin at positions that are multiples of this, where the ring wraps,
/// and at groups of tokens. The first may be cut, where the order of sums does not depend on segments.
pub(super) const SEGMENT: usize = 64;

/// Adjacent slots that hold consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) position: usize,
    pub(super) slot: usize,
    /// At most [`SEGMENT`].
    pub(super) len: usize,
}

impl Segment {
    /// Leaves out positions before `start`, which must not be after the end.
    pub(super) fn cut_before(self, start: usize) -> Self {
        let skipped = start.saturating_sub(self.position);
        Self { position: self.position + skipped, slot: self.slot + skipped, len: self.len - skipped }
    }
}

/// Iterates over the segments of `positions` in a ring of `slots` slots, whose first slot holds `origin`. The
/// first segment may begin before `positions`.
///
/// `together`: number of adjacent slots that form a group of tokens, or 1. A segment lies within one group.
pub(super) fn segments(
    positions: &Range<usize>,
    origin: usize,
    slots: usize,
    together: usize,
) -> impl Iterator<Item = Segment> + use<> {
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
