//! Sets of tokens that may follow.

use std::fmt;

use kiln_core::model::TokenId;

/// A set of tokens of a vocabulary: those that may follow.
#[derive(Clone, PartialEq, Eq)]
pub struct Mask {
    /// A bit for each token: token `t` is bit `t % 32` of word `t / 32`. Bits beyond the vocabulary are 0.
    words: Vec<u32>,
    vocab: usize,
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mask").field("allowed", &self.count()).field("vocab", &self.vocab).finish()
    }
}

impl Mask {
    /// The set of these tokens. Ids outside the vocabulary are ignored.
    pub(crate) fn of(vocab: usize, tokens: impl IntoIterator<Item = TokenId>) -> Self {
        let mut words = vec![0; vocab.div_ceil(32)];
        for id in tokens.into_iter().map(|id| id as usize).filter(|id| *id < vocab) {
            if let Some(word) = words.get_mut(id / 32) {
                *word |= 1 << (id % 32);
            }
        }
        Self { words, vocab }
    }

    /// The tokens of `self` whose bit is set in `words`.
    pub(crate) fn and(&self, words: &[u32]) -> Self {
        let both = self.words.iter().zip(words).map(|(a, b)| a & b);
        Self { words: both.collect(), vocab: self.vocab }
    }

    /// Whether the token may follow.
    pub fn allows(&self, id: TokenId) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Number of tokens that may follow.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The tokens that may follow, in the order of their ids.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> {
        (0..self.vocab as TokenId).filter(|id| self.allows(*id))
    }

    /// Size of the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// A bit for each token: token `t` is bit `t % 32` of word `t / 32`. Bits beyond the vocabulary are 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Sets the score of each token that may not follow to -inf. Returns the number of tokens that can still
    /// be chosen.
    ///
    /// `scores`: one for each token of the vocabulary. A result of 0 means that the grammar and the other
    /// processors of the scores leave no token to choose.
    pub fn apply(&self, scores: &mut [f32]) -> usize {
        let mut left = 0;
        for (id, score) in scores.iter_mut().enumerate() {
            if !self.allows(id as TokenId) {
                *score = f32::NEG_INFINITY;
            }
            left += usize::from(*score != f32::NEG_INFINITY);
        }
        left
    }
}
