//! `config.json`, parsed defensively: it comes from an untrusted source.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use kiln_core::{
    Error, Result,
    source::{self, Source},
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{
    checkpoint::{
        foreign::{no_config, no_model},
        gguf::GgufFiles,
        model_files::ModelFiles,
    },
    multimodal,
    nn::experts::COPIED_AT_ONCE,
};

/// Upper limit for the size of a config, in bytes; a real config is a page of text.
const LARGEST_CONFIG: u64 = 16 << 20;

/// Sizes that every decoder has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocab: usize,
    /// Longest sequence the model was made for, in tokens.
    pub positions: usize,
    /// Whether the head shares the matrix of the embedding.
    pub tied: bool,
    /// Channels of state-space mixers; 0 if there are none.
    pub state_channels: usize,
    /// Sizes of the mixtures of experts, if there are any.
    pub experts: Option<ExpertSizes>,
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertSizes {
    pub experts: usize,
    /// Number of experts per token.
    pub chosen: usize,
    /// Width of each expert.
    pub intermediate: usize,
    /// Numbers of the vectors that an expert sees.
    pub inputs: usize,
    /// Number of matrices of an expert: 3 with a gate, 2 without.
    pub matrices: usize,
    /// Width of the expert that all tokens share; 0 if there is none.
    pub shared: usize,
    /// Number of blocks whose feed-forward is a mixture.
    pub blocks: usize,
}

impl Sizes {
    /// Value of [`positions`](Self::positions) for a model that was made for sequences of any length.
    pub const ANY_LENGTH: usize = 1 << 30;

    /// Estimates the bytes that a forward pass over `tokens` tokens in each of `rows` rows takes in addition
    /// to weights and cache. `element` is the size of an element in bytes. Only the last tokens have logits.
    pub fn working_bytes(&self, rows: usize, tokens: usize, element: usize) -> usize {
        let logits = 2 * 4 * self.vocab;
        rows.saturating_mul(logits.saturating_add(tokens.saturating_mul(self.token_bytes(element))))
    }

    /// Number of weight elements in routed experts; 0 if there are none.
    pub fn expert_elements(&self) -> u64 {
        let Some(ExpertSizes { experts, intermediate, inputs, matrices, blocks, .. }) = self.experts else {
            return 0;
        };
        let sizes = [matrices, inputs, intermediate, experts, blocks];
        sizes.iter().fold(1, |product: u64, &n| product.saturating_mul(n as u64))
    }

    /// Returns the number of bytes that the device saves by keeping experts in host memory. `resident`
    /// experts per block stay on the device, and all experts together take `bytes`. `None` if there are no
    /// experts.
    pub fn offloaded_bytes(&self, resident: usize, bytes: u64) -> Option<u64> {
        let ExpertSizes { experts, blocks, .. } = self.experts?;
        let one = bytes / (experts as u64).saturating_mul(blocks as u64).max(1);
        let away = (experts.saturating_sub(resident) as u64).saturating_mul(one);
        // Some more experts are on the device, for one block at a time.
        let passing = one.max(COPIED_AT_ONCE as u64).min(away);
        Some(away.saturating_mul(blocks as u64).saturating_sub(passing))
    }

    /// Size of a token's activations in bytes. Alive at once are the residual and its norm, and the largest
    /// of: queries, keys and values before and after rotation; the activations of a state-space mixer; the
    /// three sides of the feed-forward.
    pub fn token_bytes(&self, element: usize) -> usize {
        let &Self { hidden, heads, kv_heads, head_dim, intermediate, state_channels, experts, .. } = self;
        let attention = 2 * hidden + 3 * (heads + 2 * kv_heads) * head_dim;
        // Inputs and gate, each also laid out for the kernels; convolved inputs, time steps, results.
        let state_space = 2 * hidden + 7 * state_channels;
        let mixture = experts.map_or(0, |ExpertSizes { chosen, intermediate, shared, .. }| {
            3 * hidden + chosen.saturating_mul(3 * intermediate + hidden).max(3 * shared)
        });
        attention.max(state_space).max(3 * hidden + 3 * intermediate).max(mixture).saturating_mul(element)
    }
}

/// Fields that every decoder's config has.
#[derive(Debug, Deserialize)]
struct Fields {
    num_hidden_layers: usize,
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    tie_word_embeddings: Option<bool>,
    is_causal: Option<bool>,
    use_bidirectional_attention: Option<bool>,
}

/// Values that an architecture assumes if its config has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// `None` for the number of attention heads.
    pub(crate) kv_heads: Option<usize>,
    /// `None` for the hidden size divided by the number of heads.
    pub(crate) head_dim: Option<usize>,
    pub(crate) positions: usize,
    pub(crate) eps: f64,
    pub(crate) tied: bool,
}

/// The settings that every decoder's config has.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) sizes: Sizes,
    /// Epsilon that norms add to the mean square.
    pub(crate) eps: f64,
}

impl Common {
    /// Reads the settings that every decoder's config has.
    ///
    /// # Errors
    /// A number that is missing or out of range.
    pub(crate) fn read(config: &ConfigFile, defaults: Defaults) -> Result<Self> {
        let fields: Fields = config.parse()?;
        if fields.is_causal == Some(false) || fields.use_bidirectional_attention == Some(true) {
            let why =
                "asks that tokens see later ones (`is_causal`, `use_bidirectional_attention`); none can here";
            return Err(config.error(why));
        }
        let heads = fields.num_attention_heads;
        let kv_heads = config
            .unless_null("num_key_value_heads", fields.num_key_value_heads, defaults.kv_heads)
            .unwrap_or(heads);
        let head_dim = config.unless_null("head_dim", fields.head_dim, defaults.head_dim);
        let positions = fields.max_position_embeddings.unwrap_or(defaults.positions);
        // Limits far above any model, and far below the point where the product of two overflows.
        for (name, value, largest) in [
            ("num_hidden_layers", fields.num_hidden_layers, 4096),
            ("hidden_size", fields.hidden_size, 1 << 20),
            ("num_attention_heads", heads, 1 << 14),
            ("num_key_value_heads", kv_heads, 1 << 14),
            ("head_dim", head_dim.unwrap_or(1), 1 << 14),
            ("intermediate_size", fields.intermediate_size, 1 << 24),
            ("vocab_size", fields.vocab_size, 1 << 24),
            ("max_position_embeddings", positions, 1 << 30),
        ] {
            config.check(name, value, largest)?;
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(config
                .error(&format!("{heads} attention heads cannot share {kv_heads} key-value heads evenly")));
        }
        let head_dim = match head_dim {
            Some(head_dim) => head_dim,
            None if fields.hidden_size.is_multiple_of(heads) => fields.hidden_size / heads,
            None => {
                return Err(config.error(&format!(
                    "`hidden_size` {} is not a multiple of {heads} heads, and `head_dim` is missing",
                    fields.hidden_size
                )));
            }
        };
        let eps = config.positive("rms_norm_eps", fields.rms_norm_eps.unwrap_or(defaults.eps))?;
        let sizes = Sizes {
            layers: fields.num_hidden_layers,
            hidden: fields.hidden_size,
            heads,
            kv_heads,
            head_dim,
            intermediate: fields.intermediate_size,
            vocab: fields.vocab_size,
            positions,
            tied: fields.tie_word_embeddings.unwrap_or(defaults.tied),
            state_channels: 0,
            experts: None,
        };
        Ok(Self { sizes, eps })
    }
}

/// Fields that only configs of GGUF files have, about the order of their tensors.
const OF_GGUF: [&str; 4] =
    ["absorbs_keys", "linear_gates_apart", "linear_heads_alternate", "shared_mlp_apart"];

/// The JSON of a `config.json`, with its path for messages.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    path: PathBuf,
    json: Value,
    /// `model_type` of the multimodal model that this is the text model of.
    text_of: Option<String>,
}

impl ConfigFile {
    /// Reads `config.json` in `folder`, or the config in a GGUF file.
    pub fn read(folder: &Path) -> Result<Self> {
        let files = ModelFiles::at(folder)?;
        match &files.gguf {
            Some(name) => Self::of_gguf(folder, &GgufFiles::open(&*files.source, name)?),
            None => Self::from_source(&*files.source),
        }
    }

    /// Reads a JSON file, whatever its name.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = kiln_core::files::try_read(path, LARGEST_CONFIG)?.ok_or_else(|| no_model(path))?;
        Ok(Self::new(path.to_owned(), parsed(path, &text)?))
    }

    /// Reads the `config.json` of a folder.
    ///
    /// # Errors
    /// [`Error::File`] if it is missing or damaged.
    pub fn from_source(source: &dyn Source) -> Result<Self> {
        const NAME: &str = "config.json";
        let json = read_json(source, NAME)?.ok_or_else(|| no_config(source))?;
        Ok(Self::new(source.path(NAME), json))
    }

    pub(crate) fn of_gguf(path: &Path, files: &GgufFiles) -> Result<Self> {
        Ok(Self { path: path.to_owned(), json: files.config()?, text_of: None })
    }

    /// Creates a config from JSON that was not read from a file.
    pub fn from_json(json: Value) -> Self {
        Self::new(PathBuf::from("config.json"), json)
    }

    /// Creates the config of the text model that `json` describes.
    fn new(path: PathBuf, mut json: Value) -> Self {
        if let Value::Object(fields) = &mut json {
            OF_GGUF.iter().for_each(|name| drop(fields.remove(*name)));
        }
        match multimodal::text_config(&json) {
            Some(text) => {
                let of = json.get("model_type").and_then(Value::as_str).map(str::to_owned);
                Self { path, json: renamed(text), text_of: of }
            }
            None => Self { path, json: renamed(json), text_of: None },
        }
    }

    /// Returns the `model_type` of the multimodal model that this is the text model of; `None` if the config
    /// is one of a text model.
    pub fn text_of(&self) -> Option<&str> {
        self.text_of.as_deref()
    }

    pub fn model_type(&self) -> Result<String> {
        match self.json.get("model_type").and_then(Value::as_str) {
            Some(name) => Ok(name.to_owned()),
            None => Err(self.error("`model_type` is missing")),
        }
    }

    /// The whole JSON value.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// Names of all fields that are not null.
    pub(crate) fn fields(&self) -> impl Iterator<Item = &str> {
        let fields = self.json.as_object().into_iter().flatten();
        fields.filter(|(_, value)| !value.is_null()).map(|(name, _)| name.as_str())
    }

    /// Returns the config with fields of other names, where it has them: `(name there, name here)`.
    ///
    /// # Errors
    /// [`Error::File`] for a field that it has by both names, with different values.
    pub(crate) fn with_aliases(&self, aliases: &[(&str, &str)]) -> Result<Self> {
        let mut config = self.clone();
        for (alias, name) in aliases {
            match (self.get(alias), self.get(name)) {
                (Some(one), Some(other)) if one != other => {
                    let why = format!("has `{alias}` {one} and `{name}` {other}, which are the same field");
                    return Err(self.error(&why));
                }
                (Some(value), _) => config.set(name, value.clone()),
                (None, _) => {}
            }
        }
        Ok(config)
    }

    /// Returns the config with another value of a field.
    pub(crate) fn with(&self, key: &str, value: Value) -> Self {
        let mut config = self.clone();
        config.set(key, value);
        config
    }

    /// Returns the config with this value of a field that it leaves out.
    pub(crate) fn or(&self, key: &str, value: impl Into<Value>) -> Self {
        if self.get(key).is_some() { self.clone() } else { self.with(key, value.into()) }
    }

    /// Returns the config without fields that the architecture does not know.
    pub(crate) fn without(&self, keys: &[&str]) -> Self {
        let mut config = self.clone();
        keys.iter().for_each(|key| config.set(key, Value::Null));
        config
    }

    /// Overrides a value that the weights contradict.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        if let Value::Object(fields) = &mut self.json {
            fields.insert(key.to_owned(), value);
        }
    }

    /// Returns the whole config in a form that does not depend on its formatting.
    pub(crate) fn text(&self) -> String {
        self.json.to_string()
    }

    /// Returns the value of `key`; a JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    /// Parses the fields that `T` names. Null fields are left out, so that defaults apply to them.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        let mut json = self.json.clone();
        if let Value::Object(fields) = &mut json {
            fields.retain(|_, value| !value.is_null());
        }
        // Names the field in the error, which serde alone does not.
        serde_path_to_error::deserialize(json).map_err(|e| match e.path().iter().next() {
            Some(_) => self.error(&format!("`{}`: {}", e.path(), plainly(e.inner()))),
            None => self.error(&plainly(e.inner())),
        })
    }

    /// Returns the value of a field that null turns off and that defaults to `default` if absent.
    pub(crate) fn unless_null<T>(&self, key: &str, value: Option<T>, default: Option<T>) -> Option<T> {
        match self.json.get(key) {
            Some(Value::Null) => None,
            _ => value.or(default),
        }
    }

    /// Returns which of the entries of a list, one for each of `layers` blocks, are `yes` and not `no`.
    /// Returns `None` if there is no such list.
    ///
    /// # Errors
    /// [`Error::File`] for a list with another length or with other entries.
    pub(crate) fn marks(&self, key: &str, layers: usize, [yes, no]: [&str; 2]) -> Result<Option<Vec<bool>>> {
        let Some(list) = self.get(key) else { return Ok(None) };
        let entries = list.as_array().map_or(&[][..], Vec::as_slice);
        if entries.len() != layers {
            let why = format!("`{key}` has {} entries, `num_hidden_layers` is {layers}", entries.len());
            return Err(self.error(&why));
        }
        let is_yes = |entry: &Value| match entry.as_str().map(layer_type) {
            Some(name) if name == yes => Ok(true),
            Some(name) if name == no => Ok(false),
            _ => Err(self.error(&format!("`{key}` has {entry}; known: {yes}, {no}"))),
        };
        entries.iter().map(is_yes).collect::<Result<_>>().map(Some)
    }

    /// Returns the number that `value` is. Transformers writes infinity as `{"__float__": "Infinity"}`.
    pub(crate) fn float(value: &Value) -> Option<f64> {
        match value.get(FLOAT) {
            Some(name) => name.as_str()?.parse().ok(),
            None => value.as_f64(),
        }
    }

    pub(crate) fn error(&self, why: &str) -> Error {
        Error::File { path: self.path.clone(), why: why.to_owned() }
    }

    /// Checks that `value` of field `name` is in `1..=largest`.
    pub(crate) fn check(&self, name: &str, value: usize, largest: usize) -> Result<()> {
        if value == 0 || value > largest {
            return Err(self.error(&format!("`{name}` is {value}, must be between 1 and {largest}")));
        }
        Ok(())
    }

    /// Returns `value` of field `name`, if it is positive and fits in float32.
    pub(crate) fn positive(&self, name: &str, value: f64) -> Result<f64> {
        let single = value as f32;
        match single.is_finite() && single > 0.0 {
            true => Ok(value),
            false => Err(self.error(&format!("`{name}` is {value}, must be a positive float32"))),
        }
    }

    /// Returns [`positive`](Self::positive) for a field that null turns off and that defaults to `default` if
    /// absent.
    pub(crate) fn positive_unless_null(
        &self,
        name: &str,
        value: Option<f64>,
        default: Option<f64>,
    ) -> Result<Option<f64>> {
        self.unless_null(name, value, default).map(|value| self.positive(name, value)).transpose()
    }
}

/// Returns the current name of a kind of block that older versions of Transformers call `name`.
pub(crate) fn layer_type(name: &str) -> &str {
    match name {
        "attention" => "full_attention",
        "mamba" => "linear_attention",
        _ => name,
    }
}

/// Reads fields as `model_type=llama,hidden_size=64`. A value that is not JSON is text.
impl FromStr for ConfigFile {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why| Error::Setting { name: "config", why };
        let mut fields = Map::new();
        for pair in pairs(text) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(wrong(format!("`{pair}` has no value; write it as KEY=VALUE")));
            };
            let (key, value) = (key.trim(), value.trim());
            let json = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
            if fields.insert(key.to_owned(), json).is_some() {
                return Err(wrong(format!("`{key}` is given twice; give it once")));
            }
        }
        Ok(Self::from_json(Value::Object(fields)))
    }
}

/// The parts of `text` between commas that are in no list, object or string.
fn pairs(text: &str) -> impl Iterator<Item = &str> {
    let (mut depth, mut is_string) = (0usize, false);
    text.split(move |c: char| {
        match c {
            '"' => is_string = !is_string,
            '[' | '{' if !is_string => depth += 1,
            ']' | '}' if !is_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0 && !is_string
    })
}

/// An error of serde without the names of Rust.
fn plainly(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.strip_prefix("missing field ") {
        Some(field) => format!("{field} is missing"),
        None => ["usize", "u64", "u32"]
            .iter()
            .fold(text, |text, name| text.replace(&format!("expected {name}"), "expected a whole number"))
            .replace("expected f64", "expected a number")
            .replace("invalid type: map", "invalid type: an object, infinity or NaN"),
    }
}

/// Renames `ministral` to `mistral`. Transformers uses the former for a Mistral with a window on some of its
/// blocks, and also for a Mistral with `layer_types`.
fn renamed(mut json: Value) -> Value {
    if json.get("model_type").and_then(Value::as_str) == Some("ministral") {
        json["model_type"] = "mistral".into();
    }
    json
}

/// Reads the JSON in the file `name`; `None` if there is no such file.
pub(crate) fn read_json(source: &dyn Source, name: &str) -> Result<Option<Value>> {
    let text = source::read(source, name, LARGEST_CONFIG)?;
    text.map(|text| parsed(&source.path(name), &text)).transpose()
}

fn parsed(path: &Path, text: &[u8]) -> Result<Value> {
    // Python writes numbers that JSON does not have.
    let plain = || serde_json::from_str(&with_named_floats(str::from_utf8(text).ok()?)).ok();
    serde_json::from_slice(text).or_else(|e| {
        let wrong = || Error::File { path: path.to_owned(), why: format!("is not valid JSON: {e}") };
        plain().ok_or_else(wrong)
    })
}

/// The field of the object that stands for a number that JSON does not have, in configs of Transformers 5.
const FLOAT: &str = "__float__";

/// Replaces `Infinity`, `-Infinity` and `NaN` by the objects that stand for them.
fn with_named_floats(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    // Strings are the odd parts. A quote after a backslash is within one.
    let (mut is_string, mut is_escaped) = (false, false);
    let parts = text.split_inclusive(|c: char| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && is_string && !is_escaped;
        is_string ^= ends;
        ends
    });
    for (i, part) in parts.enumerate() {
        if !i.is_multiple_of(2) {
            plain.push_str(part);
            continue;
        }
        let mut rest = part;
        while let Some(at) = rest.find(['I', 'N', '-']) {
            let (before, from) = rest.split_at(at);
            plain.push_str(before);
            match ["-Infinity", "Infinity", "NaN"].into_iter().find(|name| from.starts_with(name)) {
                Some(name) => {
                    plain.push_str(&format!("{{\"{FLOAT}\": \"{name}\"}}"));
                    rest = &from[name.len()..];
                }
                None => {
                    plain.push_str(&from[..1]);
                    rest = &from[1..];
                }
            }
        }
        plain.push_str(rest);
    }
    plain
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::json;

    use super::*;

    #[test]
    fn configs_may_have_the_numbers_of_python() {
        let text =
            br#"{"time_step_limit": [0.0, Infinity], "low": -Infinity, "name": "a \" Infinity", "n": -1}"#;
        let limit = |name: &str| json!({ "__float__": name });
        let json = json!({
            "time_step_limit": [0.0, limit("Infinity")], "low": limit("-Infinity"), "name": "a \" Infinity", "n": -1,
        });
        assert_eq!(parsed(Path::new("config.json"), text).unwrap(), json);
        assert_eq!(ConfigFile::float(&json["low"]), Some(f64::NEG_INFINITY));
        assert_eq!(ConfigFile::float(&json["n"]), Some(-1.0));
        assert!(parsed(Path::new("config.json"), b"[Infinite]").is_err());
        assert!(parsed(Path::new("config.json"), b"{").is_err());
    }
}
