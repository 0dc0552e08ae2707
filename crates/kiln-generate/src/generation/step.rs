//! A step of a generation.

use burn::tensor::TensorData;
use kiln_core::{Result, model::TokenId, read_back::ReadBack};

use super::{
    Options, dola,
    rows::{Rows, Stopping},
    runner::{Reading, Runner},
    scores::{Numbers, Scores, ScoresRead, Top},
};
use crate::{
    feeder::Wanted,
    grammar::{Mask, Masks},
    stats::StatsRecorder,
};

/// One more token for every row that had not ended. A prompt has as many rows as it has beams, or sequences
/// to return; they follow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The token of each row; `None` once it has ended. The token that ends a row is still there.
    pub tokens: Vec<Option<TokenId>>,
    /// Whether this is the last step of each row, or it came earlier.
    pub finished: Vec<bool>,
    /// For beam search: the row whose tokens each row continues. They replace its own tokens so far.
    pub parents: Option<Vec<usize>>,
    /// `[row][vocab]`, before processors; empty for rows that had ended. For beam search: of the rows as they
    /// were before.
    pub logits: Option<Vec<Vec<f32>>>,
    /// `[row][vocab]`, after processors; empty for rows that had ended.
    pub scores: Option<Vec<Vec<f32>>>,
}

/// The parts of a generation that a search makes a step with.
#[derive(Debug)]
pub(super) struct StepState<'g, 'a> {
    pub(super) runner: &'g mut Runner<'a>,
    pub(super) rows: &'g Rows,
    pub(super) options: &'g Options,
    pub(super) recorder: &'g mut StatsRecorder,
}

impl<'g> StepState<'g, '_> {
    /// Feeds the model what is next, and starts to read the result.
    pub(super) async fn start(&mut self) -> Result<Reading> {
        self.runner.start_step(self.rows, self.options).await
    }

    /// Finishes the reading of tokens, or beams, that the device chose.
    pub(super) async fn chosen(&mut self, reading: ReadBack) -> Result<TensorData> {
        let read = self.runner.read(reading).await?;
        self.record_scores()?;
        Ok(read)
    }

    /// Finishes the reading of scores, and applies DoLa and guidance.
    pub(super) async fn numbers(&mut self, scores: Scores) -> Result<Numbers> {
        let Scores { vocab, read, negative } = scores;
        let (logits, top) = match read {
            ScoresRead::Likeliest { tokens, log_probs, most } => {
                let tokens = self.runner.read(tokens).await?.iter().collect();
                let log_probs = self.runner.read_floats(log_probs).await?;
                (Vec::new(), Some(Top { tokens, log_probs, most }))
            }
            ScoresRead::All(logits) => (self.runner.read_floats(logits).await?, None),
        };
        let negative = match negative {
            Some(reading) => Some(self.runner.read_floats(reading).await?),
            None => None,
        };
        self.record_scores()?;
        let (logits, begin) = match self.runner.wanted() {
            Wanted::Early(layers) => {
                let (logits, begin) = dola::contrast(&logits, layers.len(), vocab);
                (logits, Some(begin))
            }
            Wanted::Last | Wanted::Hidden | Wanted::PromptLogprobs => (logits, None),
        };
        let begin = match negative {
            Some(negative) => self.runner.guided(begin.as_ref().unwrap_or(&logits), &negative, vocab),
            None => begin,
        };
        Ok(Numbers { logits, begin, top, vocab })
    }

    /// Records that the scores are there.
    ///
    /// # Errors
    /// The error of the device if it refused an allocation, so that they cannot be trusted.
    pub(super) fn record_scores(&mut self) -> Result<()> {
        self.runner.none_refused()?;
        self.recorder.scored();
        Ok(())
    }

    pub(super) fn stopping(&self) -> Stopping<'g> {
        let out_of_time = self.recorder.is_past(self.options.settings.max_time);
        Stopping { options: self.options, out_of_time }
    }
}

/// Waits for the tokens that a grammar allows in each row; empty without a grammar.
pub(super) fn allowed(masks: &mut Option<Masks>) -> Result<Vec<Mask>> {
    let masks = masks.as_mut().map_or(Ok(Vec::new()), Masks::wait)?;
    Ok(masks.into_iter().flatten().map(|next| next.mask).collect())
}
