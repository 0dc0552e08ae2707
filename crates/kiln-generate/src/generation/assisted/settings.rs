//! How tokens are proposed.

use kiln_core::Result;
use serde::{Deserialize, Deserializer, de};

use crate::{
    config::GenerationConfig,
    settings::{at_least_one, fraction, setting},
};

/// How the number of tokens that a draft model proposes changes from one pass to the next. (`num_assistant_tokens_schedule`)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Never. (`"constant"`)
    #[default]
    Constant,
    /// Two more where all were accepted, else one less; each generation begins with `num_assistant_tokens`. (`"heuristic"`,
    /// `"heuristic_transient"`)
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

/// Proposals from what a row holds already. (`PromptLookupCandidateGenerator`)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptLookup {
    /// Tokens that are proposed at once, at most.
    pub num_tokens: usize,
    /// Tokens at the end of a row that are searched for in front of it, at most.
    pub max_matching_ngram_size: usize,
}

/// How tokens are proposed that the model then checks, many in one pass. Every value is possible.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AssistedSettings {
    /// `None`: only a draft model proposes tokens, where there is one.
    pub prompt_lookup: Option<PromptLookup>,
    /// Tokens that a draft model proposes at once, at most.
    pub num_assistant_tokens: usize,
    pub schedule: Schedule,
    /// A draft model proposes nothing behind a token that it finds less likely than this.
    pub confidence_threshold: f32,
    /// Of a draft model with another tokenizer: its tokens before a proposal that are turned into text together with it.
    pub assistant_lookbehind: usize,
    /// Of a draft model with another tokenizer: tokens of the row before those that are new, which are turned into text with them.
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
    /// Those that `config` asks for.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for the first value that is impossible, alone or with the others.
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

/// More proposals than any pass has use for; numbers beyond it are mistakes.
pub(super) const MOST: usize = 1024;
