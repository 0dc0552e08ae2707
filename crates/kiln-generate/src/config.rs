//! What a folder or a caller asks for: transformers' `GenerationConfig`, as far as it is acted on.

mod not_applied;

use std::{collections::BTreeMap, path::Path};

use kiln_core::{Error, Result, files, model::TokenId};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::{DolaLayers, EarlyStopping, ForceWord, Schedule, watermark::WatermarkingConfig};

/// A `max_new_tokens` that sets no limit: the text goes on until it ends, or the model's positions do.
pub const UNTIL_IT_ENDS: usize = usize::MAX;

/// Declares [`GenerationConfig`]: each setting once, with the type it has where it is given.
macro_rules! generation_config {
    ($(#[$about:meta])* { $($(#[$doc:meta])* $name:ident: $type:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(default, expecting = "a JSON object")]
        #[non_exhaustive]
        pub struct GenerationConfig {
            $($(#[$doc])* pub $name: Option<$type>,)*
            /// Settings of transformers that change tokens and are not applied here, by name.
            #[serde(flatten, deserialize_with = "not_applied::named_in")]
            pub others: BTreeMap<String, Value>,
        }

        kiln_core::setters!(GenerationConfig { $($name: $type,)* });

        impl GenerationConfig {
            /// The names of all settings.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// Takes each setting that is absent here from `defaults`.
            fn or(self, defaults: Self) -> Self {
                Self {
                    $($name: self.$name.or(defaults.$name),)*
                    others: defaults.others.into_iter().chain(self.others).collect(),
                }
            }
        }
    };
}

generation_config! {
    /// Settings of a generation, each of which may be absent: `generation_config.json`, or the arguments of a call.
    ///
    /// Settings of transformers that change tokens and are not applied here are kept, so that [`not_applied`] can name them.
    /// [`resolve`] checks the values and fills in the rest.
    ///
    /// ```
    /// # use kiln_generate::GenerationConfig;
    /// let wanted = GenerationConfig::new().max_new_tokens(40).do_sample(true).temperature(0.7);
    /// ```
    ///
    /// [`not_applied`]: GenerationConfig::not_applied
    /// [`resolve`]: GenerationConfig::resolve
    {
        /// Tokens to generate; wins over `max_length`. [`UNTIL_IT_ENDS`] sets no limit.
        max_new_tokens: usize,
        /// Tokens of a row, its prompt and padding included.
        max_length: usize,
        /// Seconds after which no further token is generated, from the first step on. No effect in a browser, which has no clock.
        max_time: f32,
        /// Whether tokens are drawn. If not, each is the likeliest.
        do_sample: bool,
        /// Divides the scores; 0 means the likeliest token, always. Only where tokens are drawn.
        temperature: f32,
        /// Keeps the tokens that carry this share of the entropy of the 100 likeliest. Only where tokens are drawn.
        top_h: f32,
        /// Keeps this many likeliest tokens; 0 means all. Only where tokens are drawn, and in contrastive search (`penalty_alpha`).
        top_k: usize,
        /// Keeps the likeliest tokens that together reach this probability. Only where tokens are drawn.
        top_p: f32,
        /// Removes tokens less likely than this times the likeliest. Only where tokens are drawn.
        min_p: f32,
        /// Keeps the tokens whose information is closest to the entropy, until they reach this probability. Only where tokens
        /// are drawn.
        typical_p: f32,
        /// Removes tokens less likely than this. Only where tokens are drawn.
        epsilon_cutoff: f32,
        /// Removes tokens less likely than this or, where many are possible, than `sqrt(eta) * exp(-entropy)`. Only where
        /// tokens are drawn.
        eta_cutoff: f32,
        /// Divides the scores of tokens that occurred, prompt included; 1 is off.
        repetition_penalty: f32,
        /// Multiplies the scores of tokens of the prompt; 1 is off.
        encoder_repetition_penalty: f32,
        /// No sequence of this many tokens occurs twice, prompt included; 0 is off.
        no_repeat_ngram_size: usize,
        /// No sequence of this many tokens of the prompt occurs in what is generated; 0 is off.
        encoder_no_repeat_ngram_size: usize,
        /// Adds to the score of the last token of each sequence, where the others precede it.
        sequence_bias: Vec<(Vec<TokenId>, f32)>,
        /// Sequences that are never completed.
        bad_words_ids: Vec<Vec<TokenId>>,
        /// Tokens that are never chosen.
        #[serde(deserialize_with = "tokens")]
        suppress_tokens: Vec<TokenId>,
        /// Tokens that are not chosen at the first step.
        #[serde(deserialize_with = "tokens")]
        begin_suppress_tokens: Vec<TokenId>,
        /// Tokens that end a row are not chosen before it has this many tokens, prompt and padding included. `min_new_tokens`
        /// overrides it.
        min_length: usize,
        /// Tokens that end a row are not chosen before this many were generated. Stop strings, time and criteria still end it.
        min_new_tokens: usize,
        /// The token that follows a prompt of one token.
        #[serde(deserialize_with = "token")]
        forced_bos_token_id: TokenId,
        /// The last token that may be generated is one of these.
        #[serde(deserialize_with = "tokens")]
        forced_eos_token_id: Vec<TokenId>,
        /// After this many new tokens, raises the scores of tokens that end a row, more with each step: by
        /// `factor ^ steps - 1` of their size.
        exponential_decay_length_penalty: (usize, f32),
        /// Replaces scores that are no numbers by 0, and infinite ones by the largest numbers there are.
        remove_invalid_values: bool,
        /// Hides a watermark in what is generated, which [`watermark`](crate::watermark) finds.
        watermarking_config: WatermarkingConfig,
        /// Whether scores that are kept (`keep_scores`) are log-probabilities.
        renormalize_logits: bool,
        /// Beams: sequences of each prompt that are followed at once, of which the likeliest are returned. 1 follows none but the
        /// chosen tokens.
        num_beams: usize,
        /// Groups that the beams are divided into. Each avoids the tokens of those before it.
        num_beam_groups: usize,
        /// What a token costs for each beam of the groups before that chose it in the same step.
        diversity_penalty: f32,
        /// The score of a beam is its log-probability, divided by its length to the power of this: above 0 favours long ones.
        length_penalty: f32,
        /// When a beam search ends: true, false or `"never"`.
        early_stopping: EarlyStopping,
        /// Words that every beam must hold, in any order: lists of tokens, or lists of such lists, of which one must occur.
        force_words_ids: Vec<ForceWord>,
        /// Chooses tokens that are likelier after the prompt than after a negative prompt: log-probabilities are moved away from those
        /// behind it by this factor. 1 is off, 0 continues the negative prompt.
        guidance_scale: f32,
        /// Contrastive search: of the `top_k` likeliest tokens, takes one that is unlike the text before it, which counts by this
        /// factor. 0 is off, at 1 nothing else counts.
        penalty_alpha: f32,
        /// Contrasts the last layer with an earlier one (DoLa): `"low"`, `"high"` or a list of layers.
        dola_layers: DolaLayers,
        /// Proposes up to this many tokens at once that followed the same tokens before (prompt lookup).
        prompt_lookup_num_tokens: usize,
        /// Prompt lookup: tokens at the end of a row that are searched for, at most. Default: 2.
        max_matching_ngram_size: usize,
        /// Tokens that a draft model proposes at once, at most. Default: 20.
        num_assistant_tokens: usize,
        /// How that number changes: `"constant"`, `"heuristic"` or `"heuristic_transient"`.
        num_assistant_tokens_schedule: Schedule,
        /// A draft model proposes nothing behind a token that it finds less likely than this. Default: 0.4.
        assistant_confidence_threshold: f32,
        /// Of a draft model with another tokenizer: its tokens before a proposal that are turned into text together with it. Default: 10.
        assistant_lookbehind: usize,
        /// Of a draft model with another tokenizer: tokens of the row that are turned into text together with new ones. Default: 10.
        target_lookbehind: usize,
        /// Sequences that are returned for each prompt.
        num_return_sequences: usize,
        /// Tokens that end a row. A list that is empty asks for none, and overrides the folder's.
        #[serde(deserialize_with = "tokens")]
        eos_token_id: Vec<TokenId>,
        #[serde(deserialize_with = "token")]
        pad_token_id: TokenId,
        #[serde(deserialize_with = "token")]
        bos_token_id: TokenId,
        #[serde(deserialize_with = "strings")]
        stop_strings: Vec<String>,
        /// Of the sampler. Ours: transformers takes torch's global one.
        seed: u64,
        use_cache: bool,
        /// Kept for whoever chooses the cache; nothing in this crate acts on it.
        cache_implementation: String,
        /// See `cache_implementation`.
        cache_config: Value,
    }
}

impl GenerationConfig {
    /// Asks for nothing: all is as the model's folder has it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads `generation_config.json`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, is no JSON object, or has a value of the wrong type.
    pub fn from_file(path: &Path) -> Result<Option<Self>> {
        files::try_read_text(path)?.map(|text| Self::from_text(path, &text)).transpose()
    }

    /// Reads the text of a `generation_config.json`, which came from `path`.
    ///
    /// # Errors
    /// [`Error::File`] if it is no JSON object, or has a value of the wrong type.
    pub fn from_text(path: &Path, text: &str) -> Result<Self> {
        let error = |why: String| Error::File { path: path.to_owned(), why };
        let map = serde_json::from_str(text).map_err(|e| error(format!("is not a JSON object: {e}")))?;
        Self::read(&map).map_err(error)
    }

    /// Reads what a model's `config.json`, which came from `path`, says of generation: settings were there before they had a file of their own.
    ///
    /// # Errors
    /// [`Error::File`] for a value of the wrong type.
    pub fn from_model_config(path: &Path, config: &Value) -> Result<Self> {
        // The first is not taken from there by transformers, either, and the second is of training. So is the last: it changes no text.
        const PASSED_OVER: [&str; 3] = ["forced_decoder_ids", "seed", "use_cache"];
        let mut settings = config.as_object().cloned().unwrap_or_default();
        settings.retain(|name, _| !PASSED_OVER.contains(&&**name));
        Self::read(&settings).map_err(|why| Error::File { path: path.to_owned(), why })
    }

    /// Reads keyword arguments of `generate()`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a value of the wrong type, and for a setting that would be [`not_applied`](Self::not_applied).
    pub fn from_arguments(arguments: &Map<String, Value>) -> Result<Self> {
        let config =
            Self::read(arguments).map_err(|why| Error::Setting { name: "generation_config", why })?;
        match config.not_applied().first() {
            Some(name) => Err(Error::Setting {
                name,
                why: "is a setting of transformers that is not applied here; leave it out".into(),
            }),
            None => Ok(config),
        }
    }

    /// Says which key has a wrong value, which serde alone does not.
    fn read(map: &Map<String, Value>) -> Result<Self, String> {
        serde_path_to_error::deserialize(map).map_err(|e| format!("`{}`: {}", e.path(), e.inner()))
    }

    /// Whether a setting is given that counts only where tokens are drawn.
    pub fn shapes_sampling(&self) -> bool {
        let given = [self.temperature, self.top_h, self.top_p, self.min_p, self.typical_p];
        let cutoffs = [self.epsilon_cutoff, self.eta_cutoff];
        // Without sampling, this and `top_k` ask for contrastive search.
        let contrasts = self.penalty_alpha.is_some_and(|alpha| alpha > 0.0);
        self.top_k.is_some() && !contrasts || given.iter().chain(&cutoffs).any(Option::is_some)
    }

    /// These wishes, completed by `defaults` where they are silent.
    ///
    /// The length is one wish with two spellings: who gives either overrides both. (transformers lets a folder's
    /// `max_new_tokens` win over the caller's `max_length`.)
    pub fn merged_over(self, defaults: &Self) -> Self {
        let mut defaults = defaults.clone();
        if self.max_new_tokens.is_some() || self.max_length.is_some() {
            (defaults.max_new_tokens, defaults.max_length) = (None, None);
        }
        self.or(defaults)
    }

    /// These wishes, with those of `overrides` instead where it has any.
    pub fn merged_with(&self, overrides: Self) -> Self {
        overrides.merged_over(self)
    }
}

fn token<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<TokenId>, D::Error> {
    Option::deserialize(deserializer)?.map_or(Ok(None), token_id)
}

fn tokens<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<TokenId>>, D::Error> {
    let Some(ids) = Option::<OneOrMany<i64>>::deserialize(deserializer)? else { return Ok(None) };
    ids.into_vec().into_iter().filter_map(|id| token_id(id).transpose()).collect::<Result<_, _>>().map(Some)
}

fn strings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    Ok(Option::deserialize(deserializer)?.map(OneOrMany::into_vec))
}

/// Negative ids are how old checkpoints write "none".
fn token_id<E: serde::de::Error>(id: i64) -> Result<Option<TokenId>, E> {
    match id {
        ..0 => Ok(None),
        id => TokenId::try_from(id)
            .map(Some)
            .map_err(|_| E::custom(format!("{id} is larger than any token id"))),
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "neither a value of the right type nor a list of them")]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

#[cfg(test)]
mod tests;
