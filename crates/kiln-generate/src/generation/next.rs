//! The tokens that are fed next.

use burn::tensor::{Int, Tensor};
use kiln_core::{Error, Result, batch::Batch};

use crate::feeder::{Feeder, Output};

/// The tokens that are fed next.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub(super) enum Next {
    Prompt(Batch),
    /// Tokens `[rows, 1]`, and the rows that they continue; `None`: each continues its own row.
    Tokens(Tensor<2, Int>, Option<Vec<usize>>),
    /// The tokens that the device chose in the step before, and holds.
    OnDevice,
    Nothing,
}

impl Next {
    /// Feeds the tokens, a prompt `chunk` tokens of each row at a time. Each row of a prompt then becomes
    /// `width` rows.
    ///
    /// # Errors
    /// [`Error::Execution`] for [`Next::Nothing`], and the errors of the feeder.
    pub(super) async fn feed(
        self,
        feeder: &mut Feeder<'_>,
        width: usize,
        chunk: Option<usize>,
    ) -> Result<Output> {
        match self {
            Self::Prompt(batch) => {
                let logits = feeder.prefill(&batch, chunk).await?;
                feeder.widen(width)?;
                Ok(Output::Logits(repeated(logits, width)))
            }
            Self::Tokens(tokens, parents) => feed_tokens(feeder, tokens, parents.as_deref()),
            Self::OnDevice => feeder.step(None),
            Self::Nothing => {
                Err(Error::Execution("the generation was given up in the middle of a step".into()))
            }
        }
    }
}

/// Feeds `tokens` `[rows, 1]` after the rows `parents`; `None`: each after its own row.
pub(super) fn feed_tokens(
    feeder: &mut Feeder<'_>,
    tokens: Tensor<2, Int>,
    parents: Option<&[usize]>,
) -> Result<Output> {
    parents.map_or(Ok(()), |parents| feeder.reorder(parents))?;
    feeder.step(Some(tokens))
}

/// Repeats the logits of each row `width` times.
fn repeated(logits: Tensor<3>, width: usize) -> Tensor<3> {
    let [rows, one, vocab] = logits.dims();
    match width {
        1 => logits,
        _ => logits.reshape([rows, 1, one * vocab]).repeat_dim(1, width).reshape([rows * width, one, vocab]),
    }
}
