//! Settings of a generation, validated and completed with defaults.

use std::{sync::Arc, time::Duration};

use kiln_core::{Error, Result, model::TokenId};

use crate::{
    AssistedSettings, BeamSettings, ContrastiveSettings, DolaLayers,
    config::{GenerationConfig, UNTIL_IT_ENDS},
    processors::{AllowedTokens, Processor, Processors},
};

/// The settings of a generation, validated and complete. [`GenerationConfig::resolve`] creates and checks
/// them.
///
/// The defaults are those of transformers, except the length: without a limit, transformers stops after 20
/// tokens, and this loop at the end of the text.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The most tokens to generate for each row; `None`: until every row has ended. Callers that know the
    /// positions of the model set a limit.
    pub(crate) max_new_tokens: Option<usize>,
    /// The most tokens of a row, prompt and padding included; used only if `max_new_tokens` is `None`.
    pub(crate) max_length: Option<usize>,
    /// No further token is generated after this time.
    pub(crate) max_time: Option<Duration>,
    /// Whether tokens are sampled.
    pub(crate) do_sample: bool,
    /// Processors of the scores, before a token is chosen.
    pub(crate) processors: Processors,
    pub(crate) eos_token_id: Vec<TokenId>,
    pub(crate) pad_token_id: Option<TokenId>,
    pub(crate) stop_strings: Vec<String>,
    /// Beam search; `None`: each row is continued by itself.
    pub(crate) beams: Option<BeamSettings>,
    /// Scale of the distance from the scores after a negative prompt; `None`: no guidance.
    pub(crate) guidance_scale: Option<f32>,
    /// Contrastive search; `None`: tokens are chosen by their scores alone.
    pub(crate) contrastive: Option<ContrastiveSettings>,
    /// The layers that the last one is contrasted with; `None`: no contrast.
    pub(crate) dola_layers: Option<DolaLayers>,
    /// Settings of drafts, used if there is a drafter.
    pub(crate) assisted: AssistedSettings,
    /// Number of sequences that are returned for each prompt.
    pub(crate) num_return_sequences: usize,
    /// The seed of the sampler; `None`: a random one.
    pub(crate) seed: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        GenerationConfig::default().filled_in(false, Processors::default(), None, AssistedSettings::default())
    }
}

impl GenerationConfig {
    /// Checks every value and fills in the defaults.
    ///
    /// A temperature of 0 means greedy decoding, as in llama.cpp and ollama; transformers rejects it.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first value that is impossible.
    pub fn resolve(&self) -> Result<Settings> {
        self.max_time.map_or(Ok(()), |seconds| positive("max_time", seconds))?;
        let do_sample = self.do_sample == Some(true) && self.temperature != Some(0.0);
        let processors = Processors::of(self, do_sample)?;
        let beams = BeamSettings::of(self, do_sample)?;
        let assisted = AssistedSettings::of(self)?;
        let contrastive = ContrastiveSettings::of(self)?;
        let settings = self.filled_in(do_sample, processors, beams, assisted);
        let settings = Settings { contrastive, ..settings };
        settings.check()?;
        if settings.num_return_sequences > 1 && settings.beams.is_none() && !do_sample {
            let why = "is more than 1, and without sampling or beams all sequences would be the same; set do_sample or num_beams";
            return Err(setting("num_return_sequences", why));
        }
        Ok(settings)
    }

    fn filled_in(
        &self,
        do_sample: bool,
        processors: Processors,
        beams: Option<BeamSettings>,
        assisted: AssistedSettings,
    ) -> Settings {
        let endless = self.max_new_tokens == Some(UNTIL_IT_ENDS);
        Settings {
            max_new_tokens: self.max_new_tokens.filter(|_| !endless),
            max_length: self.max_length.filter(|_| !endless),
            // A time that is too long for a clock never passes.
            max_time: self.max_time.and_then(|seconds| Duration::try_from_secs_f32(seconds).ok()),
            do_sample,
            processors,
            eos_token_id: self.eos_token_id.clone().unwrap_or_default(),
            pad_token_id: self.pad_token_id,
            stop_strings: self.stop_strings.clone().unwrap_or_default(),
            beams,
            guidance_scale: self.guidance_scale.filter(|&scale| scale != 1.0),
            contrastive: None,
            dola_layers: self.dola_layers.clone(),
            assisted,
            num_return_sequences: self.num_return_sequences.unwrap_or(1),
            seed: self.seed,
        }
    }
}

impl Settings {
    /// # Errors
    /// [`Error::Setting`] for the first value that is impossible.
    fn check(&self) -> Result<()> {
        at_least_one("max_new_tokens", self.max_new_tokens)?;
        at_least_one("max_length", self.max_length)?;
        at_least_one("num_return_sequences", Some(self.num_return_sequences))?;
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(setting("stop_strings", "one of them is empty, so every text would end at once"));
        }
        if let Some(scale) = self.guidance_scale.filter(|scale| !scale.is_finite()) {
            return Err(setting("guidance_scale", format!("is {scale}, must be a number")));
        }
        if self.dola_layers.is_some() && self.beams.is_some() {
            return Err(setting(
                "dola_layers",
                "goes with greedy decoding and sampling alone; set num_beams to 1",
            ));
        }
        self.contrastive.map_or(Ok(()), |search| search.check(self))
    }

    /// The most tokens that are generated for each row; `None`: until every row has ended.
    pub fn max_new_tokens(&self) -> Option<usize> {
        self.max_new_tokens
    }

    /// Sets a limit of at least one token, in place of `max_new_tokens` and `max_length`.
    pub fn set_max_new_tokens(&mut self, tokens: usize) {
        self.max_new_tokens = Some(tokens.max(1));
    }

    /// The tokens that end a text.
    pub fn eos_token_id(&self) -> &[TokenId] {
        &self.eos_token_id
    }

    /// The padding token of shorter rows.
    pub fn pad_token_id(&self) -> Option<TokenId> {
        self.pad_token_id
    }

    /// The strings that end a text.
    pub fn stop_strings(&self) -> &[String] {
        &self.stop_strings
    }

    /// Number of sequences that are returned for each prompt.
    pub fn num_return_sequences(&self) -> usize {
        self.num_return_sequences
    }

    /// Whether there is a beam search.
    pub fn has_beams(&self) -> bool {
        self.beams.is_some()
    }

    /// Whether tokens are chosen by contrastive search.
    pub fn is_contrastive(&self) -> bool {
        self.contrastive.is_some()
    }

    /// Adds a processor. It runs before the processors that only apply to sampling.
    pub fn add_processor(&mut self, processor: Arc<dyn Processor>) {
        self.processors.add(processor);
    }

    /// Allows only some tokens. The last call counts.
    pub fn add_allowed_tokens(&mut self, allowed: AllowedTokens) {
        self.processors.add_allowed_tokens(allowed);
    }

    /// Makes beam search end as in Transformers 4.47, for comparisons with it.
    pub fn set_compat_4_47(&mut self, compat: bool) {
        if let Some(beams) = &mut self.beams {
            beams.compat_4_47 = compat;
        }
    }

    /// Settings that are neither processors nor sampling, and need the scores of each step on the host.
    pub(crate) fn on_host(&self) -> Vec<&'static str> {
        let asked = [
            ("num_beams", self.beams.is_some()),
            ("guidance_scale", self.guidance_scale.is_some()),
            ("dola_layers", self.dola_layers.is_some()),
            ("penalty_alpha", self.contrastive.is_some()),
        ];
        asked.into_iter().filter(|(_, asked)| *asked).map(|(name, _)| name).collect()
    }

    pub(crate) fn needs_host(&self) -> bool {
        !self.on_host().is_empty()
    }

    /// Number of rows of each prompt.
    pub fn width(&self) -> usize {
        self.beams.as_ref().map_or(self.num_return_sequences, |beams| beams.num_beams)
    }

    /// Number of rows of each prompt that a step feeds.
    pub fn fed_rows(&self) -> usize {
        self.contrastive.map_or(self.width(), |search| search.top_k)
    }

    /// Number of tokens of each row that are fed after the prompt if `new` are generated: all but the last,
    /// which only contrastive search feeds.
    pub fn fed(&self, new: usize) -> usize {
        new.saturating_sub(usize::from(self.contrastive.is_none()))
    }

    /// The token that is fed to a row that has ended. Any token will do, so one outside of the vocabulary is
    /// skipped.
    pub(crate) fn padding(&self, vocab: usize) -> TokenId {
        let mut candidates = self.pad_token_id.iter().chain(&self.eos_token_id);
        candidates.find(|&&id| (id as usize) < vocab).copied().unwrap_or(0)
    }

    /// Number of tokens that may follow `tokens` tokens of a row, padding included; `None`: until the text
    /// ends.
    ///
    /// # Errors
    /// [`Error::Setting`] if they use up `max_length`.
    pub fn new_tokens(&self, tokens: usize) -> Result<Option<usize>> {
        match (self.max_new_tokens, self.max_length) {
            (Some(new), _) => Ok(Some(new)),
            (None, Some(length)) if length <= tokens => Err(setting(
                "max_length",
                format!(
                    "is {length} and counts the prompt, which has {tokens} tokens; raise it, or set max_new_tokens"
                ),
            )),
            (None, Some(length)) => Ok(Some(length - tokens)),
            (None, None) => Ok(None),
        }
    }
}

pub(crate) fn at_least_one(name: &'static str, value: Option<usize>) -> Result<()> {
    match value {
        Some(0) => Err(setting(name, "is 0, must be at least 1")),
        _ => Ok(()),
    }
}

pub(crate) fn positive(name: &'static str, value: f32) -> Result<()> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(setting(name, format!("is {value}, must be a number above 0"))),
    }
}

pub(crate) fn fraction(name: &'static str, value: f32) -> Result<()> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(()),
        false => Err(setting(name, format!("is {value}, must be between 0 and 1"))),
    }
}

pub(crate) fn setting(name: &'static str, why: impl Into<String>) -> Error {
    Error::Setting { name, why: why.into() }
}
