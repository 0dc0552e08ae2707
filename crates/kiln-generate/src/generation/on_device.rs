//! Steps whose tokens the device chooses. It feeds them on by itself, and the host reads along.

use burn::tensor::Device;
use kiln_core::{
    Error, Result,
    model::TokenId,
    read_back::{self, ReadBack},
};

use super::{Generation, Next, Options, rows::Row, search::Choice};
use crate::{
    decode::Output,
    device_sampler::DeviceSampler,
    sampler::{self, Sampler},
    settings::Settings,
};

impl Generation<'_> {
    /// Whether the scores never leave the device.
    pub(super) fn on_device(&self) -> bool {
        self.feeder.device_sampler.is_some()
    }

    pub(super) fn looks_ahead(&self) -> bool {
        self.options.lookahead && self.on_device()
    }

    pub(super) async fn choose_on_device(&mut self) -> Result<Choice> {
        let reading = match self.ahead.take() {
            Some(started) => started?,
            None => self.launch().await?,
        };
        // A step that fails ahead of time is reported in its own turn.
        if self.looks_ahead() && self.limit.is_none_or(|limit| self.launched < limit) {
            self.ahead = Some(self.launch().await);
        }
        let read = reading.finish().await;
        let tokens: Vec<i64> = self.trusted(read)?.iter().collect();
        self.feeder.refusals.none_since()?;
        self.clock.scored(&mut self.stats);
        if tokens.iter().zip(&self.rows).any(|(id, row)| *id < 0 && !row.finished()) {
            return Err(sampler::no_distribution());
        }
        Ok(Choice { tokens: tokens.into_iter().map(|id| id as TokenId).collect(), ..Choice::default() })
    }

    /// Starts a step on the device, and the reading of its tokens.
    async fn launch(&mut self) -> Result<ReadBack> {
        let tokens = match (self.feed().await?, &mut self.feeder.device_sampler) {
            (Output::Chosen(tokens), _) => {
                self.next = Next::OnDevice;
                tokens
            }
            (Output::Logits(logits), Some(device_sampler)) => {
                let tokens = device_sampler.choose(logits)?;
                self.next = Next::Tokens(DeviceSampler::to_feed(tokens.clone()), None);
                tokens
            }
            (Output::Logits(_), None) => {
                return Err(Error::Execution("nothing chooses tokens on the device".into()));
            }
        };
        self.launched += 1;
        Ok(read_back::start(tokens))
    }
}

/// What chooses tokens on the device; `None`: the host does, with `sampler`.
pub(super) fn device_sampler(
    options: &Options,
    sampler: &mut Option<Sampler>,
    rows: &[Row],
    vocab: usize,
    device: &Device,
) -> Option<DeviceSampler> {
    if options.keep_logits || options.keep_scores || options.settings.needs_host() {
        return None;
    }
    if options.grammar.is_some() {
        return None;
    }
    let Settings { processors, do_sample, .. } = &options.settings;
    match options.kernels.as_ref().filter(|kernels| kernels.path().is_on_gpu()) {
        Some(kernels) => {
            let sampling = processors.on_device(*do_sample).ok()?;
            let ids: Vec<&[TokenId]> = rows.iter().map(|row| &row.ids[..]).collect();
            Some(DeviceSampler::new(kernels, sampling, sampler.take(), &ids, vocab, device))
        }
        // Where the host would wait for the device, it looks at the scores itself: one pass over them, instead of several.
        None => {
            (processors.is_empty() && sampler.is_none() && options.lookahead).then(DeviceSampler::likeliest)
        }
    }
}
