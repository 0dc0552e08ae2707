//! What a folder or a caller asks for: transformers' `GenerationConfig`, as far as it is acted on.

mod not_applied;

use std::{collections::BTreeMap, path::Path};

use kiln_core::{Error, Result, files, model::TokenId};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value};

/// A `max_new_tokens` that sets no limit: the text goes on until it ends, or the model's positions do.
pub const UNTIL_IT_ENDS: usize = usize::MAX;

/// Settings of a generation, each of which may be absent: `generation_config.json`, or the arguments of a call.
///
/// Settings of transformers that change tokens and are not applied here are kept, so that [`not_applied`] can name them.
/// [`resolve`] checks the values and fills in the rest.
///
/// [`not_applied`]: GenerationConfig::not_applied
/// [`resolve`]: GenerationConfig::resolve
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens to generate; wins over `max_length`. [`UNTIL_IT_ENDS`] sets no limit.
    pub max_new_tokens: Option<usize>,
    /// Tokens of a row, its prompt and padding included.
    pub max_length: Option<usize>,
    pub do_sample: Option<bool>,
    /// 0 means the likeliest token, always.
    pub temperature: Option<f32>,
    /// 0 means all.
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Tokens that end a row. A list that is empty asks for none, and overrides the folder's.
    pub eos_token_id: Option<Vec<TokenId>>,
    pub pad_token_id: Option<TokenId>,
    pub bos_token_id: Option<TokenId>,
    pub stop_strings: Option<Vec<String>>,
    /// Of the sampler. Ours: transformers takes torch's global one.
    pub seed: Option<u64>,
    pub use_cache: Option<bool>,
    /// Kept for whoever chooses the cache; nothing in this crate acts on it.
    pub cache_implementation: Option<String>,
    /// See `cache_implementation`.
    pub cache_config: Option<Value>,
    /// Settings of transformers that change tokens and are not applied here, by name.
    pub others: BTreeMap<&'static str, Value>,
}

impl GenerationConfig {
    /// Reads `generation_config.json`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be read, is no JSON object, or has a value of the wrong type.
    pub fn from_file(path: &Path) -> Result<Option<Self>> {
        let error = |why: String| Error::File { path: path.to_owned(), why };
        let Some(text) = files::try_read_text(path)? else { return Ok(None) };
        let map: Map<String, Value> =
            serde_json::from_str(&text).map_err(|e| error(format!("is not a JSON object: {e}")))?;
        read(&map).map(Some).map_err(|(key, why)| error(format!("`{key}`: {why}")))
    }

    /// Reads keyword arguments of `generate()`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a value of the wrong type.
    pub fn from_arguments(arguments: &Map<String, Value>) -> Result<Self> {
        read(arguments).map_err(|(name, why)| Error::Setting { name, why })
    }

    /// These wishes, completed by `defaults` where they are silent.
    ///
    /// The length is one wish with two spellings: who gives either overrides both. (transformers lets a folder's
    /// `max_new_tokens` win over the caller's `max_length`.)
    pub fn merged_over(self, defaults: &Self) -> Self {
        let defaults = defaults.clone();
        let length = match (self.max_new_tokens, self.max_length) {
            (None, None) => (defaults.max_new_tokens, defaults.max_length),
            given => given,
        };
        Self {
            max_new_tokens: length.0,
            max_length: length.1,
            do_sample: self.do_sample.or(defaults.do_sample),
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            eos_token_id: self.eos_token_id.or(defaults.eos_token_id),
            pad_token_id: self.pad_token_id.or(defaults.pad_token_id),
            bos_token_id: self.bos_token_id.or(defaults.bos_token_id),
            stop_strings: self.stop_strings.or(defaults.stop_strings),
            seed: self.seed.or(defaults.seed),
            use_cache: self.use_cache.or(defaults.use_cache),
            cache_implementation: self.cache_implementation.or(defaults.cache_implementation),
            cache_config: self.cache_config.or(defaults.cache_config),
            others: defaults.others.into_iter().chain(self.others).collect(),
        }
    }

    /// These wishes, with those of `overrides` instead where it has any.
    pub fn merged_with(&self, overrides: Self) -> Self {
        overrides.merged_over(self)
    }
}

impl<'de> Deserialize<'de> for GenerationConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map = Map::deserialize(deserializer)?;
        read(&map).map_err(|(key, why)| serde::de::Error::custom(format!("`{key}`: {why}")))
    }
}

/// Reads key by key, so that a wrong value is reported with its key.
fn read(map: &Map<String, Value>) -> Result<GenerationConfig, WrongValue> {
    Ok(GenerationConfig {
        max_new_tokens: value(map, "max_new_tokens")?,
        max_length: value(map, "max_length")?,
        do_sample: value(map, "do_sample")?,
        temperature: value(map, "temperature")?,
        top_k: value(map, "top_k")?,
        top_p: value(map, "top_p")?,
        min_p: value(map, "min_p")?,
        repetition_penalty: value(map, "repetition_penalty")?,
        eos_token_id: value::<OneOrMany<i64>>(map, "eos_token_id")?
            .map(|ids| {
                ids.into_vec().into_iter().filter_map(|id| token("eos_token_id", id).transpose()).collect()
            })
            .transpose()?,
        pad_token_id: one_token(map, "pad_token_id")?,
        bos_token_id: one_token(map, "bos_token_id")?,
        stop_strings: value::<OneOrMany<String>>(map, "stop_strings")?.map(OneOrMany::into_vec),
        seed: value(map, "seed")?,
        use_cache: value(map, "use_cache")?,
        cache_implementation: value(map, "cache_implementation")?,
        cache_config: value(map, "cache_config")?,
        others: not_applied::named_in(map),
    })
}

/// A key, and what is wrong with its value.
type WrongValue = (&'static str, String);

/// The value of `key`. Python's None is how transformers writes what was not asked for.
fn value<T: DeserializeOwned>(map: &Map<String, Value>, key: &'static str) -> Result<Option<T>, WrongValue> {
    map.get(key).map_or(Ok(None), |value| Option::deserialize(value).map_err(|e| (key, e.to_string())))
}

fn one_token(map: &Map<String, Value>, key: &'static str) -> Result<Option<TokenId>, WrongValue> {
    value(map, key)?.map_or(Ok(None), |id| token(key, id))
}

/// Negative ids are how old checkpoints write "none".
fn token(key: &'static str, id: i64) -> Result<Option<TokenId>, WrongValue> {
    match id {
        ..0 => Ok(None),
        id => TokenId::try_from(id).map(Some).map_err(|_| (key, format!("{id} is larger than any token id"))),
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
