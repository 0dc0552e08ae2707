//! The rows of a batch: the tokens of each so far, and the conditions that end it.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, batch::Batch, model::TokenId, read_back};

use super::Options;
use crate::{
    completion::Completion, feeder::Feeder, processors::RowState, settings::Settings, stopping::StopReason,
};

/// The rows of a batch, and how many steps they have taken.
#[derive(Debug)]
pub(super) struct Rows {
    /// All rows. The rows of a prompt are consecutive.
    pub(super) list: Vec<Row>,
    /// Number of rows of each prompt.
    pub(super) width: usize,
    /// The most tokens that a row may generate; `None`: until every row has ended.
    pub(super) limit: Option<usize>,
    /// Number of steps that were delivered, and of tokens that each row generated.
    pub(super) delivered: usize,
    /// Whether the rows are all that was fed, so that it can be fed again.
    pub(super) complete: bool,
}

/// A row of the batch.
#[derive(Clone, Debug)]
pub(super) struct Row {
    /// Index of the prompt.
    pub(super) index: usize,
    /// The prompt and the tokens so far, without padding.
    pub(super) ids: Vec<TokenId>,
    /// Number of padding slots before the tokens.
    pub(super) left_pad: usize,
    /// Number of tokens of the prompt.
    pub(super) prompt: usize,
    /// Number of slots at the end of the prompt, padding included.
    pub(super) prompt_end: usize,
    /// The reason for which the row ended; `None` while it goes on.
    pub(super) stopped: Option<StopReason>,
}

impl Row {
    /// The generated tokens so far.
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

    /// The state for processors, after `generated` tokens of at most `limit`.
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

impl Rows {
    /// Creates the rows of `batch`, whose tokens on the host are `prompts`. `before`: slots of each row that
    /// the cache holds.
    ///
    /// # Errors
    /// [`Error::Prompt`] for rows that do not fit each other, and for ids that are not in a vocabulary of
    /// `vocab` tokens; [`Error::Setting`] if the prompt exceeds `max_length`.
    pub(super) fn new(
        batch: &Batch,
        prompts: Vec<Vec<TokenId>>,
        before: &[usize],
        settings: &Settings,
        vocab: usize,
    ) -> Result<Self> {
        check_rows(batch, &prompts, before)?;
        check_vocabulary(&prompts, vocab)?;
        let ends = before.iter().zip(&batch.skip).map(|(before, skip)| before + batch.len() - skip);
        let row = |(index, ((ids, prompt_end), &left_pad)): (usize, ((Vec<TokenId>, usize), &usize))| {
            let prompt = ids.len();
            Row { index, ids, prompt, left_pad, prompt_end, stopped: None }
        };
        let rows = prompts.into_iter().zip(ends).zip(&batch.left_pad).enumerate().map(row);
        let width = settings.width();
        let mut rows = Self::from_list(rows.flat_map(|row| std::iter::repeat_n(row, width)).collect(), width);
        rows.limit = settings.new_tokens(rows.prompt_end())?;
        rows.complete = rows.list.iter().all(|row| row.ids.len() + row.left_pad == row.prompt_end);
        Ok(rows)
    }

    /// Rows that have generated nothing, without a limit.
    pub(super) fn from_list(list: Vec<Row>, width: usize) -> Self {
        Self { list, width, limit: None, delivered: 0, complete: true }
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// The first row of each prompt.
    pub(super) fn prompts(&self) -> impl ExactSizeIterator<Item = &Row> {
        self.list.iter().step_by(self.width.max(1))
    }

    /// Number of slots of the longest row at the end of the prompt.
    pub(super) fn prompt_end(&self) -> usize {
        longest_prompt(&self.list)
    }

    /// Number of slots of each row that hold the delivered tokens but the last.
    pub(super) fn ends(&self) -> Vec<usize> {
        let delivered = self.delivered.saturating_sub(1);
        self.list.iter().map(|row| row.prompt_end + delivered).collect()
    }

    /// The state of a row for processors; `None` if there is no such row.
    pub(super) fn state(&self, row: usize) -> Option<RowState<'_>> {
        self.list.get(row).map(|row| row.state(self.delivered, self.limit))
    }

    /// Whether every row has ended.
    pub(super) fn finished(&self) -> bool {
        self.list.iter().all(Row::finished)
    }

    /// The last token of each row, `[rows, 1]`.
    pub(super) fn last_tokens(&self, device: &Device) -> Tensor<2, Int> {
        let tokens: Vec<i32> =
            self.list.iter().map(|row| row.ids.last().map_or(0, |&id| id as i32)).collect();
        Tensor::from_data(TensorData::new(tokens, [self.len(), 1]), device)
    }

    /// The prompts, one row each. `any` fills columns without a token.
    pub(super) fn prompt_batch(&self, any: TokenId, device: &Device) -> Batch {
        let prompts: Vec<Row> = self.prompts().cloned().collect();
        columns(&prompts, 0..self.prompt_end(), any, device)
    }

    /// Feeds all tokens but the last of each row to an empty cache. Returns the last ones, `[rows, 1]`.
    pub(super) async fn feed_again(
        &self,
        feeder: &mut Feeder<'_>,
        chunk: Option<usize>,
        any: TokenId,
        device: &Device,
    ) -> Result<Tensor<2, Int>> {
        let prompt = self.prompt_end();
        let held = prompt + self.delivered;
        feeder.prefill(&self.prompt_batch(any, device), chunk).await?;
        feeder.widen(self.width)?;
        // One by one, as before: the tokens that a sink cache keeps depend on it.
        for column in prompt..held - 1 {
            read_back::yield_now().await;
            feeder.prefill(&columns(&self.list, column..column + 1, any, device), None).await?;
        }
        Ok(columns(&self.list, held - 1..held, any, device).tokens)
    }
}

/// Number of slots of the longest row at the end of the prompt.
fn longest_prompt(rows: &[Row]) -> usize {
    rows.iter().map(|row| row.prompt_end).max().unwrap_or(0)
}

/// The tokens of `rows` in these columns, counted in the longest row. `any` fills columns without a token.
fn columns(rows: &[Row], columns: Range<usize>, any: TokenId, device: &Device) -> Batch {
    let left_pad: Vec<usize> = rows.iter().map(|row| row.left_pad).collect();
    let longest = longest_prompt(rows);
    let skip: Vec<usize> = rows.iter().map(|row| longest - row.prompt_end).collect();
    let token = |row: usize, column: usize| {
        let token = column.checked_sub(skip[row] + left_pad[row]).and_then(|i| rows[row].ids.get(i));
        token.map_or(any as i32, |&id| id as i32)
    };
    let tokens: Vec<i32> = (0..rows.len())
        .flat_map(|row| columns.clone().map(move |column| (row, column)))
        .map(|(row, column)| token(row, column))
        .collect();
    let tokens = Tensor::from_data(TensorData::new(tokens, [rows.len(), columns.len()]), device);
    let skip = skip.iter().map(|skip| skip.saturating_sub(columns.start).min(columns.len())).collect();
    Batch { left_pad, skip, horizon: Vec::new(), ..Batch::new(tokens) }
}

/// The conditions that end a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stopping<'a> {
    pub(super) options: &'a Options,
    pub(super) out_of_time: bool,
}

impl Stopping<'_> {
    /// The reason for which a row ends with its latest token; `None`: it goes on.
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

/// Checks that the rows fit each other. `before`: number of slots of each row that the cache holds.
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
