//! An end to reasoning that goes on too long.

use kiln_core::model::TokenId;

use crate::processors::{Processor, RowState};

/// Ends reasoning after a number of tokens, by forcing the mark that ends it. An answer that does not reason,
/// or not any more, stays as it is.
#[derive(Clone, Debug)]
pub struct ReasoningBudget {
    pub(super) open: Vec<TokenId>,
    pub(super) close: Vec<TokenId>,
    /// Whether the prompt ends with the mark that begins reasoning.
    pub(super) is_open: bool,
    pub(super) tokens: usize,
}

impl ReasoningBudget {
    /// The token that must follow; `None`: any may.
    fn forced(&self, generated: &[TokenId]) -> Option<TokenId> {
        let begin = match find(generated, &self.open) {
            Some(at) => at + self.open.len(),
            None if self.is_open => 0,
            None => return None,
        };
        let reasoning = &generated[begin..];
        if reasoning.len() < self.tokens || find(reasoning, &self.close).is_some() {
            return None;
        }
        // Forcing may have begun, and the model may have written the beginning of the mark itself.
        let written = (0..self.close.len()).rev().find(|&n| reasoning.ends_with(&self.close[..n]))?;
        self.close.get(written).copied()
    }
}

fn find(tokens: &[TokenId], part: &[TokenId]) -> Option<usize> {
    tokens.windows(part.len().max(1)).position(|window| window == part)
}

impl Processor for ReasoningBudget {
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        let generated = row.ids.len().saturating_sub(row.generated);
        let Some(token) = self.forced(&row.ids[generated..]) else { return };
        for (id, score) in (0..).zip(scores) {
            *score = if id == token { 0.0 } else { f32::NEG_INFINITY };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ReasoningBudget;

    #[test]
    fn reasoning_ends_after_its_tokens() {
        let budget = ReasoningBudget { open: vec![1], close: vec![8, 9], is_open: true, tokens: 3 };
        assert_eq!(budget.forced(&[5, 5]), None);
        assert_eq!(budget.forced(&[5, 5, 5]), Some(8));
        assert_eq!(budget.forced(&[5, 5, 5, 8]), Some(9));
        assert_eq!(budget.forced(&[5, 5, 5, 8, 9, 5, 5, 5]), None);
        assert_eq!(budget.forced(&[5, 8, 9, 5, 5, 5]), None);
        assert_eq!(budget.forced(&[5, 8, 8]), Some(9));
        // An answer that begins to reason by itself, or never does.
        let budget = ReasoningBudget { is_open: false, ..budget };
        assert_eq!(budget.forced(&[5, 5, 5, 5, 5]), None);
        assert_eq!((budget.forced(&[1, 5, 5]), budget.forced(&[1, 5, 5, 5])), (None, Some(8)));
        let none = ReasoningBudget { tokens: 0, ..budget };
        assert_eq!((none.forced(&[]), none.forced(&[1])), (None, Some(8)));
    }
}
