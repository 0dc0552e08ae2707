//! Settings of contrastive search.

use kiln_core::Result;

use crate::{
    config::GenerationConfig,
    processors::as_written,
    settings::{Settings, fraction, setting},
};

/// Settings of a contrastive search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContrastiveSettings {
    /// Weight of the similarity to the text before, from 0 to 1; the probability has the rest.
    pub penalty_alpha: f32,
    /// Number of the likeliest tokens that are compared.
    pub top_k: usize,
}

impl ContrastiveSettings {
    /// The settings in `config`; `None` if the likeliest token is taken.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for the first value that is impossible.
    pub(crate) fn of(config: &GenerationConfig) -> Result<Option<Self>> {
        let search = Self {
            penalty_alpha: config.penalty_alpha.unwrap_or(0.0),
            // The default of `top_k` everywhere.
            top_k: config.top_k.unwrap_or(50),
        };
        fraction(NAME, search.penalty_alpha)?;
        if search.penalty_alpha == 0.0 {
            return Ok(None);
        }
        search.check_top_k()?;
        Ok((search.top_k > 1).then_some(search))
    }

    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for a value that is impossible, and for other settings
    /// that it does not go with.
    pub(crate) fn check(&self, settings: &Settings) -> Result<()> {
        fraction(NAME, self.penalty_alpha)?;
        self.check_top_k()?;
        let others = [
            ("do_sample", settings.do_sample),
            ("num_beams", settings.beams.is_some()),
            ("num_return_sequences", settings.num_return_sequences > 1),
            ("guidance_scale", settings.guidance_scale.is_some()),
            ("dola_layers", settings.dola_layers.is_some()),
            ("prompt_lookup_num_tokens", settings.assisted.prompt_lookup.is_some()),
        ];
        match others.into_iter().find(|(_, asked)| *asked) {
            Some((other, _)) => Err(setting(
                NAME,
                format!("goes with greedy decoding alone; turn off `{other}`, or set penalty_alpha to 0"),
            )),
            None => Ok(()),
        }
    }

    fn check_top_k(&self) -> Result<()> {
        match self.top_k {
            0 => Err(setting(
                "top_k",
                "is 0, and contrastive search compares the `top_k` likeliest tokens; set it to 2 or more, or penalty_alpha to 0",
            )),
            k if k > MOST => Err(setting(
                "top_k",
                format!("is {k}, and contrastive search compares {MOST} tokens at most; lower it"),
            )),
            _ => Ok(()),
        }
    }

    /// The score of a candidate. `similarity`: the largest cosine similarity to the text before it.
    pub(super) fn score(&self, probability: f32, similarity: f32) -> f32 {
        let alpha = as_written(self.penalty_alpha);
        (1.0 - alpha) as f32 * probability - alpha as f32 * similarity
    }
}

const NAME: &str = "penalty_alpha";

/// More candidates than there is use for; larger numbers are mistakes.
const MOST: usize = 4096;
