//! Tokens that a program allows.

use std::{fmt, sync::Arc};

use kiln_core::{Result, model::TokenId};

use super::{Processor, RowState, lengths::in_vocabulary};
use crate::settings::setting;

/// The only tokens that may come next, as a program decides. If their scores are all -inf, they become
/// equally likely, as in transformers 5. (`PrefixConstrainedLogitsProcessor`)
#[derive(Clone)]
pub struct AllowedTokens(Arc<Allowed>);

type Allowed = dyn Fn(&RowState<'_>) -> Vec<TokenId> + Send + Sync;

impl AllowedTokens {
    pub(super) const NAME: &str = "allowed_tokens";

    /// Creates the processor. `allowed` is called before each token of each row. The generation ends with an
    /// error if it returns no token, or one that is not in the vocabulary.
    pub fn new(allowed: impl Fn(&RowState<'_>) -> Vec<TokenId> + Send + Sync + 'static) -> Self {
        Self(Arc::new(allowed))
    }
}

impl Processor for AllowedTokens {
    /// Changes nothing if no token is allowed.
    fn apply(&self, row: &RowState<'_>, scores: &mut [f32]) {
        _ = self.try_apply(row, scores);
    }

    fn try_apply(&self, row: &RowState<'_>, scores: &mut [f32]) -> Result<()> {
        let allowed = (self.0)(row);
        if allowed.is_empty() {
            let why = format!(
                "the list is empty for row {} after {} tokens; allow at least one token",
                row.index,
                row.ids.len()
            );
            return Err(setting(Self::NAME, why));
        }
        in_vocabulary(Self::NAME, &allowed, scores.len())?;
        let mut mask = vec![f32::NEG_INFINITY; scores.len()];
        allowed.iter().for_each(|&id| mask[id as usize] = 0.0);
        scores.iter_mut().zip(&mask).for_each(|(score, mask)| *score += mask);
        if scores.iter().all(|score| *score == f32::NEG_INFINITY) {
            scores.copy_from_slice(&mask);
        }
        Ok(())
    }
}

impl fmt::Debug for AllowedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllowedTokens").finish_non_exhaustive()
    }
}
