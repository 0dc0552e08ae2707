//! The rows of a batch: what each has so far, and what ends it.

use kiln_core::{Error, Result, batch::Batch, model::TokenId};

use super::Options;
use crate::{completion::Completion, processors::RowState, stopping::StopReason};

/// A row of the batch.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// The number of its prompt.
    pub(super) index: usize,
    /// The prompt and the tokens so far, without padding.
    pub(super) ids: Vec<TokenId>,
    /// Slots of padding in front.
    pub(super) left_pad: usize,
    /// Tokens of them that are the prompt.
    pub(super) prompt: usize,
    /// Slots that it has seen after the prompt, padding included.
    pub(super) prompt_end: usize,
    /// Why it ended; `None` while it goes on.
    pub(super) stopped: Option<StopReason>,
}

impl Row {
    /// The rows of `batch`, whose tokens on the host are `prompts`. `before`: slots of each row that the cache holds.
    ///
    /// # Errors
    /// [`Error::Prompt`] for rows that do not fit each other, and for ids that are not in a vocabulary of `vocab` tokens.
    pub(super) fn of(
        batch: &Batch,
        prompts: Vec<Vec<TokenId>>,
        before: &[usize],
        vocab: usize,
    ) -> Result<Vec<Self>> {
        check_rows(batch, &prompts, before)?;
        check_vocabulary(&prompts, vocab)?;
        let ends = before.iter().zip(&batch.skip).map(|(before, skip)| before + batch.len() - skip);
        let row = |(index, ((ids, prompt_end), &left_pad)): (usize, ((Vec<TokenId>, usize), &usize))| {
            let prompt = ids.len();
            Self { index, ids, prompt, left_pad, prompt_end, stopped: None }
        };
        Ok(prompts.into_iter().zip(ends).zip(&batch.left_pad).enumerate().map(row).collect())
    }

    /// What was generated so far.
    pub(super) fn completion(&self) -> Completion {
        Completion {
            tokens: self.ids[self.prompt..].to_vec(),
            text: None,
            stop_reason: self.stopped,
            score: None,
            token_scores: Vec::new(),
            beam_indices: Vec::new(),
        }
    }

    pub(super) fn finished(&self) -> bool {
        self.stopped.is_some()
    }

    /// How it looks after `generated` tokens of at most `limit`.
    pub(super) fn state(&self, generated: usize, limit: Option<usize>) -> RowState<'_> {
        RowState {
            index: self.index,
            ids: &self.ids,
            generated,
            padding: self.left_pad,
            len: self.prompt_end + generated,
            remaining: limit.map(|limit| limit.saturating_sub(generated)),
        }
    }
}

/// Slots that the longest row has seen after the prompt.
pub(super) fn longest_prompt(rows: &[Row]) -> usize {
    rows.iter().map(|row| row.prompt_end).max().unwrap_or(0)
}

/// What ends a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stopping<'a> {
    pub(super) options: &'a Options,
    pub(super) out_of_time: bool,
}

impl Stopping<'_> {
    /// Why a row ends with its latest token; `None`: it goes on.
    pub(super) fn reason(&self, row: &RowState<'_>) -> Option<StopReason> {
        let Options { settings, stopping_criteria, .. } = self.options;
        let ends_text = row.ids.last().is_some_and(|id| settings.eos_token_id.contains(id));
        if ends_text {
            Some(StopReason::EndOfText)
        } else if let Some(criterion) = stopping_criteria.iter().find(|criterion| criterion.ends(row)) {
            Some(criterion.reason)
        } else if row.remaining == Some(0) {
            Some(StopReason::Length)
        } else {
            self.out_of_time.then_some(StopReason::Time)
        }
    }
}

/// `before`: slots of each row that the cache holds.
fn check_rows(batch: &Batch, prompts: &[Vec<TokenId>], before: &[usize]) -> Result<()> {
    let error = |why: String| Err(Error::Prompt { why });
    let [rows, len] = batch.tokens.dims();
    if rows == 0 || len == 0 {
        return error("the prompt is empty; give at least one token".into());
    }
    let counts = [batch.left_pad.len(), batch.skip.len(), prompts.len(), before.len()];
    if counts != [rows; 4] {
        let [pads, skips, prompts, before] = counts;
        return error(format!(
            "the batch has {rows} rows, paddings of {pads}, skipped columns of {skips} and prompts of {prompts}; the cache \
             has {before} rows"
        ));
    }
    for (row, prompt) in prompts.iter().enumerate() {
        let unfed = batch.skip[row].saturating_add(batch.left_pad[row].saturating_sub(before[row]));
        let fed = len.saturating_sub(unfed);
        if fed == 0 {
            return error(format!("row {row} is nothing but padding; give at least one token"));
        }
        if prompt.len() < fed {
            return error(format!("row {row} feeds {fed} tokens of a prompt that has {}", prompt.len()));
        }
    }
    Ok(())
}

/// # Errors
/// [`Error::Prompt`] for ids that are not in a vocabulary of `vocab` tokens.
pub(super) fn check_vocabulary(prompts: &[Vec<TokenId>], vocab: usize) -> Result<()> {
    for (row, prompt) in prompts.iter().enumerate() {
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= vocab) {
            let why = format!(
                "token {id} in row {row} is not in the model's vocabulary of {vocab} tokens; \
                 does the tokenizer belong to the model?"
            );
            return Err(Error::Prompt { why });
        }
    }
    Ok(())
}
