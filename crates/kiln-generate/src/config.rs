//! Settings from a model folder or a caller: transformers' `GenerationConfig`, as far as it is supported.

mod not_applied;

use std::{collections::BTreeMap, path::Path};

use kiln_core::{Error, Result, model::TokenId};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::{DolaLayers, EarlyStopping, ForceWord, Schedule, watermark::WatermarkingConfig};

/// A `max_new_tokens` without a limit: the text continues until it ends, or the model's positions do.
pub const UNTIL_IT_ENDS: usize = usize::MAX;

/// Declares [`GenerationConfig`]: each setting once, with the type of its value.
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

            /// Takes each missing setting from `defaults`.
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
    /// Settings of a generation, all of them optional: `generation_config.json`, or the arguments of a call.
    ///
    /// Settings of transformers that change tokens and are not applied here are kept, so that [`not_applied`]
    /// can name them. [`resolve`] checks the values and fills in the rest.
    ///
    /// ```
    /// # use kiln_generate::GenerationConfig;
    /// let wanted = GenerationConfig::new().max_new_tokens(40).do_sample(true).temperature(0.7);
    /// ```
    ///
    /// [`not_applied`]: GenerationConfig::not_applied
    /// [`resolve`]: GenerationConfig::resolve
    {
        /// Maximum number of tokens to generate; overrides `max_length`. [`UNTIL_IT_ENDS`] sets no limit.
        max_new_tokens: usize,
        /// Maximum number of tokens in a row, including its prompt and padding.
        max_length: usize,
        /// Number of seconds, counted from the first step, after which no further token is generated.
        max_time: f32,
        /// Whether tokens are sampled. If not, each token is the likeliest.
        do_sample: bool,
        /// Divisor of the scores; 0 means that each token is the likeliest. Only for sampling.
        temperature: f32,
        /// Keeps the tokens that carry this share of the entropy of the 100 likeliest. Only for sampling.
        top_h: f32,
        /// Keeps this many likeliest tokens; 0 means all. Only for sampling and contrastive search
        /// (`penalty_alpha`).
        top_k: usize,
        /// Keeps the likeliest tokens that together reach this probability. Only for sampling.
        top_p: f32,
        /// Removes tokens less likely than this times the likeliest. Only for sampling.
        min_p: f32,
        /// Keeps the tokens whose information is closest to the entropy, until they reach this probability.
        /// Only for sampling.
        typical_p: f32,
        /// Removes tokens less likely than this. Only for sampling.
        epsilon_cutoff: f32,
        /// Removes tokens less likely than this or, if many are possible, than `sqrt(eta) * exp(-entropy)`.
        /// Only for sampling.
        eta_cutoff: f32,
        /// Divides the scores of tokens that occurred, including those of the prompt; 1 is off.
        repetition_penalty: f32,
        /// Multiplies the scores of tokens of the prompt; 1 is off.
        encoder_repetition_penalty: f32,
        /// Prevents sequences of this many tokens from occurring twice, including those of the prompt; 0 is
        /// off.
        no_repeat_ngram_size: usize,
        /// Prevents sequences of this many tokens of the prompt from being generated; 0 is off.
        encoder_no_repeat_ngram_size: usize,
        /// Adds to the score of the last token of each sequence, if the other tokens precede it.
        sequence_bias: Vec<(Vec<TokenId>, f32)>,
        /// Sequences that are never completed.
        bad_words_ids: Vec<Vec<TokenId>>,
        /// Tokens that are never chosen.
        #[serde(deserialize_with = "tokens")]
        suppress_tokens: Vec<TokenId>,
        /// Tokens that are not chosen at the first step.
        #[serde(deserialize_with = "tokens")]
        begin_suppress_tokens: Vec<TokenId>,
        /// Minimum length of a row, including prompt and padding, before it may end. Overridden by
        /// `min_new_tokens`.
        min_length: usize,
        /// Minimum number of new tokens before a row may end. Stop strings, time and criteria can still end
        /// it.
        min_new_tokens: usize,
        /// The token that follows a prompt of one token.
        #[serde(deserialize_with = "token")]
        forced_bos_token_id: TokenId,
        /// Forces the last possible token to be one of these.
        #[serde(deserialize_with = "tokens")]
        forced_eos_token_id: Vec<TokenId>,
        /// After this many new tokens, raises the scores of tokens that end a row, more with each step: by
        /// `factor ^ steps - 1` times their magnitude.
        exponential_decay_length_penalty: (usize, f32),
        /// Replaces NaN scores by 0, and infinite ones by the largest finite numbers.
        remove_invalid_values: bool,
        /// Embeds a watermark in the generated text, which [`watermark`](crate::watermark) detects.
        watermarking_config: WatermarkingConfig,
        /// Whether scores that are kept (`keep_scores`) are log-probabilities.
        renormalize_logits: bool,
        /// Number of beams: sequences of each prompt that are followed at once, of which the likeliest are
        /// returned. 1 is no beam search.
        num_beams: usize,
        /// Number of groups into which the beams are divided. Each group avoids the tokens of the groups
        /// before it.
        num_beam_groups: usize,
        /// Penalty of a token for each beam of an earlier group that chose it in the same step.
        diversity_penalty: f32,
        /// Exponent of the length by which the log-probability of a beam is divided: above 0 favors long
        /// beams.
        length_penalty: f32,
        /// The end of a beam search: true, false or `"never"`.
        early_stopping: EarlyStopping,
        /// Words that every beam must contain, in any order: lists of tokens, or lists of such lists, one of
        /// which must occur.
        force_words_ids: Vec<ForceWord>,
        /// Classifier-free guidance, which favors tokens that are likelier after the prompt than after a
        /// negative prompt: log-probabilities are moved away from those after the negative prompt by this
        /// factor. 1 is off, 0 continues the negative prompt.
        guidance_scale: f32,
        /// Contrastive search: among the `top_k` likeliest tokens, takes one that is unlike the text before
        /// it, with this weight. 0 is off, at 1 nothing else counts.
        penalty_alpha: f32,
        /// Contrasts the last layer with an earlier one (DoLa): `"low"`, `"high"` or a list of layers.
        dola_layers: DolaLayers,
        /// Prompt lookup: drafts up to this many tokens that followed the same tokens earlier.
        prompt_lookup_num_tokens: usize,
        /// Prompt lookup: maximum number of tokens at the end of a row that are searched for. Default: 2.
        max_matching_ngram_size: usize,
        /// Maximum number of tokens that a draft model drafts at once. Default: 20.
        num_assistant_tokens: usize,
        /// Schedule of that number: `"constant"`, `"heuristic"` or `"heuristic_transient"`.
        num_assistant_tokens_schedule: Schedule,
        /// Minimum probability of a drafted token for the draft model to continue after it. Default: 0.4.
        assistant_confidence_threshold: f32,
        /// For a draft model with another tokenizer: number of its tokens before a draft that are decoded
        /// together with it. Default: 10.
        assistant_lookbehind: usize,
        /// For a draft model with another tokenizer: number of tokens in the row that are decoded together
        /// with new ones. Default: 10.
        target_lookbehind: usize,
        /// Number of sequences that are returned for each prompt.
        num_return_sequences: usize,
        /// Tokens that end a row. An empty list stands for none, and overrides the folder's.
        #[serde(deserialize_with = "tokens")]
        eos_token_id: Vec<TokenId>,
        #[serde(deserialize_with = "token")]
        pad_token_id: TokenId,
        #[serde(deserialize_with = "token")]
        bos_token_id: TokenId,
        #[serde(deserialize_with = "strings")]
        stop_strings: Vec<String>,
        /// Seed of the sampler. Kiln's own: transformers uses torch's global one.
        seed: u64,
        use_cache: bool,
        /// Kept for the caller, who chooses the cache; this crate ignores it.
        cache_implementation: String,
        /// See `cache_implementation`.
        cache_config: Value,
    }
}

impl GenerationConfig {
    /// Creates a config without settings: everything is as in the model's folder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads `generation_config.json`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, is not a JSON object, or has a value of the wrong type.
    pub fn from_file(path: &Path) -> Result<Option<Self>> {
        kiln_core::files::try_read_text(path)?.map(|text| Self::from_text(path, &text)).transpose()
    }

    /// Parses the text of a `generation_config.json`, which came from `path`.
    ///
    /// # Errors
    /// [`Error::File`] if it is not a JSON object, or has a value of the wrong type.
    pub fn from_text(path: &Path, text: &str) -> Result<Self> {
        let error = |why: String| Error::File { path: path.to_owned(), why };
        let map = serde_json::from_str(text).map_err(|e| error(format!("is not a JSON object: {e}")))?;
        Self::read(&map).map_err(error)
    }

    /// Reads the generation settings in a model's `config.json`, which came from `path`: they were there
    /// before they had their own file.
    ///
    /// # Errors
    /// [`Error::File`] for a value of the wrong type.
    pub fn from_model_config(path: &Path, config: &Value) -> Result<Self> {
        // transformers does not take the first from there, either, and the second is for training. The last
        // one does not change the text.
        const PASSED_OVER: [&str; 3] = ["forced_decoder_ids", "seed", "use_cache"];
        let mut settings = config.as_object().cloned().unwrap_or_default();
        settings.retain(|name, _| !PASSED_OVER.contains(&&**name));
        Self::read(&settings).map_err(|why| Error::File { path: path.to_owned(), why })
    }

    /// Reads keyword arguments of `generate()`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a value of the wrong type, and for a setting that would be
    /// [`not_applied`](Self::not_applied).
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

    /// Reads a map. Errors name the key with the wrong value, which those of serde do not.
    fn read(map: &Map<String, Value>) -> Result<Self, String> {
        serde_path_to_error::deserialize(map).map_err(|e| format!("`{}`: {}", e.path(), e.inner()))
    }

    /// Whether a setting is given that only affects sampling.
    pub fn shapes_sampling(&self) -> bool {
        let given = [self.temperature, self.top_h, self.top_p, self.min_p, self.typical_p];
        let cutoffs = [self.epsilon_cutoff, self.eta_cutoff];
        // Without sampling, this and `top_k` select contrastive search.
        let contrasts = self.penalty_alpha.is_some_and(|alpha| alpha > 0.0);
        self.top_k.is_some() && !contrasts || given.iter().chain(&cutoffs).any(Option::is_some)
    }

    /// Fills in missing settings from `defaults`.
    ///
    /// The length is one setting with two names: giving either one overrides both. (In transformers, a
    /// folder's `max_new_tokens` overrides the caller's `max_length`.)
    pub fn merged_over(self, defaults: &Self) -> Self {
        let mut defaults = defaults.clone();
        if self.max_new_tokens.is_some() || self.max_length.is_some() {
            (defaults.max_new_tokens, defaults.max_length) = (None, None);
        }
        self.or(defaults)
    }

    /// Replaces settings by those of `overrides` that are given.
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

/// Reads a token. Negative ids are how old checkpoints write "none".
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
