//! Settings of beam search.

use kiln_core::{Result, model::TokenId};
use serde::{Deserialize, Deserializer, de};

use crate::{
    config::GenerationConfig,
    processors::{as_written, in_vocabulary},
    settings::{at_least_one, setting},
};

/// The end of the search for a prompt, once as many sequences have ended as there are beams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EarlyStopping {
    /// The search ends at once. (`True`)
    Always,
    /// The search ends when the best open beam, ended now, would be no better than the worst ended sequence.
    /// (`False`)
    #[default]
    Heuristic,
    /// The search ends when no open beam can become better than the worst ended sequence. (`"never"`)
    Never,
}

impl<'de> Deserialize<'de> for EarlyStopping {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "neither true, false nor \"never\"")]
        enum Written {
            Bool(bool),
            Word(String),
        }

        match Written::deserialize(deserializer)? {
            Written::Bool(true) => Ok(Self::Always),
            Written::Bool(false) => Ok(Self::Heuristic),
            Written::Word(word) if word == "never" => Ok(Self::Never),
            Written::Word(word) => {
                Err(de::Error::custom(format!("`{word}` is neither true, false nor never")))
            }
        }
    }
}

/// Settings of a beam search. Every value is possible.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamSettings {
    /// Number of sequences of each prompt that are followed at once.
    pub num_beams: usize,
    /// Number of groups of equally many beams.
    pub num_beam_groups: usize,
    /// Penalty of a token for each beam of the groups before that chose the same token in the same step.
    pub diversity_penalty: f32,
    /// Exponent of the length: the score of a sequence is its log-probability, divided by its length to the
    /// power of this.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
    /// Words that every sequence must contain, each as one of several ways to write it.
    pub force_words: Vec<Vec<Vec<TokenId>>>,
    /// Number of sequences that are returned for each prompt.
    pub num_return_sequences: usize,
    /// Whether the search for a prompt ends as in transformers 4.47, not 5. With groups and forced words,
    /// which 5 lacks, it always does.
    pub compat_4_47: bool,
}

impl BeamSettings {
    /// Number of continuations of a group that a step considers, if `ends` tokens end a text: enough of them
    /// go on.
    pub(in crate::generation) fn candidates(&self, ends: usize) -> usize {
        2.max(1 + ends) * (self.num_beams / self.num_beam_groups)
    }

    /// The most tokens that lose `diversity_penalty` in a step.
    pub(in crate::generation) fn penalized(&self) -> usize {
        match self.diversity_penalty == 0.0 {
            true => 0,
            false => self.num_beams - self.num_beams / self.num_beam_groups,
        }
    }

    /// The settings in `config`; `None` for one beam.
    ///
    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for the first value that is impossible, alone or with
    /// the others.
    pub(crate) fn of(config: &GenerationConfig, do_sample: bool) -> Result<Option<Self>> {
        at_least_one("num_beams", config.num_beams)?;
        at_least_one("num_beam_groups", config.num_beam_groups)?;
        let beams = Self {
            num_beams: config.num_beams.unwrap_or(1),
            num_beam_groups: config.num_beam_groups.unwrap_or(1),
            diversity_penalty: config.diversity_penalty.unwrap_or(0.0),
            length_penalty: config.length_penalty.unwrap_or(1.0),
            early_stopping: config.early_stopping.unwrap_or_default(),
            force_words: config.force_words_ids.iter().flatten().cloned().map(ForceWord::ways).collect(),
            num_return_sequences: config.num_return_sequences.unwrap_or(1),
            compat_4_47: false,
        };
        beams.check(config, do_sample)?;
        Ok((beams.num_beams > 1).then_some(beams))
    }

    /// Whether the search follows transformers 5.
    pub(super) fn is_vectorised(&self) -> bool {
        self.num_beam_groups == 1 && self.force_words.is_empty() && !self.compat_4_47
    }

    /// The score of a sequence of `tokens` tokens, whose log-probabilities sum up to `sum`.
    pub(super) fn normalized(&self, sum: f32, tokens: usize) -> f32 {
        let length = (tokens as f64).powf(as_written(self.length_penalty));
        match self.is_vectorised() {
            true => sum / length as f32,
            false => (f64::from(sum) / length) as f32,
        }
    }

    fn check(&self, config: &GenerationConfig, do_sample: bool) -> Result<()> {
        let Self { num_beams: beams, num_beam_groups: groups, .. } = *self;
        let finite = |name, value: f32| match value.is_finite() {
            true => Ok(()),
            false => Err(setting(name, format!("is {value}, must be a number"))),
        };
        finite("length_penalty", self.length_penalty)?;
        finite("diversity_penalty", self.diversity_penalty)?;
        if beams > MOST {
            return Err(setting("num_beams", format!("is {beams}, must be at most {MOST}")));
        }
        if !beams.is_multiple_of(groups) {
            let why = format!("is {groups}, which does not divide the {beams} beams into equal groups");
            return Err(setting("num_beam_groups", why));
        }
        if groups > 1 && do_sample {
            return Err(setting(
                "num_beam_groups",
                "groups of beams take the likeliest tokens; turn sampling off (`do_sample` false)",
            ));
        }
        if groups > 1 && self.diversity_penalty <= 0.0 {
            let why = "must be above 0 where there are groups of beams; without it all groups are the same";
            return Err(setting("diversity_penalty", why));
        }
        let returned = self.num_return_sequences;
        if returned > MOST {
            return Err(setting("num_return_sequences", format!("is {returned}, must be at most {MOST}")));
        }
        if beams > 1 && returned > beams {
            let why = format!("is {returned}, more than the {beams} beams; raise num_beams");
            return Err(setting("num_return_sequences", why));
        }
        self.check_force_words(config, do_sample)
    }

    /// # Errors
    /// [`Error::Setting`](kiln_core::Error::Setting) for forced words that have tokens outside of a
    /// vocabulary of this many.
    pub(crate) fn check_vocabulary(&self, vocab: usize) -> Result<()> {
        self.force_words.iter().flatten().try_for_each(|word| in_vocabulary("force_words_ids", word, vocab))
    }

    fn check_force_words(&self, config: &GenerationConfig, do_sample: bool) -> Result<()> {
        const NAME: &str = "force_words_ids";

        if self.force_words.is_empty() {
            return match &config.force_words_ids {
                Some(_) => Err(setting(NAME, "is empty; give at least one word, or leave it out")),
                None => Ok(()),
            };
        }
        if self.num_beams == 1 {
            return Err(setting(NAME, "words are forced by a beam search; set num_beams to 2 or more"));
        }
        if self.num_beam_groups > 1 || do_sample {
            return Err(setting(NAME, "goes with neither groups of beams nor sampling"));
        }
        let ways = || self.force_words.iter().flatten();
        if self.force_words.iter().any(Vec::is_empty) || ways().any(Vec::is_empty) {
            return Err(setting(NAME, "one of the words has no tokens; give at least one"));
        }
        for word in &self.force_words {
            let begins =
                |way: &&Vec<TokenId>| word.iter().any(|other| other != *way && other.starts_with(way));
            if let Some(way) = word.iter().find(begins) {
                let why =
                    format!("{way:?} begins another way to write the same word; leave one of the two out");
                return Err(setting(NAME, why));
            }
        }
        let shortest = |word: &Vec<Vec<TokenId>>| word.iter().map(Vec::len).min().unwrap_or(0);
        let tokens: usize = self.force_words.iter().map(shortest).sum();
        match config.max_new_tokens.or(config.max_length).filter(|&most| most < tokens) {
            Some(most) => {
                Err(setting(NAME, format!("takes {tokens} tokens at least, and there may be {most}")))
            }
            None => Ok(()),
        }
    }
}

/// More beams or sequences of a prompt than there is use for; larger numbers are mistakes.
const MOST: usize = 4096;

/// One of `force_words_ids`: tokens that follow each other, or several ways to write a word, one of which
/// must occur.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "neither a list of tokens nor a list of such lists")]
pub enum ForceWord {
    Word(Vec<TokenId>),
    AnyOf(Vec<Vec<TokenId>>),
}

impl ForceWord {
    fn ways(self) -> Vec<Vec<TokenId>> {
        match self {
            Self::Word(word) => vec![word],
            Self::AnyOf(ways) => ways,
        }
    }
}
