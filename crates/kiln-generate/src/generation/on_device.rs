//! Steps whose tokens the device chooses. It feeds them on by itself, and the host reads along.

use burn::tensor::{Device, TensorData};
use kiln_core::{
    Error, Result, layer::Reorders, model::TokenId, model_cache::ModelCache, read_back::ReadBack,
};
use kiln_kernels::{BeamShape, MOST_BEAMS};

use super::{
    BeamSettings, Generation, Next, Options,
    beams::Beams,
    rows::{Row, Stopping},
    search::{Choice, Found, Scored, Search},
};
use crate::{
    chooser::Chooser,
    decode::Output,
    device_beams::DeviceBeams,
    device_sampler::DeviceSampler,
    sampler::{self, Sampler},
    settings::Settings,
};

impl Generation<'_> {
    /// Whether the scores never leave the device.
    pub(super) fn on_device(&self) -> bool {
        self.feeder.chooser.is_some()
    }

    /// Groups of beams wait for the host: it says which are done, and their tokens keep others from the same.
    pub(super) fn looks_ahead(&self) -> bool {
        let groups = self.options.settings.beams.as_ref().map_or(1, |beams| beams.num_beam_groups);
        self.options.lookahead && self.on_device() && groups == 1
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
        self.choose_launched(reading).await
    }

    /// Reads what the device chose.
    pub(super) async fn choose_launched(&mut self, reading: ReadBack) -> Result<Choice> {
        let read = reading.finish().await;
        let read = self.trusted(read)?;
        self.feeder.refusals.none_since()?;
        self.clock.scored(&mut self.stats);
        if matches!(self.search, Search::Beams(_)) {
            return self.choose_beams(&read);
        }
        let tokens: Vec<i64> = read.iter().collect();
        if tokens.iter().zip(&self.rows).any(|(id, row)| *id < 0 && !row.finished()) {
            return Err(sampler::no_distribution());
        }
        Ok(Choice { tokens: tokens.into_iter().map(|id| id as TokenId).collect(), ..Choice::default() })
    }

    /// Does on the host what the device did with the beams, and sees which have ended.
    fn choose_beams(&mut self, read: &TensorData) -> Result<Choice> {
        let step = Scored {
            masks: &[],
            options: &self.options,
            rows: &self.rows,
            generated: self.delivered,
            limit: self.limit,
            logits: &[],
            begin: None,
            top: None,
            found: Some(&Found { numbers: read.iter().collect() }),
            vocab: self.feeder.running.model.vocab(),
        };
        let stopping = Stopping {
            options: &self.options,
            out_of_time: self.clock.is_past(self.options.settings.max_time),
        };
        let choice = self.search.choose(&step, stopping)?;
        if let (Search::Beams(beams), Some(Chooser::Beams(on_device))) =
            (&self.search, &mut self.feeder.chooser)
        {
            on_device.set_done(beams.done());
        }
        Ok(choice)
    }

    /// Starts a step on the device, and the reading of what it chose.
    async fn launch(&mut self) -> Result<ReadBack> {
        let to_read = match (self.feed().await?, &mut self.feeder.chooser) {
            (Output::Chosen(chosen), _) => {
                self.next = Next::OnDevice;
                chosen.to_read
            }
            (Output::Logits(logits), Some(chooser)) => {
                let chosen = chooser.choose(logits)?;
                self.next = Next::Tokens(chosen.next, None);
                chosen.to_read
            }
            (Output::Logits(_), None) => {
                return Err(Error::Execution("nothing chooses tokens on the device".into()));
            }
        };
        self.launched += 1;
        Ok(to_read.start_reading())
    }
}

/// What searches for beams on the device, behind which `cache` holds `behind` tokens; `None`: the host does.
pub(super) fn device_beams(
    options: &Options,
    beams: &Beams,
    cache: &ModelCache,
    vocab: usize,
    behind: usize,
) -> Option<Box<DeviceBeams>> {
    let (kernels, most) = options.likeliest_wanted()?;
    let Options { settings, stopping_criteria, .. } = options;
    let BeamSettings { num_beams, num_beam_groups, diversity_penalty, .. } = *settings.beams.as_ref()?;
    // The host has to see a text before it knows whether a criterion ends it. Tokens are read as float32.
    let on_host = !stopping_criteria.is_empty()
        || vocab > 1 << 24
        || num_beams > MOST_BEAMS
        || most > vocab
        || cache.is_offloaded()
        || cache.reorders() == Reorders::No;
    let shape = BeamShape {
        beams: num_beams,
        groups: num_beam_groups,
        candidates: settings.beams.as_ref()?.candidates(settings.eos_token_id.len()),
        diversity_penalty,
        padding: settings.padding(vocab),
    };
    let ends = settings.eos_token_id.iter().map(|&id| i32::try_from(id).unwrap_or(-1));
    if on_host {
        return None;
    }
    let mut on_device = DeviceBeams::new(&kernels, shape, most, beams.sums(), ends, behind);
    on_device.set_done(beams.done());
    Some(Box::new(on_device))
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
