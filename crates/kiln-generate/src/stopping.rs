//! Why a row ends.

use std::{fmt, sync::Arc};

use crate::processors::RowState;

/// Why a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// A token that ends the text.
    EndOfText,
    /// A stop string.
    StopString,
    /// As many tokens as were asked for, or as the model has positions.
    Length,
    /// The time that was given (`max_time`).
    Time,
    /// A criterion of the program.
    Criterion,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EndOfText => "end_of_text",
            Self::StopString => "stop_string",
            Self::Length => "length",
            Self::Time => "time",
            Self::Criterion => "criterion",
        })
    }
}

/// Whether a row ends with its latest token, as a program decides. (`StoppingCriteria`)
#[derive(Clone)]
pub struct StoppingCriterion(Arc<Criterion>);

type Criterion = dyn Fn(&RowState<'_>) -> bool + Send + Sync;

impl StoppingCriterion {
    /// `ends` is asked after each token of each row.
    pub fn new(ends: impl Fn(&RowState<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(ends))
    }

    pub(crate) fn ends(&self, row: &RowState<'_>) -> bool {
        (self.0)(row)
    }
}

impl fmt::Debug for StoppingCriterion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoppingCriterion").finish_non_exhaustive()
    }
}
