//! What a folder or a caller asks for: transformers' `GenerationConfig`, as far as it is acted on.

mod not_applied;

use std::{collections::BTreeMap, path::Path};

use kiln_core::{Error, Result, files, model::TokenId};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// A `max_new_tokens` that sets no limit: the text goes on until it ends, or the model's positions do.
pub const UNTIL_IT_ENDS: usize = usize::MAX;

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
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, expecting = "a JSON object")]
#[non_exhaustive]
pub struct GenerationConfig {
    /// Tokens to generate; wins over `max_length`. [`UNTIL_IT_ENDS`] sets no limit.
    pub max_new_tokens: Option<usize>,
    /// Tokens of a row, its prompt and padding included.
    pub max_length: Option<usize>,
    /// Whether tokens are drawn. If not, each is the likeliest.
    pub do_sample: Option<bool>,
    /// 0 means the likeliest token, always.
    pub temperature: Option<f32>,
    /// 0 means all.
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// Tokens that end a row. A list that is empty asks for none, and overrides the folder's.
    #[serde(deserialize_with = "tokens")]
    pub eos_token_id: Option<Vec<TokenId>>,
    #[serde(deserialize_with = "token")]
    pub pad_token_id: Option<TokenId>,
    #[serde(deserialize_with = "token")]
    pub bos_token_id: Option<TokenId>,
    #[serde(deserialize_with = "strings")]
    pub stop_strings: Option<Vec<String>>,
    /// Of the sampler. Ours: transformers takes torch's global one.
    pub seed: Option<u64>,
    pub use_cache: Option<bool>,
    /// Kept for whoever chooses the cache; nothing in this crate acts on it.
    pub cache_implementation: Option<String>,
    /// See `cache_implementation`.
    pub cache_config: Option<Value>,
    /// Settings of transformers that change tokens and are not applied here, by name.
    #[serde(flatten, deserialize_with = "not_applied::named_in")]
    pub others: BTreeMap<String, Value>,
}

macro_rules! settings {
    ($($name:ident: $type:ty,)*) => {
        kiln_core::setters!(GenerationConfig { $($name: $type,)* });

        impl GenerationConfig {
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
    max_new_tokens: usize,
    max_length: usize,
    do_sample: bool,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    eos_token_id: Vec<TokenId>,
    pad_token_id: TokenId,
    bos_token_id: TokenId,
    stop_strings: Vec<String>,
    seed: u64,
    use_cache: bool,
    cache_implementation: String,
    cache_config: Value,
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
        let error = |why: String| Error::File { path: path.to_owned(), why };
        let Some(text) = files::try_read_text(path)? else { return Ok(None) };
        let map = serde_json::from_str(&text).map_err(|e| error(format!("is not a JSON object: {e}")))?;
        Self::read(&map).map(Some).map_err(error)
    }

    /// Reads keyword arguments of `generate()`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a value of the wrong type.
    pub fn from_arguments(arguments: &Map<String, Value>) -> Result<Self> {
        Self::read(arguments).map_err(|why| Error::Setting { name: "generation_config", why })
    }

    /// Says which key has a wrong value, which serde alone does not.
    fn read(map: &Map<String, Value>) -> Result<Self, String> {
        serde_path_to_error::deserialize(map).map_err(|e| format!("`{}`: {}", e.path(), e.inner()))
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
