//! Going on after a device refused an allocation that had been claimed, or gave up the recording of a step.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_core::{Error, Result, batch::Batch, device_state::DeviceState, model::TokenId, read_back};

use super::{
    Generation, Next,
    assisted::Assisted,
    contrastive::Contrastive,
    guidance::Guidance,
    on_device::{device_beams, device_sampler},
    rows::{Row, longest_prompt},
    search::Search,
};
use crate::{chooser::Chooser, decode::Running, prefill::Feeder, sampler::Sampler};

impl Generation<'_> {
    /// After an error that leaves nothing to trust in the cache: all that it held is fed once more. `for_memory`: the device
    /// refused an allocation, so it is fed in smaller pieces or to a cache that takes less; else a recording was given up, and
    /// steps are launched from then on.
    ///
    /// # Errors
    /// `error`, where that cannot be. The cache is empty then, and can be used.
    pub(super) async fn begin_again(&mut self, error: Error, for_memory: bool) -> Result<()> {
        /// Prompt tokens of a row in one piece, from the second attempt on.
        const PIECE: usize = 128;

        self.ahead = None;
        self.next = Next::Nothing;
        // What is still under way has to do with what is given up, and so have its errors.
        _ = DeviceState::of(&self.device).sync();
        self.feeder.start_over();
        self.guidance.iter_mut().for_each(Guidance::start_over);
        self.assisted.iter_mut().for_each(Assisted::start_over);
        self.contrastive.iter_mut().for_each(Contrastive::start_over);
        DeviceState::of(&self.device).give_back();
        if !self.whole {
            return Err(error);
        }
        let prompt = longest_prompt(&self.rows);
        if for_memory {
            let held = prompt + self.delivered;
            let chunk = self.options.prefill_chunk.unwrap_or(held);
            self.options.prefill_chunk = Some(chunk.min(PIECE));
            if chunk.min(prompt) <= PIECE || self.feeder.oom_policy.is_none() {
                // For as many rows as the cache had.
                self.feeder.free_memory(error, held, chunk.min(PIECE))?;
            }
        }
        self.feeder.running.left_pad = self.rows.iter().step_by(self.width).map(|row| row.left_pad).collect();
        self.launched = self.delivered;
        if let Search::Beams(beams) = &self.search {
            let behind = self.delivered.saturating_sub(1);
            let Running { model, cache, .. } = &self.feeder.running;
            let beams = device_beams(&self.options, beams, cache, model.vocab(), behind);
            self.feeder.chooser = beams.map(Chooser::Beams);
        } else if self.on_device() {
            // Words that were drawn for what was not delivered are drawn once more.
            let mut sampler = self.stats.seed.map(|seed| Sampler::new(Some(seed))).transpose()?;
            for row in 0..self.rows.len() {
                (0..self.delivered).for_each(|_| _ = sampler.as_mut().map(|sampler| sampler.word(row)));
            }
            let vocab = self.feeder.running.model.vocab();
            let sampler = device_sampler(&self.options, &mut sampler, &self.rows, vocab, &self.device);
            self.feeder.chooser = sampler.map(Chooser::Sampler);
        }
        let chunk = self.options.prefill_chunk;
        let any = self.options.settings.padding(self.feeder.running.model.vocab());
        if self.delivered == 0 {
            let prompts: Vec<Row> = self.rows.iter().step_by(self.width).cloned().collect();
            self.next = Next::Prompt(fed(&prompts, 0..prompt, any, &self.device));
            return Ok(());
        }
        let (rows, width, generated) = (&self.rows, self.width, self.delivered);
        if let Some(guidance) = &mut self.guidance {
            guidance.feed_again(rows, width, generated, chunk).await?;
        }
        let last = feed_again(&mut self.feeder, rows, width, generated, chunk, any, &self.device).await?;
        self.next = Next::Tokens(last, None);
        self.catch_up()
    }

    /// Empties the cache where a device refused a part of what it should hold, or gave it up; whether that was so.
    pub(super) fn forget_what_was_refused(&mut self) -> bool {
        let refused = self.feeder.refusals.none_since().is_err() || self.feeder.lost;
        if refused {
            self.feeder.start_over();
        }
        refused
    }
}

/// Feeds what `rows` hold, `width` rows of each prompt, but the last of `generated` tokens, which is returned, `[rows, 1]`. The
/// cache is empty before.
pub(super) async fn feed_again(
    feeder: &mut Feeder<'_>,
    rows: &[Row],
    width: usize,
    generated: usize,
    chunk: Option<usize>,
    any: TokenId,
    device: &Device,
) -> Result<Tensor<2, Int>> {
    let prompts: Vec<Row> = rows.iter().step_by(width).cloned().collect();
    let prompt = longest_prompt(rows);
    let held = prompt + generated;
    feeder.prefill(&fed(&prompts, 0..prompt, any, device), chunk).await?;
    feeder.widen(width)?;
    // One by one, as they came: what a sink cache keeps depends on it.
    for column in prompt..held - 1 {
        read_back::yield_now().await;
        feeder.prefill(&fed(rows, column..column + 1, any, device), None).await?;
    }
    Ok(fed(rows, held - 1..held, any, device).tokens)
}

/// What was fed to `rows` in these columns, of which the longest row has tokens in all. `any` stands where there is no token.
pub(super) fn fed(rows: &[Row], columns: Range<usize>, any: TokenId, device: &Device) -> Batch {
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
