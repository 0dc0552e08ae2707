//! Division of the vocabulary among workgroups, and the tokens that the last kernel reads.

use super::Sampling;

/// Tokens that each workgroup keeps, each the best of some.
pub(super) const TOPS: usize = 8;

/// Bins in which a workgroup counts its tokens by score.
pub(super) const BINS: usize = 128;

/// Fewest tokens that are worth a workgroup.
const WORTH: usize = 512;

/// Most workgroups per row: their tops are as many as a workgroup has lanes.
const MOST: usize = 32;

/// The workgroups of a row, each with neighbouring tokens. They depend on the vocabulary alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    pub(super) shares: usize,
    /// Tokens per workgroup, except the last.
    pub(super) share: usize,
}

impl Sharing {
    pub(super) fn new(vocab: usize) -> Self {
        let shares = vocab.div_ceil(WORTH).clamp(1, MOST);
        Self { shares, share: vocab.div_ceil(shares) }
    }
}

/// The tokens among which one is drawn. They include all that processors keep, and seldom many more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates {
    /// Whether the candidates are listed. Otherwise they are all tokens.
    pub(super) listed: bool,
    /// Least number of best tokens that are listed; 0 for all.
    pub(super) top_k: usize,
    /// Smallest weight of listed tokens, relative to the largest weight.
    pub(super) least: f32,
    /// Largest share of the total weight that unlisted tokens may have; 0 for no limit. A limit requires
    /// counting bins.
    pub(super) tail: f32,
}

impl Candidates {
    pub(super) fn new(sampling: &Sampling, Sharing { shares, .. }: Sharing) -> Self {
        let &Sampling { top_k, tail, min_p, draws, .. } = sampling;
        let listed = draws && (top_k > 0 || tail > 0.0 || min_p > 0.0);
        let all = Self { listed, top_k: 0, least: 0.0, tail: 0.0 };
        match top_k {
            _ if !listed => all,
            0 if tail > 0.0 => Self { tail, ..all },
            // A later step computes the weights again, and may round them differently.
            0 => Self { least: min_p * 0.99, ..all },
            1.. if top_k <= shares * TOPS => Self { top_k, ..all },
            _ => all,
        }
    }
}
