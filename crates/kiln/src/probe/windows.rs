//! The text that is fed, in windows, each of which is a separate sequence.

use kiln_cache::Plan;
use kiln_core::{Error, Result, model::TokenId};
use kiln_generate::GenerationConfig;

use crate::Model;

/// A text in windows of a number of tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows<'a> {
    text: &'a [TokenId],
    window: usize,
}

impl<'a> Windows<'a> {
    /// Divides `text` into windows of `window` tokens.
    ///
    /// # Errors
    /// A text of fewer than two tokens, and a window longer than the model's positions.
    pub(super) fn of(text: &'a [TokenId], window: usize, model: &Model) -> Result<Self> {
        let positions = model.sizes().positions;
        if text.len() < 2 {
            return Err(Error::Prompt { why: "a text of two tokens at least is needed to probe".to_owned() });
        }
        if !(2..=positions).contains(&window) {
            let why = format!("{window} is not between 2 and the model's {positions} positions");
            return Err(Error::Setting { name: "window", why });
        }
        Ok(Self { text, window })
    }

    /// The windows; the last one may be shorter. All tokens of a window but the last are fed, and all but the
    /// first are predicted.
    pub(super) fn iter(&self) -> impl Iterator<Item = &'a [TokenId]> + use<'a> {
        self.text.chunks(self.window).filter(|window| window.len() > 1)
    }

    /// Number of tokens that are fed.
    pub(super) fn tokens(&self) -> usize {
        self.iter().map(|window| window.len() - 1).sum()
    }
}

/// Generates a text of `tokens` tokens with the model itself, at temperature 1, in windows: the text that the
/// model predicts best.
///
/// # Errors
/// The errors of [`Model::generate`].
pub fn own_text(model: &Model, tokens: usize, window: usize, seed: u64) -> Result<Vec<TokenId>> {
    let config = model.generation_config();
    let ends = config.eos_token_id.as_deref().and_then(|ids| ids.first().copied());
    let begin = config.bos_token_id.or(ends).unwrap_or(0);
    let mut text = Vec::with_capacity(tokens);
    for part in 0..tokens.div_ceil(window.max(2)) {
        let wanted = GenerationConfig::new()
            .max_new_tokens(window.min(tokens - text.len()).saturating_sub(1).max(1))
            .do_sample(true)
            .temperature(1.0)
            .top_k(0)
            .top_p(1.0)
            .seed(seed.wrapping_add(part as u64))
            .eos_token_id(Vec::new());
        text.push(begin);
        let plan = Plan::dynamic();
        for step in model.generate(vec![begin]).config(wanted).plan(plan).steps()? {
            text.extend(step?.tokens.first().copied().flatten());
        }
    }
    Ok(text)
}
