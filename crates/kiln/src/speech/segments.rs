//! Segments from the tokens of a window (transformers' `_retrieve_segment`).

use kiln_core::model::TokenId;

/// Number of frames per timestamp step, which is 20 ms.
const FRAMES: usize = 2;

/// A part of a window's tokens, with its start and end in frames from the beginning of the window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) tokens: std::ops::Range<usize>,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// Divides a window's tokens into parts. Also returns the number of frames to the beginning of the next
/// window. `first` is the token of 0 seconds; the window has `frames` frames.
pub(super) fn parts(tokens: &[TokenId], first: TokenId, frames: usize) -> (Vec<Part>, usize) {
    let is_time = |at: usize| tokens.get(at).is_some_and(|&token| token >= first);
    let time = |at: usize| tokens.get(at).map_or(0, |&token| token.saturating_sub(first) as usize * FRAMES);
    let len = tokens.len();
    // A single timestamp at the end means that there is no speech after it.
    let ends_alone = len >= 2 && is_time(len - 1) && !is_time(len - 2);
    // Tokens are cut between the halves of a pair.
    let mut cuts: Vec<usize> = (1..len).filter(|&at| is_time(at - 1) && is_time(at)).collect();
    let Some(last_cut) = cuts.last_mut() else {
        let last = (0..len).rev().find(|&at| is_time(at)).map(time).filter(|&time| time > 0);
        return (vec![Part { tokens: 0..len, start: 0, end: last.unwrap_or(frames) }], frames);
    };
    let next = match ends_alone {
        true => {
            cuts.push(len);
            frames
        }
        false => {
            // The segment after the last pair was cut off in the middle, and is decoded again in the next
            // window.
            let next = time(*last_cut - 1);
            // The second half of the pair stays, as a sign of that.
            *last_cut += 1;
            next
        }
    };
    let mut begin = 0;
    let last = cuts.len() - 1;
    let parts = cuts.into_iter().enumerate().map(|(i, cut)| {
        let end_at = if i == last && !ends_alone { cut - 2 } else { cut - 1 };
        let part = Part { tokens: begin..cut, start: time(begin), end: time(end_at) };
        begin = cut;
        part
    });
    (parts.collect(), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: TokenId = 1000;

    #[test]
    fn a_single_timestamp_at_the_end_ends_the_window() {
        let (parts, next) = parts(&[T, 5, 6, T + 100], T, 3000);
        assert_eq!(parts, [Part { tokens: 0..4, start: 0, end: 200 }]);
        assert_eq!(next, 3000);
    }

    #[test]
    fn the_next_window_begins_at_the_last_pair_of_timestamps() {
        let tokens = [T, 5, T + 50, T + 50, 6, T + 90, T + 90, 7, 8];
        let (parts, next) = parts(&tokens, T, 3000);
        let expected =
            [Part { tokens: 0..3, start: 0, end: 100 }, Part { tokens: 3..7, start: 100, end: 180 }];
        assert_eq!((&parts[..], next), (&expected[..], 180));
    }

    #[test]
    fn text_without_pairs_of_timestamps_is_one_segment() {
        assert_eq!(parts(&[5, 6], T, 700), (vec![Part { tokens: 0..2, start: 0, end: 700 }], 700));
        assert_eq!(parts(&[T, 5, 6], T, 700), (vec![Part { tokens: 0..3, start: 0, end: 700 }], 700));
        assert_eq!(parts(&[], T, 700), (vec![Part { tokens: 0..0, start: 0, end: 700 }], 700));
    }
}
