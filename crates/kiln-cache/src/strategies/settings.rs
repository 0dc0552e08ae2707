//! Settings of a strategy as text: `key=value,key=value`.

use kiln_core::{Error, Result};
use serde::{
    Deserializer, Serialize,
    de::{
        self, DeserializeOwned, Expected, IntoDeserializer, Unexpected, Visitor,
        value::{MapDeserializer, StrDeserializer},
    },
    forward_to_deserialize_any,
};
use serde_json::Value;

use super::KvStrategy;

/// Parses the settings of `strategy`. Missing settings have their defaults.
///
/// # Errors
/// [`Error::Unknown`] for an unknown key; [`Error::Setting`] for text of another form, a key that occurs
/// twice, a value of another type, and any key if the strategy has no settings.
pub(crate) fn read<S: DeserializeOwned>(strategy: &KvStrategy, text: &str) -> Result<S> {
    let mut pairs: Vec<(&str, Text<'_>)> = Vec::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let Some((key, value)) = pair.split_once('=') else {
            return Err(strategy.wrong(format!("`{pair}` is not of the form key=value")));
        };
        let (key, value) = (key.trim(), value.trim());
        if pairs.iter().any(|(given, _)| *given == key) {
            return Err(strategy.wrong(format!("`{key}` is given twice")));
        }
        pairs.push((key, Text { key, value }));
    }
    S::deserialize(MapDeserializer::new(pairs.into_iter())).map_err(|error| match error {
        Wrong::Key { key, known: [] } => {
            strategy.wrong(format!("has no settings, so `{key}` does not apply"))
        }
        Wrong::Key { key, known } => Error::Unknown {
            what: "cache setting",
            name: format!("{}:{key}", strategy.name),
            known: known.iter().map(|&known| known.to_owned()).collect(),
        },
        Wrong::Value(why) => strategy.wrong(why),
    })
}

/// Writes the settings that differ from their defaults as text that [`read`] parses, in the order of the
/// help.
pub(crate) fn write<S: Serialize + Default>(strategy: &KvStrategy, settings: &S) -> String {
    let (given, default) = (json(settings), json(&S::default()));
    let keys = strategy.settings.iter().map(|(key, _)| *key);
    let pairs =
        keys.filter(|key| given[key] != default[key]).map(|key| format!("{key}={}", word(&given[key])));
    pairs.collect::<Vec<_>>().join(",")
}

/// Formats the value of a setting, a number or a word, as text.
pub(crate) fn word(value: &impl Serialize) -> String {
    match json(value) {
        Value::String(word) => word,
        number => number.to_string(),
    }
}

/// Converts to JSON. Numbers and words always serialize.
fn json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

/// Checks that a number of tokens or elements is from 1 to a limit that no cache reaches.
///
/// # Errors
/// The reason, for an error message.
pub(crate) fn check_count(key: &str, count: usize) -> Result<(), String> {
    /// Far above any cache, far below overflow.
    const LARGEST: usize = 1 << if usize::BITS > 32 { 32 } else { 28 };

    match count {
        1..=LARGEST => Ok(()),
        0 => Err(format!("`{key}` is 0, must be at least 1")),
        _ => Err(format!("`{key}` is {count}, must be at most {LARGEST}")),
    }
}

/// The reason for which a text is not a valid list of settings.
#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("`{key}` is unknown")]
    Key { key: String, known: &'static [&'static str] },
    #[error("{0}")]
    Value(String),
}

impl de::Error for Wrong {
    fn custom<T: std::fmt::Display>(why: T) -> Self {
        Self::Value(why.to_string())
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::Value(format!("is not {expected}"))
    }

    fn unknown_variant(_: &str, known: &'static [&'static str]) -> Self {
        Self::Value(format!("is unknown; known: {}", known.join(", ")))
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::Key { key: key.to_owned(), known }
    }

    fn duplicate_field(key: &'static str) -> Self {
        Self::Value(format!("`{key}` is given by two of its names; give one of them"))
    }
}

/// The value of a setting as text. Deserializes as the type that the field of the settings has: an integer,
/// an enum, or a string.
#[derive(Clone, Copy, Debug)]
struct Text<'a> {
    key: &'a str,
    value: &'a str,
}

impl Text<'_> {
    fn wrong(self, why: impl std::fmt::Display) -> Wrong {
        Wrong::Value(format!("`{}={}` {why}", self.key, self.value))
    }
}

impl<'de> IntoDeserializer<'de, Wrong> for Text<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Text<'de> {
    type Error = Wrong;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_str(self.value).map_err(|why: Wrong| self.wrong(why))
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_u64(self.value.parse().map_err(|_| self.wrong("is not a whole number"))?)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_i64(self.value.parse().map_err(|_| self.wrong("is not a whole number"))?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Wrong> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Wrong> {
        let word: StrDeserializer<'_, Wrong> = self.value.into_deserializer();
        visitor.visit_enum(word).map_err(|why: Wrong| self.wrong(why))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i128 u8 u16 u32 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct seq
        tuple tuple_struct map struct identifier ignored_any
    }
}
