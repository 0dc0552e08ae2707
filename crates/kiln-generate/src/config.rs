//! What a folder or a caller asks for: transformers' `GenerationConfig`, as far as it is acted on.

mod not_applied;

use std::{collections::BTreeMap, path::Path};

use kiln_core::{Error, Result, files, model::TokenId};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value};

/// A `max_new_tokens` that sets no limit: the text goes on until it ends, or the model's positions do.
pub const UNTIL_IT_ENDS: usize = usize::MAX;

/// Each setting is written once: its name, its type, and the function that reads it from JSON.
macro_rules! settings {
    ($(#[$about:meta])* pub struct GenerationConfig { $($(#[$doc:meta])* $name:ident: $type:ty = $read:expr,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct GenerationConfig {
            $($(#[$doc])* pub $name: Option<$type>,)*
            /// Settings of transformers that change tokens and are not applied here, by name.
            pub others: BTreeMap<&'static str, Value>,
        }

        impl GenerationConfig {
            /// Reads key by key, so that a wrong value is reported with its key.
            fn read(map: &Map<String, Value>) -> Result<Self, WrongValue> {
                Ok(Self {
                    $($name: read(map, stringify!($name), $read)?,)*
                    others: not_applied::named_in(map),
                })
            }

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

settings! {
    /// Settings of a generation, each of which may be absent: `generation_config.json`, or the arguments of a call.
    ///
    /// Settings of transformers that change tokens and are not applied here are kept, so that [`not_applied`] can name them.
    /// [`resolve`] checks the values and fills in the rest.
    ///
    /// [`not_applied`]: GenerationConfig::not_applied
    /// [`resolve`]: GenerationConfig::resolve
    pub struct GenerationConfig {
        /// Tokens to generate; wins over `max_length`. [`UNTIL_IT_ENDS`] sets no limit.
        max_new_tokens: usize = given,
        /// Tokens of a row, its prompt and padding included.
        max_length: usize = given,
        do_sample: bool = given,
        /// 0 means the likeliest token, always.
        temperature: f32 = given,
        /// 0 means all.
        top_k: usize = given,
        top_p: f32 = given,
        min_p: f32 = given,
        repetition_penalty: f32 = given,
        /// Tokens that end a row. A list that is empty asks for none, and overrides the folder's.
        eos_token_id: Vec<TokenId> = tokens,
        pad_token_id: TokenId = token,
        bos_token_id: TokenId = token,
        stop_strings: Vec<String> = strings,
        /// Of the sampler. Ours: transformers takes torch's global one.
        seed: u64 = given,
        use_cache: bool = given,
        /// Kept for whoever chooses the cache; nothing in this crate acts on it.
        cache_implementation: String = given,
        /// See `cache_implementation`.
        cache_config: Value = given,
    }
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
        Self::read(&map).map(Some).map_err(|(key, why)| error(format!("`{key}`: {why}")))
    }

    /// Reads keyword arguments of `generate()`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a value of the wrong type.
    pub fn from_arguments(arguments: &Map<String, Value>) -> Result<Self> {
        Self::read(arguments).map_err(|(name, why)| Error::Setting { name, why })
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

impl<'de> Deserialize<'de> for GenerationConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map = Map::deserialize(deserializer)?;
        Self::read(&map).map_err(|(key, why)| serde::de::Error::custom(format!("`{key}`: {why}")))
    }
}

/// A key, and what is wrong with its value.
type WrongValue = (&'static str, String);

fn read<T>(
    map: &Map<String, Value>,
    key: &'static str,
    read: impl FnOnce(&Value) -> Result<Option<T>, String>,
) -> Result<Option<T>, WrongValue> {
    map.get(key).map_or(Ok(None), read).map_err(|why| (key, why))
}

/// Python's None is how transformers writes what was not asked for.
fn given<T: DeserializeOwned>(json: &Value) -> Result<Option<T>, String> {
    Option::deserialize(json).map_err(|e| e.to_string())
}

fn token(json: &Value) -> Result<Option<TokenId>, String> {
    given(json)?.map_or(Ok(None), token_id)
}

fn tokens(json: &Value) -> Result<Option<Vec<TokenId>>, String> {
    let ids = given::<OneOrMany<i64>>(json)?.map(OneOrMany::into_vec);
    ids.map(|ids| ids.into_iter().filter_map(|id| token_id(id).transpose()).collect()).transpose()
}

fn strings(json: &Value) -> Result<Option<Vec<String>>, String> {
    Ok(given::<OneOrMany<String>>(json)?.map(OneOrMany::into_vec))
}

/// Negative ids are how old checkpoints write "none".
fn token_id(id: i64) -> Result<Option<TokenId>, String> {
    match id {
        ..0 => Ok(None),
        id => TokenId::try_from(id).map(Some).map_err(|_| format!("{id} is larger than any token id")),
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
