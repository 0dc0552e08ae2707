//! Caches of the beginnings of prompts, so that a prompt that begins like an earlier one is computed from
//! there.
//!
//! Prompts are cut into chunks at multiples of the same number of tokens, and a beginning ends at such a
//! multiple. The rest of a prompt is then computed in the passes that it has without the beginning, so that
//! every bit stays the same. Copies are in host memory, in the form in which caches are saved: any strategy
//! has it, and what continues a copy shares nothing with it.
//!
//! If answers are reused, too, a prompt may begin with an earlier prompt and its answer, up to any token.
//! Bits may then change: decode steps and passes of other lengths sum in other orders.

use kiln_core::{model::TokenId, model_cache::CacheState};

use crate::generation::Generation;

/// Number of stored beginnings that are tried for a prompt. A cache that cannot return to the common part of
/// one may be able to with another.
const TRIES: usize = 3;

/// Stored beginnings, the latest used last.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// The most bytes of all copies.
    limit: usize,
    /// Whether prompts may begin with answers.
    pub(super) with_answers: bool,
    stored: Vec<Stored>,
}

#[derive(Debug)]
struct Stored {
    prefix: StoredPrefix,
    bytes: usize,
}

/// A copy of a cache that holds the beginning of a prompt, in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredPrefix {
    pub scope: PrefixScope,
    pub tokens: Vec<TokenId>,
    pub state: CacheState,
    /// Whether the cache can return to any earlier length.
    pub rewinds: bool,
    /// Whether it ends with an answer. Its bits may differ from those of a prompt.
    pub is_answer: bool,
}

/// The prompts that may share beginnings: those of one [scope](crate::Options::prefix_scope), cut into chunks
/// of the same size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixScope {
    pub name: String,
    /// Number of tokens of a chunk.
    pub chunk: usize,
}

/// A copy of a cache that held the first tokens of a prompt.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) tokens: usize,
    pub(crate) state: CacheState,
    pub(crate) rewinds: bool,
}

impl Prefixes {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, with_answers: false, stored: Vec::new() }
    }

    /// Prepares a generation whose prompt is computed next: gives its cache the longest beginning that is
    /// stored, and lets it keep what is worth storing. Returns whether there was a beginning.
    pub(super) fn begin(&mut self, generation: &mut Generation<'static>) -> bool {
        let Some((scope, prompt)) = generation.sharable_prompt() else { return false };
        // The last token is always fed, because its output is needed.
        let grid = |tokens: usize| tokens - tokens % scope.chunk;
        let last = prompt.len().saturating_sub(1);
        let end = grid(last);
        let common = |stored: &StoredPrefix| {
            let same = stored.tokens.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
            if stored.is_answer { same.min(last) } else { grid(same).min(end) }
        };
        let mut found: Vec<(usize, usize)> = (0..self.stored.len())
            .filter(|&at| self.stored[at].prefix.scope == scope)
            .map(|at| (common(&self.stored[at].prefix), at))
            .filter(|&(tokens, _)| tokens > 0)
            .collect();
        // The longest first; of equally long ones, one that changes no bit, and one that ends there.
        found.sort_by_key(|&(tokens, at)| {
            let stored = &self.stored[at].prefix;
            (std::cmp::Reverse(tokens), stored.is_answer, stored.tokens.len(), at)
        });
        let branch = found.first().map_or(0, |&(tokens, _)| grid(tokens));
        let used = found.iter().take(TRIES).find(|&&(tokens, at)| {
            let stored = &self.stored[at].prefix;
            (stored.rewinds || stored.tokens.len() == tokens)
                && generation.begin_after(tokens, stored.state.clone(), stored.is_answer)
        });
        let reused = used.map_or(0, |&(tokens, _)| tokens);
        let mut is_exact = true;
        if let Some(&(_, at)) = used {
            let stored = self.stored.remove(at);
            is_exact = !stored.prefix.is_answer;
            self.stored.push(stored);
        }
        // Where prompts part, others will part, too.
        let mut keeps = vec![branch, end];
        // What follows an answer must not become the beginning of others.
        keeps.retain(|&tokens| is_exact && tokens > reused);
        keeps.dedup();
        generation.keep_beginnings(keeps);
        reused > 0
    }

    /// Stores what a generation kept of its prompt.
    pub(super) fn store(&mut self, generation: &mut Generation<'static>) {
        let kept = generation.take_beginnings();
        let Some((scope, prompt)) = generation.prefix_scope().filter(|_| !kept.is_empty()) else { return };
        for Kept { tokens, state, rewinds } in kept {
            let Some(tokens) = prompt.get(..tokens) else { continue };
            let (scope, tokens) = (scope.clone(), tokens.to_vec());
            self.add(StoredPrefix { scope, tokens, state, rewinds, is_answer: false });
        }
    }

    /// Stores the prompt and the answer of a generation that is over, if answers are reused.
    pub(super) fn store_answer(&mut self, generation: &mut Generation<'static>) {
        if !self.with_answers {
            return;
        }
        let Some((scope, tokens, Kept { state, rewinds, .. })) = generation.copy_with_answer() else {
            return;
        };
        self.add(StoredPrefix { scope, tokens, state, rewinds, is_answer: true });
    }

    /// Stores a copy if there is room for it.
    pub(super) fn add(&mut self, new: StoredPrefix) {
        if new.is_answer && !self.with_answers {
            return;
        }
        // A longer one that can return to a shorter one takes its place.
        self.stored.retain(|Stored { prefix: old, .. }| {
            let is_part =
                new.tokens.starts_with(&old.tokens) && (new.rewinds || old.tokens.len() == new.tokens.len());
            !(old.scope == new.scope && old.is_answer == new.is_answer && is_part)
        });
        let bytes = new.state.bytes();
        if bytes <= self.limit {
            self.stored.push(Stored { prefix: new, bytes });
            self.shrink(self.limit);
        }
    }

    /// All copies, the latest used last.
    pub(super) fn all(&self) -> impl Iterator<Item = &StoredPrefix> {
        self.stored.iter().map(|stored| &stored.prefix)
    }

    /// Number of bytes of all copies.
    pub(super) fn bytes(&self) -> usize {
        self.stored.iter().map(|stored| stored.bytes).sum()
    }

    /// Drops those whose last use is longest ago, until all take at most `bytes`.
    fn shrink(&mut self, bytes: usize) {
        let mut held = self.bytes();
        let dropped = self.stored.iter().take_while(|stored| {
            let drops = held > bytes;
            held -= if drops { stored.bytes } else { 0 };
            drops
        });
        let dropped = dropped.count();
        self.stored.drain(..dropped);
    }
}
