//! Guidance: the choice of tokens that are likelier after the prompt than after another one (classifier-free
//! guidance).
//!
//! The model also continues a negative prompt, with a cache of its own, which is fed the tokens that were
//! chosen for the prompt. (transformers' `UnbatchedClassifierFreeGuidanceLogitsProcessor`)

use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use kiln_core::{
    Error, Result,
    model::{CausalModel, TokenId},
    model_cache::ModelCache,
};

use super::{
    Options,
    next::{Next, feed_tokens},
    rows::{Row, Rows, check_vocabulary},
};
use crate::{
    feeder::{Feeder, Output},
    processors::log_softmax,
    settings::setting,
};

#[derive(Debug)]
pub(super) struct Guidance {
    scale: f32,
    feeder: Feeder<'static>,
    /// The negative prompt of each prompt.
    prompts: Rows,
    /// The token that fills columns without a token.
    any: TokenId,
    device: Device,
}

impl Guidance {
    /// The guidance that `options` ask for; `None` if they do not. The negative branch of `rows` gets an
    /// empty cache like `cache`.
    ///
    /// # Errors
    /// [`Error::Setting`] and [`Error::Prompt`] for negative prompts that are impossible, [`Error::Full`] if
    /// the cache cannot hold the rows.
    pub(super) fn new(
        model: &Arc<dyn CausalModel>,
        cache: &ModelCache,
        rows: &Rows,
        options: &Options,
        device: &Device,
    ) -> Result<Option<Self>> {
        let negative = &options.negative_prompts;
        let Some(scale) = options.settings.guidance_scale else {
            return match negative.is_empty() {
                true => Ok(None),
                false => Err(setting(
                    "negative_prompt",
                    "has no effect without guidance; set guidance_scale to a number other than 1",
                )),
            };
        };
        let prompts = rows.prompts().len();
        if ![0, 1, prompts].contains(&negative.len()) {
            let why = format!(
                "there are {} for {prompts} prompts; give one for all, or one for each",
                negative.len(),
            );
            return Err(setting("negative_prompt", why));
        }
        if negative.iter().any(Vec::is_empty) {
            return Err(setting("negative_prompt", "is empty; give at least one token, or leave it out"));
        }
        check_vocabulary(negative, model.vocab())?;
        let ids = |row: &Row| match negative.get(row.index).or(negative.first()) {
            Some(ids) => ids.clone(),
            // By default, the last token of the prompt.
            None => row.ids.last().copied().into_iter().collect(),
        };
        let ids: Vec<Vec<TokenId>> = rows.prompts().map(ids).collect();
        let mut cache = cache.snapshot();
        cache.reset();
        let longest = ids.iter().map(Vec::len).max().unwrap_or(0);
        let takes_padding = cache.admits(0, true).is_ok();
        let row = |(index, ids): (usize, Vec<TokenId>)| {
            let (left_pad, prompt_end) = match takes_padding {
                true => (longest - ids.len(), longest),
                false => (0, ids.len()),
            };
            Row { index, prompt: ids.len(), left_pad, prompt_end, ids, stopped: None }
        };
        let prompts = Rows::from_list(ids.into_iter().enumerate().map(row).collect(), 1);
        let left_pad = prompts.list.iter().map(|row| row.left_pad).collect();
        let mut feeder = Feeder::new(model.clone(), cache, left_pad, options.compile, device);
        feeder.oom_policy = options.oom_policy.clone();
        let any = options.settings.padding(model.vocab());
        let mut guidance = Self { scale, feeder, prompts, any, device: device.clone() };
        rows.limit.map_or(Ok(()), |limit| guidance.reserve(limit))?;
        Ok(Some(guidance))
    }

    /// Prepares for `limit` tokens after the negative prompts.
    ///
    /// # Errors
    /// [`Error::Full`] if the cache cannot hold them.
    fn reserve(&mut self, limit: usize) -> Result<()> {
        let reaches = self.prompts.prompt_end() + limit - 1;
        match self.feeder.cache.capacity().filter(|&capacity| capacity < reaches) {
            Some(capacity) => Err(Error::Full { capacity, needed: reaches }),
            None => {
                self.feeder.reserve(reaches);
                Ok(())
            }
        }
    }

    /// Feeds the negative branch the tokens that are fed to the rows next. Returns its logits `[rows, 1,
    /// vocab]`.
    pub(super) async fn feed(
        &mut self,
        next: &Next,
        width: usize,
        chunk: Option<usize>,
    ) -> Result<Tensor<3>> {
        let output = match next {
            Next::Prompt(_) => {
                let batch = self.prompts.prompt_batch(self.any, &self.device);
                Next::Prompt(batch).feed(&mut self.feeder, width, chunk).await?
            }
            Next::Tokens(tokens, parents) => {
                feed_tokens(&mut self.feeder, tokens.clone(), parents.as_deref())?
            }
            Next::OnDevice | Next::Nothing => {
                return Err(Error::Execution("the negative branch has nothing to be fed".into()));
            }
        };
        match output {
            Output::Logits(logits) => Ok(logits),
            Output::Chosen(_) => Err(Error::Execution("the negative branch chose a token".into())),
        }
    }

    /// The scores that processors begin with, from the `logits` and those of the negative branch, both
    /// `[rows, vocab]`.
    pub(super) fn scores(&self, logits: &[f32], negative: &[f32], vocab: usize) -> Vec<f32> {
        let rows = logits.chunks_exact(vocab).zip(negative.chunks_exact(vocab));
        rows.flat_map(|(logits, negative)| {
            let (positive, negative) = (log_softmax(logits), log_softmax(negative));
            let scale = self.scale;
            positive.into_iter().zip(negative).map(move |(p, n)| scale * (p - n) + n)
        })
        .collect()
    }

    /// Whether a step was given up with its recording.
    pub(super) fn is_lost(&self) -> bool {
        self.feeder.lost
    }

    /// Forgets everything that was fed; see [`Feeder::start_over`].
    pub(super) fn start_over(&mut self) {
        self.feeder.left_pad = self.prompts.list.iter().map(|row| row.left_pad).collect();
        self.feeder.start_over();
    }

    /// Feeds the negative branch all but the last of the tokens that `rows` generated.
    pub(super) async fn feed_again(&mut self, rows: &Rows, chunk: Option<usize>) -> Result<()> {
        let continued = |row: &Row| {
            let mut negative = self.prompts.list[row.index].clone();
            negative.ids.extend(&row.ids[row.prompt..]);
            negative
        };
        let negative = Rows {
            delivered: rows.delivered,
            ..Rows::from_list(rows.list.iter().map(continued).collect(), rows.width)
        };
        negative.feed_again(&mut self.feeder, chunk, self.any, &self.device).await.map(drop)
    }
}

#[cfg(test)]
mod tests;
