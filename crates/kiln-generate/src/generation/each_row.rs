//! The choice for each row alone: the likeliest token, or a sampled one. (transformers' `_sample`)

use kiln_core::{Result, model::TokenId};

use super::{
    Options,
    choice::Choice,
    rows::Rows,
    runner::{Reading, Runner},
    scores::Scored,
    step::{StepState, allowed},
};
use crate::{
    chooser::Chooser,
    device_sampler::DeviceSampler,
    grammar::Masks,
    sampler::{self, Sampler, greedy},
    settings::Settings,
};

/// Chooses the token of each row by the scores of the row.
#[derive(Debug, Default)]
pub(super) struct EachRow {
    /// `None`: the likeliest token is taken.
    pub(super) sampler: Option<Sampler>,
    /// The tokens that a grammar allows.
    pub(super) masks: Option<Masks>,
}

impl EachRow {
    /// See [`Search::chooser`](super::search::Search::chooser).
    pub(super) fn chooser(
        &self,
        runner: &Runner<'_>,
        rows: &Rows,
        options: &Options,
    ) -> Result<Option<Chooser>> {
        if options.keep_logits
            || options.keep_scores
            || options.settings.needs_host()
            || options.grammar.is_some()
        {
            return Ok(None);
        }
        let Settings { processors, do_sample, .. } = &options.settings;
        let Some(kernels) = options.kernels.as_ref().filter(|kernels| kernels.implementation().is_on_gpu())
        else {
            // If the host had to wait for the device, one pass over the scores on the host is faster than
            // several.
            let likeliest = processors.is_empty() && self.sampler.is_none() && options.lookahead;
            return Ok(likeliest.then(|| Chooser::Sampler(DeviceSampler::likeliest())));
        };
        let Ok(sampling) = processors.on_device(*do_sample) else { return Ok(None) };
        let mut sampler = match &self.sampler {
            Some(sampler) => Some(Sampler::new(Some(sampler.seed()))?),
            None => None,
        };
        // The words of the delivered tokens are used.
        for row in 0..rows.len() {
            (0..rows.delivered).for_each(|_| _ = sampler.as_mut().map(|sampler| sampler.word(row)));
        }
        let ids: Vec<&[TokenId]> = rows.list.iter().map(|row| &row.ids[..]).collect();
        let sampler = DeviceSampler::new(kernels, sampling, sampler, &ids, runner.vocab(), runner.device());
        Ok(Some(Chooser::Sampler(sampler)))
    }

    /// Makes a step.
    pub(super) async fn choose(&mut self, state: &mut StepState<'_, '_>) -> Result<Choice> {
        let reading = state.start().await?;
        self.choose_from(reading, state).await
    }

    /// Finishes a step.
    pub(super) async fn choose_from(
        &mut self,
        reading: Reading,
        state: &mut StepState<'_, '_>,
    ) -> Result<Choice> {
        match reading {
            Reading::Chosen(reading) => {
                let tokens: Vec<i64> = state.chosen(reading).await?.iter().collect();
                if tokens.iter().zip(&state.rows.list).any(|(id, row)| *id < 0 && !row.finished()) {
                    return Err(sampler::no_distribution());
                }
                let tokens = tokens.into_iter().map(|id| id as TokenId).collect();
                Ok(Choice { tokens, ..Choice::default() })
            }
            Reading::Scores(scores) => {
                let numbers = state.numbers(*scores).await?;
                let masks = allowed(&mut self.masks)?;
                let step = Scored::new(&numbers, &masks, state.rows, state.options);
                let choice = self.choose_scored(&step)?;
                if let Some(masks) = &mut self.masks {
                    masks.advance(step.accepted(&choice))?;
                }
                state.runner.feed_next(&choice.tokens, choice.parents.as_deref());
                Ok(choice)
            }
        }
    }

    fn choose_scored(&mut self, step: &Scored<'_>) -> Result<Choice> {
        let Options { settings, keep_logits, .. } = step.options;
        let mut choice = Choice::default();
        for (i, row) in step.rows.list.iter().enumerate().take(step.logits.len() / step.vocab) {
            if row.finished() {
                choice.tokens.push(settings.padding(step.vocab));
                choice.logits.push(Vec::new());
                choice.scores.push(Vec::new());
                continue;
            }
            let mut scores = step.begin_of(i).to_vec();
            step.process(i, &mut scores)?;
            let token = match &mut self.sampler {
                Some(sampler) => sampler.sample(i, &scores),
                None => greedy(&scores).ok_or_else(sampler::no_distribution),
            };
            choice.tokens.push(token?);
            if *keep_logits {
                choice.logits.push(step.logits_of(i).to_vec());
            }
            choice.scores.push(scores);
        }
        Ok(choice)
    }
}
