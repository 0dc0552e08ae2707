//! A step of a generation.

use kiln_core::model::TokenId;

/// One more token for every row that had not ended. A prompt has as many rows as it has beams, or sequences to return; they follow
/// each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// For each row; `None` once it has ended. The token that ends a row is still there.
    pub tokens: Vec<Option<TokenId>>,
    /// Whether this is the row's last step, or it came earlier.
    pub finished: Vec<bool>,
    /// Of a beam search: the row whose tokens each row goes on with. Its tokens so far are replaced by theirs.
    pub parents: Option<Vec<usize>>,
    /// `[row][vocab]`, as the model gave them; empty for rows that had ended. Of a beam search: of the rows as they were before.
    pub logits: Option<Vec<Vec<f32>>>,
    /// `[row][vocab]`, as the token was chosen by; empty for rows that had ended.
    pub scores: Option<Vec<Vec<f32>>>,
}
