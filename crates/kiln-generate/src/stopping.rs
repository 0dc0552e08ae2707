//! The conditions that end a row.

use std::{fmt, sync::Arc};

use crate::{processors::RowState, tokenizer::Tokenizer};

/// The reason for which a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// A token that ends a text.
    EndOfText,
    /// A stop string.
    StopString,
    /// The limit of new tokens, or of positions of the model.
    Length,
    /// The time limit (`max_time`).
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

/// A condition that ends a row with its latest token. (`StoppingCriteria`)
#[derive(Clone)]
pub struct StoppingCriterion {
    ends: Arc<Criterion>,
    pub(crate) reason: StopReason,
}

type Criterion = dyn Fn(&RowState<'_>) -> bool + Send + Sync;

impl StoppingCriterion {
    /// `ends` is called after each token of each row.
    pub fn new(ends: impl Fn(&RowState<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self { ends: Arc::new(ends), reason: StopReason::Criterion }
    }

    /// Ends a row whose text has one of these strings after the prompt, also across tokens. Special tokens
    /// count with their written text. (`StopStringCriteria`)
    pub fn stop_strings(tokenizer: Arc<Tokenizer>, strings: Vec<String>) -> Self {
        // A string reaches back this many tokens at most: nearly all have at least one byte. Tokens before
        // them change how the first one is written.
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        let reach = 2 * longest + 8;
        let ends = move |row: &RowState<'_>| {
            let tail = &row.ids[row.ids.len() - row.generated.min(reach).min(row.ids.len())..];
            let text = tokenizer.searched_text(tail).unwrap_or_default();
            strings.iter().any(|string| text.contains(string))
        };
        Self { ends: Arc::new(ends), reason: StopReason::StopString }
    }

    pub(crate) fn ends(&self, row: &RowState<'_>) -> bool {
        (self.ends)(row)
    }
}

impl fmt::Debug for StoppingCriterion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoppingCriterion").field("reason", &self.reason).finish_non_exhaustive()
    }
}
