//! Beam search: several sequences of each prompt are followed at once, and the best are returned.
//!
//! Every step adds up log-probabilities: for each prompt, the candidates are the best continuations of all
//! its beams. There are twice as many as beams (more if several tokens end a text), so that enough of them go
//! on if others end.
//!
//! Beams follow `_beam_search` of transformers 5. Groups of beams and forced words follow `BeamSearchScorer`
//! and `ConstrainedBeamSearchScorer` of 4.47, the last version that has them. The two differ in when a search
//! ends.

mod candidates;
mod group;
mod log_probs;
mod settings;
mod words;

use kiln_core::{Result, layer::Reorders, model::TokenId};
use kiln_kernels::{BeamShape, MOST_BEAMS};

pub use self::settings::{BeamSettings, EarlyStopping, ForceWord};
use self::{
    candidates::{Candidate, Candidates},
    group::{At, Group},
    log_probs::LogProbs,
    words::Words,
};
use super::{
    Options,
    choice::Choice,
    rows::{Row, Rows, Stopping},
    runner::{Reading, Runner},
    scores::{Found, Scored},
    step::{StepState, allowed},
};
use crate::{
    chooser::Chooser,
    completion::Completion,
    device_beams::DeviceBeams,
    grammar::Masks,
    sampler::{Sampler, no_distribution},
    stopping::StopReason,
};

/// The beams of all prompts. The beams of a prompt are consecutive rows.
#[derive(Debug)]
pub(super) struct Beams {
    settings: BeamSettings,
    words: Option<Words>,
    /// The groups of each prompt.
    prompts: Vec<Vec<Group>>,
    /// The beam of each row.
    open: Vec<Open>,
    /// `None`: the best candidates are taken, not sampled.
    sampler: Option<Sampler>,
    /// The tokens that a grammar allows.
    masks: Option<Masks>,
}

/// A beam: a sequence that goes on.
#[derive(Clone, Debug, Default)]
struct Open {
    /// The sum of the log-probabilities, after processors.
    sum: f32,
    /// For each generated token, the row that it continued, and its log-probability.
    path: Vec<(usize, f32)>,
}

/// The sum of beams that cannot be chosen.
const NEVER: f32 = -1e9;

impl Beams {
    pub(super) fn new(
        settings: BeamSettings,
        prompts: usize,
        sampler: Option<Sampler>,
        masks: Option<Masks>,
    ) -> Self {
        let of_group = settings.num_beams / settings.num_beam_groups;
        // All beams of a prompt are the same at first, so that one of each group counts.
        let open = |row: usize| Open {
            sum: if row.is_multiple_of(of_group) { 0.0 } else { NEVER },
            path: Vec::new(),
        };
        Self {
            words: Words::new(settings.force_words.clone()),
            prompts: vec![vec![Group::default(); settings.num_beam_groups]; prompts],
            open: (0..prompts * settings.num_beams).map(open).collect(),
            settings,
            sampler,
            masks,
        }
    }

    /// The search on the device, after the steps that `rows` have taken; `None`: the host searches.
    pub(super) fn chooser(&self, runner: &Runner<'_>, rows: &Rows, options: &Options) -> Option<Chooser> {
        let (kernels, most) = options.likeliest_wanted()?;
        let Options { settings, stopping_criteria, .. } = options;
        let BeamSettings { num_beams, num_beam_groups, diversity_penalty, .. } = self.settings;
        let (cache, vocab) = (runner.cache(), runner.vocab());
        // The host has to see a text before it knows whether a criterion ends it. Tokens are read as float32.
        let on_host = !stopping_criteria.is_empty()
            || vocab > 1 << 24
            || num_beams > MOST_BEAMS
            || most > vocab
            || cache.is_offloaded()
            || cache.reorders() == Reorders::No;
        if on_host {
            return None;
        }
        let shape = BeamShape {
            beams: num_beams,
            groups: num_beam_groups,
            candidates: self.settings.candidates(settings.eos_token_id.len()),
            diversity_penalty,
            padding: settings.padding(vocab),
        };
        let ends = settings.eos_token_id.iter().map(|&id| i32::try_from(id).unwrap_or(-1));
        let fed = rows.delivered.saturating_sub(1);
        let mut on_device = DeviceBeams::new(&kernels, shape, most, self.sums(), ends, fed);
        on_device.set_done(self.done());
        Some(Chooser::Beams(Box::new(on_device)))
    }

    /// Makes a step. If the device chose the beams, the host repeats the choice, and sees which have ended.
    pub(super) async fn choose(&mut self, state: &mut StepState<'_, '_>) -> Result<Choice> {
        match state.start().await? {
            Reading::Chosen(reading) => {
                let found = Found { numbers: state.chosen(reading).await?.iter().collect() };
                let vocab = state.runner.vocab();
                let step = Scored {
                    found: Some(&found),
                    ..Scored::from_logits(&[], vocab, &[], state.rows, state.options)
                };
                let choice = self.choose_scored(&step, state.stopping())?;
                if let Some(Chooser::Beams(on_device)) = &mut state.runner.feeder.chooser {
                    on_device.set_done(self.done());
                }
                Ok(choice)
            }
            Reading::Scores(scores) => {
                let numbers = state.numbers(*scores).await?;
                let masks = allowed(&mut self.masks)?;
                let step = Scored::new(&numbers, &masks, state.rows, state.options);
                let choice = self.choose_scored(&step, state.stopping())?;
                if let Some(masks) = &mut self.masks {
                    masks.advance(step.accepted(&choice))?;
                }
                state.runner.feed_next(&choice.tokens, choice.parents.as_deref());
                Ok(choice)
            }
        }
    }

    /// Chooses the next token of each beam, and which beam it continues.
    fn choose_scored(&mut self, step: &Scored<'_>, stopping: Stopping<'_>) -> Result<Choice> {
        let beams = self.settings.num_beams;
        let any = step.options.settings.padding(step.vocab);
        let mut choice = Choice::default();
        let mut open = Vec::with_capacity(self.open.len());
        let mut parents = Vec::with_capacity(self.open.len());
        for prompt in 0..self.prompts.len() {
            let first = prompt * beams;
            let next = match self.is_done(prompt) {
                true => vec![None; beams],
                false => self.advance(prompt, step, stopping, &mut choice)?,
            };
            for (row, next) in (first..first + beams).zip(next) {
                let Some(Candidate { row: parent, token, sum, score, .. }) = next else {
                    choice.tokens.push(any);
                    parents.push(row);
                    open.push(self.open[row].clone());
                    continue;
                };
                let mut path = self.open[parent].path.clone();
                path.push((parent, score));
                choice.tokens.push(token);
                parents.push(parent);
                open.push(Open { sum, path });
            }
            choice.logits.resize(first + beams, Vec::new());
            choice.scores.resize(first + beams, Vec::new());
        }
        self.open = open;
        choice.parents = Some(parents);
        Ok(choice)
    }

    /// The next beams of a prompt; `None` for beams of a group that is done.
    fn advance(
        &mut self,
        prompt: usize,
        step: &Scored<'_>,
        stopping: Stopping<'_>,
        choice: &mut Choice,
    ) -> Result<Vec<Option<Candidate>>> {
        let Self { settings, words, prompts, open, sampler, .. } = self;
        let of_group = settings.num_beams / settings.num_beam_groups;
        let any = step.options.settings.padding(step.vocab);
        let at = At { settings, of_group, step, words: words.as_ref(), stopping };
        let mut next = Vec::with_capacity(settings.num_beams);
        for (i, group) in prompts[prompt].iter_mut().enumerate() {
            let first = prompt * settings.num_beams + i * of_group;
            let rows = first..first + of_group;
            if group.done {
                next.resize(next.len() + of_group, None);
                choice.logits.resize(rows.end, Vec::new());
                choice.scores.resize(rows.end, Vec::new());
                continue;
            }
            // The choice of the groups before, in this step.
            let chosen: Vec<TokenId> = next
                .iter()
                .map(|next: &Option<Candidate>| next.as_ref().map_or(any, |next| next.token))
                .collect();
            let most = settings.candidates(step.options.settings.eos_token_id.len());
            let mut scores = Vec::new();
            let mut candidates = if let Some(found) = step.found {
                let group = prompt * settings.num_beam_groups + i;
                let found = found.of(group, most).ok_or_else(no_distribution)?;
                found.into_iter().map(|found| Candidate::of(found, prompt * settings.num_beams)).collect()
            } else {
                for row in rows.clone() {
                    scores.push(LogProbs::of(step, row, settings.diversity_penalty, &chosen)?);
                }
                let candidates = Candidates { first, scores: &scores, open: &open[rows.clone()] };
                match sampler {
                    Some(sampler) => candidates.drawn(most, prompt, sampler)?,
                    None => candidates.best(most),
                }
            };
            for candidate in &mut candidates {
                candidate.stops = candidate.reason(step, stopping);
            }
            next.extend(group.advance(candidates, &scores, open, &at).into_iter().map(Some));
            for (row, scores) in rows.zip(scores) {
                choice.logits.push(match step.options.keep_logits {
                    true => step.logits_of(row).to_vec(),
                    false => Vec::new(),
                });
                let sum = if words.is_some() { open[row].sum } else { 0.0 };
                choice.scores.push(if step.options.keep_scores { scores.plus(sum) } else { Vec::new() });
            }
        }
        Ok(next)
    }

    /// Whether each group of all prompts is done.
    fn done(&self) -> impl Iterator<Item = bool> {
        self.prompts.iter().flatten().map(|group| group.done)
    }

    /// The sum of each row.
    fn sums(&self) -> Vec<f32> {
        self.open.iter().map(|open| open.sum).collect()
    }

    fn is_done(&self, prompt: usize) -> bool {
        self.prompts[prompt].iter().all(|group| group.done)
    }

    /// The reason for which the search of the group of `row` ended, for its best sequence; `None` while it
    /// goes on.
    pub(super) fn stopped(&self, row: usize) -> Option<StopReason> {
        let BeamSettings { num_beams, num_beam_groups, .. } = self.settings;
        let group = self.prompts.get(row / num_beams)?.get(row % num_beams * num_beam_groups / num_beams)?;
        let best = || group.best().and_then(|best| best.stop_reason).unwrap_or(StopReason::Length);
        group.done.then(best)
    }

    /// The ended sequences of a prompt, the best first.
    fn ended(&self, prompt: usize) -> Vec<&Completion> {
        let mut ended: Vec<&Completion> =
            self.prompts[prompt].iter().flat_map(|group| &group.finished).collect();
        let score = |completion: &Completion| completion.score.unwrap_or(f32::NEG_INFINITY);
        match self.settings.is_vectorised() {
            true => ended.sort_by(|a, b| score(b).total_cmp(&score(a))),
            // Of equals, the last that was found comes first.
            false => {
                ended.sort_by(|a, b| score(a).total_cmp(&score(b)));
                ended.reverse();
            }
        }
        ended
    }

    /// The sequences of each prompt, the best first: those that have ended, then those that go on.
    pub(super) fn completions(&self, rows: &Rows) -> Vec<Vec<Completion>> {
        let of_prompt = |prompt: usize| {
            let mut all: Vec<Completion> = self.ended(prompt).into_iter().cloned().collect();
            if !self.is_done(prompt) {
                let beams = prompt * self.settings.num_beams..(prompt + 1) * self.settings.num_beams;
                let mut open: Vec<Completion> = beams
                    .filter(|&row| self.open[row].sum > NEVER / 2.0)
                    .map(|row| self.open[row].completion(&rows.list[row], rows.delivered, &self.settings))
                    .collect();
                open.sort_by(|a, b| b.score.unwrap_or_default().total_cmp(&a.score.unwrap_or_default()));
                all.extend(open);
            }
            all
        };
        (0..self.prompts.len()).map(of_prompt).collect()
    }
}

impl Open {
    fn completion(&self, row: &Row, generated: usize, settings: &BeamSettings) -> Completion {
        Completion {
            tokens: row.ids[row.ids.len().saturating_sub(generated)..].to_vec(),
            text: None,
            stop_reason: None,
            score: Some(settings.normalized(self.sum, generated.max(1))),
            token_scores: self.path.iter().map(|(_, score)| *score).collect(),
            beam_indices: self.path.iter().map(|(row, _)| *row).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
