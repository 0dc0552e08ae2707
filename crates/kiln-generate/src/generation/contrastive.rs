//! Contrastive search: of the likeliest tokens, one that is unlike the text before it.
//!
//! Each of the `top_k` likeliest tokens is fed. Its probability counts for it, and the largest cosine similarity of its hidden state to those
//! of the tokens before it counts against it. ("A Contrastive Framework for Neural Text Generation",
//! <https://arxiv.org/abs/2202.06417>; transformers 4.47's `_contrastive_search`)

mod context;
mod settings;

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_core::{Error, Result, model::TokenId, read_back};

use self::context::Context;
pub use self::settings::ContrastiveSettings;
use super::{
    Generation, Next, Options,
    rows::Row,
    search::{Choice, Scored},
};
use crate::{
    decode::Output,
    grammar::{Mask, Masks},
    processors::softmax,
    sampler::{greedy, no_distribution},
};

#[derive(Debug)]
pub(super) struct Contrastive {
    settings: ContrastiveSettings,
    /// The text of each row so far.
    contexts: Vec<Context>,
    /// What was fed last; `None`: that is still to be fed.
    fed: Option<Fed>,
    /// What a grammar allows in each row, for the step under way; empty where there is none.
    masks: Vec<Mask>,
}

/// The last token of each row, once it was fed.
#[derive(Debug)]
struct Fed {
    /// `[rows, 1, hidden]`
    hidden: Tensor<3>,
    /// The row of the cache that each row is in.
    rows: Vec<usize>,
}

/// A token that may be next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: TokenId,
    probability: f32,
}

impl Contrastive {
    pub(super) fn new(settings: ContrastiveSettings) -> Self {
        Self { settings, contexts: Vec::new(), fed: None, masks: Vec::new() }
    }

    /// Forgets what was fed: the cache is empty.
    pub(super) fn start_over(&mut self) {
        self.fed = None;
    }

    /// The rows of the cache that hold the rows of the batch with their last token; `None` where they may be any of the candidates.
    pub(super) fn chosen(&mut self) -> Option<Vec<usize>> {
        self.fed.take().map(|fed| fed.rows)
    }

    /// The number of the best candidate of a row, of equals the first. `states` are their hidden states.
    fn best(&self, row: usize, candidates: &[Candidate], states: &[Vec<f32>]) -> usize {
        let Some(context) = self.contexts.get(row) else { return 0 };
        let score = |(candidate, state): (&Candidate, &Vec<f32>)| {
            self.settings.score(candidate.probability, context.similarity(state))
        };
        let scores = candidates.iter().zip(states).map(score).enumerate();
        let best = scores.reduce(|best, other| if other.1 > best.1 { other } else { best });
        best.map_or(0, |(number, _)| number)
    }
}

impl Generation<'_> {
    pub(super) async fn choose_contrastive(&mut self) -> Result<Choice> {
        let Some(mut search) = self.contrastive.take() else {
            return Err(Error::Execution("there is no contrastive search".into()));
        };
        let choice = self.contrast(&mut search).await;
        self.contrastive = Some(search);
        choice
    }

    async fn contrast(&mut self, search: &mut Contrastive) -> Result<Choice> {
        let fed = match search.fed.take() {
            Some(fed) => fed,
            None => self.feed_last(search).await?,
        };
        let logits = self.feeder.running.model.head(fed.hidden);
        let vocab = logits.dims()[2];
        let logits = self.read(read_back::start(logits)).await?;
        self.feeder.refusals.none_since()?;
        self.clock.scored(&mut self.stats);
        // A step that is made again has them already.
        if search.masks.is_empty() {
            let masks = self.masks.as_mut().map_or(Ok(Vec::new()), Masks::wait)?;
            search.masks = masks.into_iter().flatten().map(|next| next.mask).collect();
        }
        let width = search.settings.top_k.min(vocab);
        let step = self.scored(&logits, &search.masks, vocab);
        let (mut choice, candidates) = proposed(&step, width)?;
        let hidden = self.feed_candidates(&candidates, &fed.rows, width)?;
        let states = self.read(read_back::start(hidden.clone().cast(DType::F32))).await?;
        self.feeder.refusals.none_since()?;
        let mut states = context::normalized(&states, hidden.dims()[2]);
        let best: Vec<usize> = (candidates.iter().zip(states.chunks(width)).enumerate())
            .map(|(row, (candidates, states))| search.best(row, candidates, states))
            .collect();
        choice.tokens = candidates.iter().zip(&best).map(|(of_row, &best)| of_row[best].token).collect();
        let accepted =
            (!search.masks.is_empty()).then(|| self.scored(&logits, &search.masks, vocab).accepted(&choice));
        search.masks.clear();
        if let Some((masks, accepted)) = self.masks.as_mut().zip(accepted) {
            masks.advance(accepted)?;
        }
        let rows: Vec<usize> = best.iter().enumerate().map(|(row, best)| row * width + best).collect();
        for (context, &row) in search.contexts.iter_mut().zip(&rows) {
            context.push(std::mem::take(&mut states[row]));
        }
        search.fed = Some(Fed { hidden: selected(hidden, &rows), rows });
        Ok(choice)
    }

    /// Feeds the prompt, or the last tokens again.
    async fn feed_last(&mut self, search: &mut Contrastive) -> Result<Fed> {
        let is_prompt = matches!(self.next, Next::Prompt(_));
        let Output::Logits(hidden) = self.feed().await? else { return Err(on_device()) };
        if is_prompt {
            let states = self.read(read_back::start(hidden.clone().cast(DType::F32))).await?;
            let [_, tokens, width] = hidden.dims();
            let of_row = |(row, states): (&Row, &[f32])| {
                let own = (row.prompt_end - row.left_pad).min(tokens);
                Context::new(&states[(tokens - own) * width..], width)
            };
            search.contexts = self.rows.iter().zip(states.chunks(tokens * width)).map(of_row).collect();
        }
        Ok(Fed { hidden: last(hidden), rows: (0..self.rows.len()).collect() })
    }

    /// Feeds the candidates of each row, `width` of each, behind the rows of the cache that hold the rows: their hidden states `[rows · width, 1,
    /// hidden]`.
    fn feed_candidates(
        &mut self,
        candidates: &[Vec<Candidate>],
        rows: &[usize],
        width: usize,
    ) -> Result<Tensor<3>> {
        let parents: Vec<usize> = rows.iter().flat_map(|&row| std::iter::repeat_n(row, width)).collect();
        self.feeder.reorder(&parents)?;
        // A row that has fewer is filled up with its first, which no other equals.
        let of_row = |of_row: &Vec<Candidate>| {
            let token = |i: usize| of_row.get(i).or(of_row.first()).map_or(0, |candidate| candidate.token);
            (0..width).map(token).collect::<Vec<_>>()
        };
        let tokens: Vec<i32> = candidates.iter().flat_map(of_row).map(|id| id as i32).collect();
        let tokens = Tensor::from_data(TensorData::new(tokens, [parents.len(), 1]), &self.device);
        match self.feeder.step(Some(tokens))? {
            Output::Logits(hidden) => Ok(last(hidden)),
            Output::Chosen(_) => Err(on_device()),
        }
    }

    fn scored<'b>(&'b self, logits: &'b [f32], masks: &'b [Mask], vocab: usize) -> Scored<'b> {
        Scored {
            masks,
            options: &self.options,
            rows: &self.rows,
            generated: self.delivered,
            limit: self.limit,
            logits,
            begin: None,
            top: None,
            found: None,
            vocab,
        }
    }

    /// Has the cache hold each row once, without its last token. Where that cannot be, it holds that token, or nothing.
    pub(super) fn keep_chosen(&mut self) {
        let chosen = self.contrastive.as_mut().and_then(Contrastive::chosen);
        let is_known = chosen.is_some() || self.feeder.running.left_pad.len() == self.rows.len();
        let kept = match chosen {
            Some(rows) => self.feeder.reorder(&rows),
            None => self.feeder.narrow(self.rows.len()),
        };
        let kept = kept.is_ok() && (self.forget_ahead().is_ok() || is_known);
        if !kept {
            self.feeder.running.cache.reset();
        }
    }
}

/// The candidates of each row, and what is to be kept of the numbers that they were chosen by. Rows that have ended have any token.
fn proposed(step: &Scored<'_>, width: usize) -> Result<(Choice, Vec<Vec<Candidate>>)> {
    let Options { settings, keep_logits, .. } = step.options;
    let mut choice = Choice::default();
    let mut candidates = Vec::with_capacity(step.rows.len());
    for (i, row) in step.rows.iter().enumerate().take(step.logits.len() / step.vocab) {
        if row.finished() {
            candidates.push(vec![Candidate { token: settings.padding(step.vocab), probability: 0.0 }]);
            choice.logits.push(Vec::new());
            choice.scores.push(Vec::new());
            continue;
        }
        let mut scores = step.begin_of(i).to_vec();
        step.process(i, &mut scores)?;
        candidates.push(likeliest(&scores, width)?);
        choice.logits.push(if *keep_logits { step.logits_of(i).to_vec() } else { Vec::new() });
        choice.scores.push(scores);
    }
    Ok((choice, candidates))
}

/// The likeliest `n` tokens, of equals the first. Removed tokens are not among them. (In transformers they are, and may be chosen.)
fn likeliest(scores: &[f32], n: usize) -> Result<Vec<Candidate>> {
    if greedy(scores).is_none() {
        return Err(no_distribution());
    }
    let order = |a: &TokenId, b: &TokenId| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<TokenId> =
        (0..scores.len() as TokenId).filter(|&id| scores[id as usize] > f32::NEG_INFINITY).collect();
    if n < ids.len() {
        ids.select_nth_unstable_by(n, order);
        ids.truncate(n);
    }
    ids.sort_unstable_by(order);
    let probabilities = softmax(scores);
    let candidate = |id: TokenId| Candidate { token: id, probability: probabilities[id as usize] };
    Ok(ids.into_iter().map(candidate).collect())
}

/// The last position of `[rows, tokens, hidden]`.
fn last(hidden: Tensor<3>) -> Tensor<3> {
    let tokens = hidden.dims()[1];
    hidden.narrow(1, tokens - 1, 1)
}

fn selected(hidden: Tensor<3>, rows: &[usize]) -> Tensor<3> {
    let device = hidden.device();
    let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
    let len = rows.len();
    hidden.select(0, Tensor::<1, Int>::from_data(TensorData::new(rows, [len]), &device))
}

fn on_device() -> Error {
    Error::Execution("a step kept its hidden states on the device".into())
}

#[cfg(test)]
mod tests;
