//! Division of the vocabulary among workgroups, and the tokens that the last of the three sampling kernels
//! reads.

use super::Sampling;

/// Number of tops of a workgroup: the best token of each group of lanes. The best top is the best token.
pub(super) const TOPS: usize = 8;

/// Number of bins in which a workgroup counts its tokens by score. A bin is 0.25 wide.
pub(super) const BINS: usize = 128;

/// Minimum number of tokens that are worth a workgroup.
const WORTH: usize = 512;

/// Maximum number of workgroups per row. A later kernel reads all tops of a row with one lane each, and a
/// workgroup has `MOST * TOPS` lanes.
const MOST: usize = 32;

/// The division of a row's vocabulary into shares of neighboring tokens, one per workgroup. It depends only
/// on the size of the vocabulary, so rows do not change each other's results.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    /// Number of shares.
    pub(super) shares: usize,
    /// Tokens per share; the last may have fewer.
    pub(super) share: usize,
}

impl Sharing {
    pub(super) fn new(vocab: usize) -> Self {
        let shares = vocab.div_ceil(WORTH).clamp(1, MOST);
        Self { shares, share: vocab.div_ceil(shares) }
    }
}

/// The condition for candidates, from which the last kernel samples. They include all tokens that top_k,
/// top_p and min_p keep, and seldom many more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates {
    /// Whether the candidates are listed. Otherwise they are all tokens.
    pub(super) listed: bool,
    /// Minimum number of best tokens that are listed; 0 for all.
    pub(super) top_k: usize,
    /// Minimum weight of listed tokens; the largest weight is 1.
    pub(super) least: f32,
    /// Maximum fraction of the total weight that unlisted tokens together have; 0 for no limit. A limit
    /// requires the counts of the bins.
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
