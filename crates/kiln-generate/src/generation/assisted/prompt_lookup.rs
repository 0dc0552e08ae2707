//! Drafts from the tokens of the row: those that followed the same few tokens before.

use kiln_core::model::TokenId;

use super::{Asked, PromptLookup, Proposal};
use crate::{
    grammar::Mask,
    processors::{Processors, RowState},
    settings::Settings,
};

impl PromptLookup {
    /// Drafts the tokens that followed the last tokens of the row at their first occurrence, trying longer
    /// ends of the row first. A draft ends before a token that ends a text or that processors forbid. `mask`:
    /// the tokens that may come first.
    pub(super) fn propose(
        &self,
        asked: &Asked<'_>,
        settings: &Settings,
        mask: Option<&Mask>,
        vocab: usize,
    ) -> Proposal {
        let allowed = |token: &TokenId| mask.is_none_or(|mask| mask.allows(*token));
        let ids = asked.state.ids;
        let found = |size: usize| {
            let end = &ids[ids.len() - size..];
            let behind = |at: usize| &ids[at + size..ids.len().min(at + size + self.num_tokens)];
            (0..ids.len() - size)
                .filter(|&at| ids[at..].starts_with(end))
                .map(behind)
                .map(|tokens| permitted(asked.state, tokens, &settings.processors, vocab))
                .find(|tokens| tokens.first().is_some_and(allowed))
        };
        let longest = self.max_matching_ngram_size.min(ids.len().saturating_sub(1));
        let tokens = (1..=longest).rev().find_map(found).unwrap_or_default();
        let ends = tokens.iter().position(|id| settings.eos_token_id.contains(id));
        let tokens = &tokens[..ends.unwrap_or(tokens.len()).min(asked.most)];
        Proposal { tokens: tokens.to_vec(), drawn_from: Vec::new() }
    }
}

/// The first of `tokens`, up to one that processors remove regardless of its score.
fn permitted<'a>(
    row: RowState<'_>,
    tokens: &'a [TokenId],
    processors: &Processors,
    vocab: usize,
) -> &'a [TokenId] {
    if !processors.may_forbid() {
        return tokens;
    }
    let mut ids = row.ids.to_vec();
    for (i, &token) in tokens.iter().enumerate() {
        if processors.forbids(&row.ahead(&ids, i), token, vocab) {
            return &tokens[..i];
        }
        ids.push(token);
    }
    tokens
}
