//! Going on after a device refused an allocation that had been claimed.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use kiln_core::{Error, Result, batch::Batch, device_error, read_back};

use super::{Generation, Next, assisted::Assisted, device_sampler, rows::Row};
use crate::sampler::Sampler;

impl Generation<'_> {
    /// After a device refused an allocation: what the cache holds cannot be trusted, so all of it is fed once more, in
    /// smaller pieces or to a cache that takes less.
    ///
    /// # Errors
    /// `refused`, where that cannot be. The cache is empty then, and can be used.
    pub(super) async fn begin_again(&mut self, refused: Error) -> Result<()> {
        /// Prompt tokens of a row in one piece, from the second attempt on.
        const PIECE: usize = 128;

        self.ahead = None;
        self.next = Next::Nothing;
        // What is still under way has to do with what is given up, and so have its errors.
        _ = device_error::sync(&self.device);
        self.feeder.running.left_pad = self.rows.iter().step_by(self.width).map(|row| row.left_pad).collect();
        self.feeder.start_over();
        self.assisted.iter_mut().for_each(Assisted::start_over);
        device_error::give_back(&self.device);
        if !self.whole {
            return Err(refused);
        }
        let prompt = self.longest_prompt();
        let held = prompt + self.delivered;
        let chunk = self.options.prefill_chunk.unwrap_or(held);
        self.options.prefill_chunk = Some(chunk.min(PIECE));
        if chunk.min(prompt) <= PIECE || self.feeder.oom_policy.is_none() {
            self.feeder.free_memory(refused, held, chunk.min(PIECE))?;
        }
        self.launched = self.delivered;
        if self.on_device() {
            // Words that were drawn for what was not delivered are drawn once more.
            let mut sampler = self.stats.seed.map(|seed| Sampler::new(Some(seed))).transpose()?;
            for row in 0..self.rows.len() {
                (0..self.delivered).for_each(|_| _ = sampler.as_mut().map(|sampler| sampler.word(row)));
            }
            let vocab = self.feeder.running.model.vocab();
            self.feeder.device_sampler =
                device_sampler(&self.options, &mut sampler, &self.rows, vocab, &self.device);
        }
        if self.delivered == 0 {
            self.next = Next::Prompt(self.fed(0..prompt, self.width));
            return Ok(());
        }
        self.feeder.prefill(&self.fed(0..prompt, self.width), self.options.prefill_chunk).await?;
        self.feeder.widen(self.width)?;
        // One by one, as they came: what a sink cache keeps depends on it.
        for column in prompt..held - 1 {
            read_back::yield_now().await;
            self.feeder.prefill(&self.fed(column..column + 1, 1), None).await?;
        }
        self.next = Next::Tokens(self.fed(held - 1..held, 1).tokens, None);
        self.catch_up()
    }

    /// Empties the cache where a device refused a part of what it should hold; whether that was so.
    pub(super) fn forget_what_was_refused(&mut self) -> bool {
        let refused = self.feeder.refusals.none_since().is_err();
        if refused {
            self.feeder.start_over();
        }
        refused
    }

    /// What was fed to every `nth` row in these columns, of which the longest row has tokens in all.
    fn fed(&self, columns: Range<usize>, nth: usize) -> Batch {
        let fed: Vec<&Row> = self.rows.iter().step_by(nth).collect();
        let left_pad: Vec<usize> = fed.iter().map(|row| row.left_pad).collect();
        let any = self.options.settings.padding(self.feeder.running.model.vocab());
        let longest = self.longest_prompt();
        let skip: Vec<usize> = fed.iter().map(|row| longest - row.prompt_end).collect();
        let token = |row: usize, column: usize| {
            let token = column.checked_sub(skip[row] + left_pad[row]).and_then(|i| fed[row].ids.get(i));
            token.map_or(any as i32, |&id| id as i32)
        };
        let rows = 0..fed.len();
        let tokens: Vec<i32> = rows
            .flat_map(|row| columns.clone().map(move |column| (row, column)))
            .map(|(row, column)| token(row, column))
            .collect();
        let shape = [fed.len(), columns.len()];
        let tokens = Tensor::from_data(TensorData::new(tokens, shape), &self.device);
        let skip = skip.iter().map(|skip| skip.saturating_sub(columns.start).min(columns.len())).collect();
        Batch { left_pad, skip, horizon: Vec::new(), ..Batch::new(tokens) }
    }
}
