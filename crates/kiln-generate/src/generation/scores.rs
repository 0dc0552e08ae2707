//! The scores of a step, from the device to the host.

use burn::tensor::Tensor;
use kiln_core::{
    Result,
    model::TokenId,
    read_back::{self, ReadBack},
};
use kiln_kernels::TopLogprobs;

use super::{Options, choice::Choice, rows::Rows};
use crate::{
    grammar::{Advance, Mask},
    sampler,
};

/// The scores of a step on their way to the host.
#[derive(Debug)]
pub(crate) struct Scores {
    pub(super) vocab: usize,
    pub(super) read: ScoresRead,
    /// Logits after the negative prompts.
    pub(super) negative: Option<ReadBack>,
}

#[derive(Debug)]
pub(super) enum ScoresRead {
    All(ReadBack),
    Likeliest { tokens: ReadBack, log_probs: ReadBack, most: usize },
}

/// The scores of a step on the host.
#[derive(Debug)]
pub(super) struct Numbers {
    /// `[rows, vocab]`; empty if only the likeliest tokens were read.
    pub(super) logits: Vec<f32>,
    /// Scores that processors begin with instead of the logits, `[rows, vocab]`.
    pub(super) begin: Option<Vec<f32>>,
    pub(super) top: Option<Top>,
    pub(super) vocab: usize,
}

impl Scores {
    /// Starts to read `logits` `[rows, 1, vocab]`, or the likeliest tokens if nothing else is needed.
    pub(super) fn start(logits: Tensor<3>, negative: Option<ReadBack>, options: &Options) -> Self {
        let vocab = logits.dims()[2];
        let read = match options.likeliest_wanted() {
            Some((kernels, most)) => {
                let most = most.min(vocab);
                let (tokens, log_probs) = kernels.run(TopLogprobs { logits, most });
                let (tokens, log_probs) = (read_back::start(tokens), read_back::start(log_probs));
                ScoresRead::Likeliest { tokens, log_probs, most }
            }
            None => ScoresRead::All(read_back::start(logits)),
        };
        Self { vocab, read, negative }
    }
}

/// A step whose tokens are to be chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scored<'a> {
    /// The tokens that a grammar allows in each row; empty without a grammar.
    pub(super) masks: &'a [Mask],
    pub(super) options: &'a Options,
    pub(super) rows: &'a Rows,
    /// `[rows, vocab]`
    pub(super) logits: &'a [f32],
    /// Scores that processors begin with instead of the logits, `[rows, vocab]`.
    pub(super) begin: Option<&'a [f32]>,
    /// The likeliest tokens, if nothing else is needed. There are no logits then.
    pub(super) top: Option<&'a Top>,
    /// The best continuations of beams, if the device chose among them. There are no logits then.
    pub(super) found: Option<&'a Found>,
    pub(super) vocab: usize,
}

/// The likeliest tokens of each row, which the device found.
#[derive(Debug)]
pub(super) struct Top {
    /// `[rows, most]`, the likeliest first; -1 if the scores of a row are not a distribution.
    pub(super) tokens: Vec<i64>,
    /// `[rows, most]`
    pub(super) log_probs: Vec<f32>,
    pub(super) most: usize,
}

impl Top {
    /// The tokens of a row with their log-probabilities; `None` if its scores are not a distribution.
    pub(super) fn of(&self, row: usize) -> Option<Vec<(TokenId, f32)>> {
        let own = row * self.most..(row + 1) * self.most;
        let pairs = self.tokens.get(own.clone())?.iter().zip(self.log_probs.get(own)?);
        pairs.map(|(&token, &log_prob)| Some((TokenId::try_from(token).ok()?, log_prob))).collect()
    }
}

/// The best continuations of each group of beams, which the device found.
#[derive(Debug)]
pub(super) struct Found {
    /// See [`candidates`](kiln_kernels::Beams::candidates).
    pub(super) numbers: Vec<f32>,
}

/// A beam, continued by a token: numbers of [`Found`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Continuation {
    /// Index among the rows of the prompt.
    pub(super) row: usize,
    pub(super) token: TokenId,
    pub(super) log_prob: f32,
    pub(super) sum: f32,
}

impl Found {
    /// The `most` continuations of a group, counted over all prompts; `None` if scores of it are not a
    /// distribution.
    pub(super) fn of(&self, group: usize, most: usize) -> Option<Vec<Continuation>> {
        let own = self.numbers.get(group * 4 * most..(group + 1) * 4 * most)?;
        let one = |numbers: &[f32; 4]| {
            let &[row, token, log_prob, sum] = numbers;
            (token >= 0.0).then_some(Continuation {
                row: row as usize,
                token: token as TokenId,
                log_prob,
                sum,
            })
        };
        own.as_chunks().0.iter().map(one).collect()
    }
}

impl<'a> Scored<'a> {
    pub(super) fn new(numbers: &'a Numbers, masks: &'a [Mask], rows: &'a Rows, options: &'a Options) -> Self {
        let Numbers { logits, begin, top, vocab } = numbers;
        let (begin, top) = (begin.as_deref(), top.as_ref());
        Self { begin, top, ..Self::from_logits(logits, *vocab, masks, rows, options) }
    }

    pub(super) fn from_logits(
        logits: &'a [f32],
        vocab: usize,
        masks: &'a [Mask],
        rows: &'a Rows,
        options: &'a Options,
    ) -> Self {
        Self { masks, options, rows, logits, begin: None, top: None, found: None, vocab }
    }

    pub(super) fn logits_of(&self, row: usize) -> &[f32] {
        self.of(row, self.logits)
    }

    /// The scores of a row that processors begin with.
    pub(super) fn begin_of(&self, row: usize) -> &[f32] {
        self.of(row, self.begin.unwrap_or(self.logits))
    }

    fn of<'b>(&self, row: usize, all: &'b [f32]) -> &'b [f32] {
        all.get(row * self.vocab..(row + 1) * self.vocab).unwrap_or_default()
    }

    /// Removes the tokens that the grammar does not allow, and applies the processors.
    pub(super) fn process(&self, row: usize, scores: &mut [f32]) -> Result<()> {
        let Some(state) = self.rows.state(row) else {
            return Ok(());
        };
        let processors = &self.options.settings.processors;
        if let Some(mask) = self.masks.get(row) {
            mask.apply(scores);
        }
        let allowed = scores.to_vec();
        processors.apply(&state, scores)?;
        match scores.iter().any(|score| *score > f32::NEG_INFINITY || score.is_nan()) {
            true => Ok(()),
            false => Err(processors.emptied(&state, &allowed).unwrap_or_else(sampler::no_distribution)),
        }
    }

    /// How the rows advance for the grammar. If no token was possible, a row stays where it is.
    pub(super) fn accepted(&self, choice: &Choice) -> Vec<Advance> {
        let rows = choice.tokens.iter().enumerate().map(|(row, &token)| {
            let parent = choice.parents.as_ref().map_or(row, |parents| parents[row]);
            let ends = self.rows.list[row].finished() || !self.masks[parent].allows(token);
            Advance { parent, tokens: if ends { Vec::new() } else { vec![token] }, ..Advance::default() }
        });
        rows.collect()
    }
}
