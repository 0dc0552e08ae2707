//! Drafts of a smaller model.

use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use kiln_core::{
    Error, Result,
    batch::Batch,
    model::{CausalModel, Logits, TokenId},
    model_cache::ModelCache,
    read_back,
};

use super::{Asked, Proposal, constraint::Constraint, translation::Translation, verify::probabilities};
use crate::{
    Tokenizer,
    grammar::Mask,
    sampler::{Sampler, greedy, no_distribution},
    settings::Settings,
};

/// A smaller model that drafts tokens. (transformers' `assistant_model`)
#[derive(Debug)]
pub struct DraftModel {
    model: Arc<dyn CausalModel>,
    cache: ModelCache,
    device: Device,
    /// Number of prompt tokens of each row in a forward pass.
    chunk: usize,
    /// The tokens of each row that the cache holds.
    held: Vec<Vec<TokenId>>,
    /// `None`: the likeliest tokens are drafted.
    sampler: Option<Sampler>,
    /// `None`: the vocabulary is that of the model.
    translation: Option<Translation>,
}

impl DraftModel {
    /// Creates a draft model with an empty `cache` for it. A prompt is fed `chunk` tokens of each row at a
    /// time.
    pub fn new(model: Arc<dyn CausalModel>, cache: ModelCache, device: Device, chunk: usize) -> Self {
        Self { model, cache, device, chunk: chunk.max(1), held: Vec::new(), sampler: None, translation: None }
    }

    /// Sets the `tokenizer` of the draft model, if it differs from the tokenizer of the `model`. Drafts are
    /// then translated as text.
    pub fn translated(self, tokenizer: Arc<Tokenizer>, model: Arc<Tokenizer>) -> Self {
        Self { translation: Some(Translation::new(model, tokenizer)), ..self }
    }

    pub(super) fn is_translated(&self) -> bool {
        self.translation.is_some()
    }

    pub(super) fn vocab(&self) -> usize {
        self.model.vocab()
    }

    /// Samples drafts, from streams of their own.
    pub(super) fn draws(&mut self, seed: u64) {
        self.sampler = Some(Sampler::of_draft(seed));
    }

    /// Forgets everything: the cache cannot be trusted.
    pub(super) fn start_over(&mut self) {
        self.cache.reset();
        self.held.clear();
    }

    /// Drafts tokens for each row. Scores go through the same grammar and processors as those of the model.
    pub(super) async fn propose(
        &mut self,
        asked: &[Asked<'_>],
        settings: &Settings,
        constraint: &mut Constraint<'_>,
    ) -> Result<Vec<Proposal>> {
        if let Some(mut translation) = self.translation.take() {
            let proposals = self.propose_translated(&mut translation, asked, &settings.assisted).await;
            self.translation = Some(translation);
            return proposals;
        }
        let mut proposals: Vec<Proposal> = asked.iter().map(|_| Proposal::default()).collect();
        let mut open: Vec<bool> = asked.iter().map(|row| row.most > 0).collect();
        if !open.contains(&true) {
            return Ok(proposals);
        }
        let most = asked.iter().map(|row| row.most).max().unwrap_or(0);
        let wanted = asked.iter().map(|row| (row.most > 0).then_some(row.state.ids));
        let mut new = self.go_back(&wanted.collect::<Vec<_>>(), most)?;
        while open.contains(&true) {
            let logits = self.feed(&new).await?;
            constraint.wait()?;
            let mut proposed = vec![None; asked.len()];
            for (i, row) in asked.iter().enumerate() {
                if !open[i] {
                    continue;
                }
                let before = proposals[i].tokens.len();
                let scores = logits[i * self.vocab()..(i + 1) * self.vocab()].to_vec();
                let mask = constraint.mask(i, before);
                let likely = self.extend(i, row, scores, mask, &mut proposals[i], settings);
                proposed[i] = proposals[i].tokens.get(before).copied();
                open[i] = likely
                    && before + 1 < row.most
                    && !proposed[i].is_some_and(|token| settings.eos_token_id.contains(&token));
            }
            constraint.follow(&proposed)?;
            let next =
                |(token, open): (Option<TokenId>, &bool)| token.filter(|_| *open).into_iter().collect();
            new = proposed.into_iter().zip(&open).map(next).collect();
        }
        Ok(proposals)
    }

    /// Adds a token to the draft of row `i`. Returns whether there was one that is likely enough to go on.
    fn extend(
        &mut self,
        i: usize,
        row: &Asked<'_>,
        mut scores: Vec<f32>,
        mask: Option<&Mask>,
        proposal: &mut Proposal,
        settings: &Settings,
    ) -> bool {
        if let Some(mask) = mask {
            mask.apply(&mut scores);
        }
        let ids = [row.state.ids, &proposal.tokens].concat();
        let state = row.state.ahead(&ids, proposal.tokens.len());
        // If no token can follow, none is drafted: the model may go another way.
        let token = settings.processors.apply(&state, &mut scores).and_then(|()| match &mut self.sampler {
            Some(sampler) => sampler.sample(i, &scores),
            None => greedy(&scores).ok_or_else(no_distribution),
        });
        // A processor may force a token that the grammar does not allow.
        let token = token.ok().filter(|token| mask.is_none_or(|mask| mask.allows(*token)));
        let Some(token) = token else { return false };
        let probabilities = probabilities(&scores);
        let likely = probabilities.get(token as usize).copied().unwrap_or(0.0);
        proposal.tokens.push(token);
        if self.sampler.is_some() {
            proposal.drawn_from.push(probabilities);
        }
        likely >= f64::from(settings.assisted.confidence_threshold)
    }

    /// Forgets the tokens that are not the beginning of the `wanted` rows, and at least their last token.
    /// Returns the tokens of each row that are to be fed. `most`: the most tokens that may be drafted.
    pub(super) fn go_back(
        &mut self,
        wanted: &[Option<&[TokenId]>],
        most: usize,
    ) -> Result<Vec<Vec<TokenId>>> {
        self.held.resize(wanted.len(), Vec::new());
        let keep = |(row, held): (&Option<&[TokenId]>, &Vec<TokenId>)| match row {
            None => held.len(),
            Some(row) => {
                let same = held.iter().zip(*row).take_while(|(held, wanted)| held == wanted).count();
                same.min(row.len().saturating_sub(1))
            }
        };
        let keep: Vec<usize> = wanted.iter().zip(&self.held).map(keep).collect();
        let keep = self.cache.rewind_points(&keep);
        self.cache.truncate_rows(&keep)?;
        // All tokens that are drafted now may have to be forgotten next time.
        self.cache.keep_history(most + 1);
        for (held, keep) in self.held.iter_mut().zip(keep) {
            held.truncate(keep);
        }
        let rest = |(row, held): (&Option<&[TokenId]>, &Vec<TokenId>)| {
            row.map(|row| row[held.len()..].to_vec()).unwrap_or_default()
        };
        Ok(wanted.iter().zip(&self.held).map(rest).collect())
    }

    /// Feeds tokens to rows, none to some of them. Returns the logits `[rows, vocab]` after the last.
    pub(super) async fn feed(&mut self, new: &[Vec<TokenId>]) -> Result<Vec<f32>> {
        let held: Vec<usize> = self.held.iter().map(Vec::len).collect();
        let batch = uneven(new, &held, &vec![0; new.len()], &self.device);
        let (mut start, mut logits) = (0, None);
        while start < batch.len() {
            let at_once = self.cache.at_once().unwrap_or(self.chunk).min(self.chunk).max(1);
            let columns = start..batch.len().min(start + at_once);
            start = columns.end;
            logits = Some(self.model.forward(&batch.slice(columns), Logits::Last, &mut self.cache)?);
            read_back::yield_now().await;
        }
        let logits = logits.ok_or_else(|| Error::Execution("the draft model was fed no token".into()))?;
        let read = read_back::start(logits).finish().await;
        if read.is_err() {
            self.cache.poison();
        }
        for (held, new) in self.held.iter_mut().zip(new) {
            held.extend(new);
        }
        read?.try_into_vec().map_err(|e| Error::Execution(e.to_string()))
    }
}

/// A batch of new tokens, of which rows may have different numbers, also none. `before`: number of slots of
/// each row that were fed.
pub(super) fn uneven(new: &[Vec<TokenId>], before: &[usize], left_pad: &[usize], device: &Device) -> Batch {
    let len = new.iter().map(Vec::len).max().unwrap_or(0);
    let skip: Vec<usize> = new.iter().map(|row| len - row.len()).collect();
    let filled = new
        .iter()
        .zip(&skip)
        .flat_map(|(row, &skip)| std::iter::repeat_n(0, skip).chain(row.iter().map(|&id| id as i32)));
    let tokens = Tensor::from_data(TensorData::new(filled.collect::<Vec<i32>>(), [new.len(), len]), device);
    let horizon = before.iter().zip(new).map(|(before, new)| before + new.len()).collect();
    Batch { left_pad: left_pad.to_vec(), skip, horizon, ..Batch::new(tokens) }
}
