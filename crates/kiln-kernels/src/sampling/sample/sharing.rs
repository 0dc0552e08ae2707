//! How the GPU kernels share the vocabulary, and which tokens the last of them reads.

use super::Sampling;

/// Tokens that are left by each workgroup, each the best of some.
pub(super) const TOPS: usize = 8;

/// Bins that a workgroup counts its tokens in, by score.
pub(super) const BINS: usize = 128;

/// Tokens that are worth a workgroup.
const WORTH: usize = 512;

/// Workgroups of a row, at most: their tops are as many as a workgroup has lanes.
const MOST: usize = 32;

/// Workgroups of a row, each with neighbouring tokens. The vocabulary alone says it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sharing {
    pub(super) shares: usize,
    /// Tokens of each, but of the last.
    pub(super) share: usize,
}

impl Sharing {
    pub(super) fn new(vocab: usize) -> Self {
        let shares = vocab.div_ceil(WORTH).clamp(1, MOST);
        Self { shares, share: vocab.div_ceil(shares) }
    }
}

/// Tokens among which one is drawn. All that processors keep are there, and seldom many more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidates {
    /// Whether they are listed. Else they are all tokens.
    pub(super) listed: bool,
    /// Listed are at least that many of the best tokens; 0: all.
    pub(super) top_k: usize,
    /// Listed tokens weigh this at least, where the largest weighs 1.
    pub(super) least: f32,
    /// What is not listed weighs at most this much of all that there is; 0: it may weigh anything. Bins have to be counted for it.
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
            // Another step computes weights anew, and may round them otherwise.
            0 => Self { least: min_p * 0.99, ..all },
            1.. if top_k <= shares * TOPS => Self { top_k, ..all },
            _ => all,
        }
    }
}
