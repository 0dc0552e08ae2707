//! The choice of a step.

use kiln_core::model::TokenId;

use crate::stopping::StopReason;

/// The choice of a step, with the numbers that it was made by if they are kept.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// The next token of each row; any token for rows that have ended.
    pub(super) tokens: Vec<TokenId>,
    /// The row that each row continues; `None`: each continues itself.
    pub(super) parents: Option<Vec<usize>>,
    /// `[row][vocab]`; empty for rows that had ended.
    pub(super) logits: Vec<Vec<f32>>,
    pub(super) scores: Vec<Vec<f32>>,
    /// Why each row ends with its token; `None` if that is not known yet.
    pub(super) stopped: Option<Vec<Option<StopReason>>>,
}
