//! Contrastive search: the choice, among the likeliest tokens, of one that is unlike the text before it.
//!
//! Each of the `top_k` likeliest tokens is fed. The probability of a token counts for it, and the largest
//! cosine similarity of its hidden state to those of the tokens before counts against it. ("A Contrastive
//! Framework for Neural Text Generation", <https://arxiv.org/abs/2202.06417>; transformers 4.47's
//! `_contrastive_search`)

mod context;
mod settings;

use burn::tensor::{DType, Int, Tensor, TensorData};
use kiln_core::{Error, Result, model::TokenId, read_back};

use self::context::Context;
pub use self::settings::ContrastiveSettings;
use super::{
    Options,
    choice::Choice,
    next::Next,
    rows::{Row, Rows},
    runner::Runner,
    scores::Scored,
    step::{StepState, allowed},
};
use crate::{
    feeder::Output,
    grammar::{Mask, Masks},
    processors::softmax,
    sampler::{greedy, no_distribution},
};

#[derive(Debug)]
pub(super) struct Contrastive {
    settings: ContrastiveSettings,
    /// The hidden states of each row so far.
    contexts: Vec<Context>,
    /// The token that was fed last; `None`: it is still to be fed.
    fed: Option<Fed>,
    /// The tokens that a grammar allows.
    masks: Option<Masks>,
    /// The tokens that a grammar allows in each row, for the step under way; empty without a grammar.
    allowed: Vec<Mask>,
}

/// The last token of each row, after it was fed.
#[derive(Debug)]
struct Fed {
    /// `[rows, 1, hidden]`
    hidden: Tensor<3>,
    /// The row of the cache that holds each row.
    rows: Vec<usize>,
}

/// A token that may be chosen next.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: TokenId,
    probability: f32,
}

impl Contrastive {
    pub(super) fn new(settings: ContrastiveSettings, masks: Option<Masks>) -> Self {
        Self { settings, contexts: Vec::new(), fed: None, masks, allowed: Vec::new() }
    }

    /// Forgets what was fed: the cache is empty.
    pub(super) fn start_over(&mut self) {
        self.fed = None;
    }

    /// Makes a step.
    pub(super) async fn choose(&mut self, state: &mut StepState<'_, '_>) -> Result<Choice> {
        let fed = match self.fed.take() {
            Some(fed) => fed,
            None => self.feed_last(state.runner, state.rows).await?,
        };
        let logits = state.runner.model().head(fed.hidden);
        let vocab = logits.dims()[2];
        let logits = state.runner.read_floats(read_back::start(logits)).await?;
        state.record_scores()?;
        // A step that is made again has them already.
        if self.allowed.is_empty() {
            self.allowed = allowed(&mut self.masks)?;
        }
        let width = self.settings.top_k.min(vocab);
        let step = Scored::from_logits(&logits, vocab, &self.allowed, state.rows, state.options);
        let (mut choice, candidates) = proposed(&step, width)?;
        let hidden = feed_candidates(state.runner, &candidates, &fed.rows, width)?;
        let states = state.runner.read_floats(read_back::start(hidden.clone().cast(DType::F32))).await?;
        state.runner.none_refused()?;
        let mut states = context::normalized(&states, hidden.dims()[2]);
        let best: Vec<usize> = (candidates.iter().zip(states.chunks(width)).enumerate())
            .map(|(row, (candidates, states))| self.best(row, candidates, states))
            .collect();
        choice.tokens = candidates.iter().zip(&best).map(|(of_row, &best)| of_row[best].token).collect();
        let accepted = (!self.allowed.is_empty()).then(|| step.accepted(&choice));
        self.allowed.clear();
        if let Some((masks, accepted)) = self.masks.as_mut().zip(accepted) {
            masks.advance(accepted)?;
        }
        let rows: Vec<usize> = best.iter().enumerate().map(|(row, best)| row * width + best).collect();
        for (context, &row) in self.contexts.iter_mut().zip(&rows) {
            context.push(std::mem::take(&mut states[row]));
        }
        self.fed = Some(Fed { hidden: selected(hidden, &rows), rows });
        Ok(choice)
    }

    /// Feeds the prompt, or the last tokens again.
    async fn feed_last(&mut self, runner: &mut Runner<'_>, rows: &Rows) -> Result<Fed> {
        let is_prompt = matches!(runner.next, Next::Prompt(_));
        let Output::Logits(hidden) = runner.feed(rows.width).await? else { return Err(on_device()) };
        if is_prompt {
            let states = runner.read_floats(read_back::start(hidden.clone().cast(DType::F32))).await?;
            let [_, tokens, width] = hidden.dims();
            let of_row = |(row, states): (&Row, &[f32])| {
                let own = (row.prompt_end - row.left_pad).min(tokens);
                Context::new(&states[(tokens - own) * width..], width)
            };
            self.contexts = rows.list.iter().zip(states.chunks(tokens * width)).map(of_row).collect();
        }
        Ok(Fed { hidden: last(hidden), rows: (0..rows.len()).collect() })
    }

    /// Makes the cache hold each row once, without its last token. If that cannot be, the cache holds that
    /// token, or nothing.
    pub(super) fn keep_chosen(&mut self, runner: &mut Runner<'_>, rows: &Rows) {
        let chosen = self.fed.take().map(|fed| fed.rows);
        let is_known = chosen.is_some() || runner.feeder.left_pad.len() == rows.len();
        let kept = match chosen {
            Some(chosen) => runner.feeder.reorder(&chosen),
            // Any of the candidates may be the first.
            None => runner.feeder.narrow(rows.len()),
        };
        let kept = kept.is_ok() && (runner.forget_undelivered(rows).is_ok() || is_known);
        if !kept {
            runner.feeder.cache.reset();
        }
    }

    /// The index of the best candidate of a row, the first of equals. `states`: the hidden states of the
    /// candidates.
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

/// Feeds `width` candidates of each row after the rows of the cache that hold the rows. Returns their hidden
/// states `[rows · width, 1, hidden]`.
fn feed_candidates(
    runner: &mut Runner<'_>,
    candidates: &[Vec<Candidate>],
    rows: &[usize],
    width: usize,
) -> Result<Tensor<3>> {
    let parents: Vec<usize> = rows.iter().flat_map(|&row| std::iter::repeat_n(row, width)).collect();
    runner.feeder.reorder(&parents)?;
    // A row with fewer candidates is filled up with its first, which no other equals.
    let of_row = |of_row: &Vec<Candidate>| {
        let token = |i: usize| of_row.get(i).or(of_row.first()).map_or(0, |candidate| candidate.token);
        (0..width).map(token).collect::<Vec<_>>()
    };
    let tokens: Vec<i32> = candidates.iter().flat_map(of_row).map(|id| id as i32).collect();
    let tokens = Tensor::from_data(TensorData::new(tokens, [parents.len(), 1]), &runner.device);
    match runner.feeder.step(Some(tokens))? {
        Output::Logits(hidden) => Ok(last(hidden)),
        Output::Chosen(_) => Err(on_device()),
    }
}

/// The candidates of each row, and the numbers of the choice that are to be kept. Rows that have ended have
/// any token.
fn proposed(step: &Scored<'_>, width: usize) -> Result<(Choice, Vec<Vec<Candidate>>)> {
    let Options { settings, keep_logits, .. } = step.options;
    let mut choice = Choice::default();
    let mut candidates = Vec::with_capacity(step.rows.len());
    for (i, row) in step.rows.list.iter().enumerate().take(step.logits.len() / step.vocab) {
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

/// The likeliest `n` tokens, the first of equals. Removed tokens are not among them. (In transformers they
/// are, and may be chosen.)
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
