//! Settings of drafts.

use kiln_core::Result;
use serde::{Deserialize, Deserializer, de};

use crate::{
    config::GenerationConfig,
    settings::{at_least_one, fraction, setting},
};

/// The change of the number of tokens that a draft model drafts, from one pass to the next.
/// (`num_assistant_tokens_schedule`)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// The number never changes. (`"constant"`)
    #[default]
    Constant,
    /// Two more if all were accepted, else one less; each generation begins with `num_assistant_tokens`.
    /// (`"heuristic"`, `"heuristic_transient"`)
    Heuristic,
}

impl<'de> Deserialize<'de> for Schedule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match &*String::deserialize(deserializer)? {
            "constant" => Ok(Self::Constant),
            "heuristic" | "heuristic_transient" => Ok(Self::Heuristic),
            word => Err(de::Error::custom(format!(
                "`{word}` is neither constant, heuristic nor heuristic_transient"
            ))),
        }
    }
}

/// Drafts from the tokens of the row. (`PromptLookupCandidateGenerator`)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// The most tokens that are drafted at once.
    pub num_tokens: usize,
    /// The most tokens at the end of a row that are searched for earlier in it.
    pub max_matching_ngram_size: usize,
}

/// Settings of drafts, which the model verifies many at a time. Every value is possible.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AssistedSettings {
    /// `None`: only a draft model drafts tokens, if there is one.
    pub prompt_lookup: Option<PromptLookup>,
    /// The most tokens that a draft model drafts at once.
    pub num_assistant_tokens: usize,
    pub schedule: Schedule,
    /// A draft ends after a token whose probability is below this.
    pub confidence_threshold: f32,
    /// For a draft model with another tokenizer: number of its tokens before a draft that are turned into
    /// text together with it.
    pub assistant_lookbehind: usize,
    /// For a draft model with another tokenizer: number of tokens of the row before the new ones that are
    /// turned into text with them.
    pub target_lookbehind: usize,
}

impl Default for AssistedSettings {
    fn default() -> Self {
        Self {
            prompt_lookup: None,
            num_assistant_tokens: 20,
            schedule: Schedule::default(),
            confidence_threshold: 0.4,
            assistant_lookbehind: 10,
            target_lookbehind: 10,
        }
    }
}

impl AssistedSettings {
    /// The settings in `config`.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for the first value that is impossible, alone or with
    /// the others.
    pub(crate) fn of(config: &GenerationConfig) -> Result<Self> {
        at_least_one("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens)?;
        at_least_one("max_matching_ngram_size", config.max_matching_ngram_size)?;
        at_least_one("num_assistant_tokens", config.num_assistant_tokens)?;
        at_least_one("assistant_lookbehind", config.assistant_lookbehind)?;
        at_least_one("target_lookbehind", config.target_lookbehind)?;
        let default = Self::default();
        let confidence_threshold =
            config.assistant_confidence_threshold.unwrap_or(default.confidence_threshold);
        fraction("assistant_confidence_threshold", confidence_threshold)?;
        for (name, asked) in [
            ("prompt_lookup_num_tokens", config.prompt_lookup_num_tokens),
            ("num_assistant_tokens", config.num_assistant_tokens),
        ] {
            if let Some(asked) = asked.filter(|&asked| asked > MOST) {
                return Err(setting(name, format!("is {asked}, must be at most {MOST}")));
            }
        }
        let prompt_lookup = config.prompt_lookup_num_tokens.map(|num_tokens| PromptLookup {
            num_tokens,
            max_matching_ngram_size: config.max_matching_ngram_size.unwrap_or(2),
        });
        Ok(Self {
            prompt_lookup,
            num_assistant_tokens: config.num_assistant_tokens.unwrap_or(default.num_assistant_tokens),
            schedule: config.num_assistant_tokens_schedule.unwrap_or_default(),
            confidence_threshold,
            assistant_lookbehind: config.assistant_lookbehind.unwrap_or(default.assistant_lookbehind),
            target_lookbehind: config.target_lookbehind.unwrap_or(default.target_lookbehind),
        })
    }
}

/// More drafts than any pass has use for; larger numbers are mistakes.
pub(super) const MOST: usize = 1024;
