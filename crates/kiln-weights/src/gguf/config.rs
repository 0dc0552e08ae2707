//! The config of a model in the metadata of a GGUF file, converted to the `config.json` of a Hugging Face
//! folder.
//!
//! Keys: `docs/gguf.md` of ggml. Their meaning for each architecture: `conversion/*.py` of llama.cpp, which
//! writes them from a `config.json`, and `src/models/*.cpp`, which reads them. Missing keys have the defaults
//! of llama.cpp.

mod architectures;
mod hybrids;
mod rope;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value};

use self::architectures::ARCHITECTURES;
pub use self::rope::FACTORS;
use super::{Metadata, shown};
use crate::Error;

/// Upper limit for the number of blocks.
const MOST_LAYERS: u64 = 4096;

/// The tensors of a file, for the questions that a config has about them.
pub trait Tensors {
    /// Returns the shape of tensor `name`, rows first; `None` if there is no such tensor.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Returns the numbers of tensor `name`, which is a short vector.
    ///
    /// # Errors
    /// Returns an error if there is no such tensor, or if it cannot be read.
    fn numbers(&mut self, name: &str) -> Result<Vec<f32>, Error>;
}

/// Returns the `config.json` of the model in a file, including its `model_type`.
///
/// # Errors
/// An unknown architecture, a key that is missing or impossible, and settings that a `config.json` of the
/// architecture cannot express.
pub fn config_json(metadata: &Metadata, tensors: &mut dyn Tensors) -> Result<Value, Error> {
    const KEY: &str = "general.architecture";
    let wrong = |why: String| Error::Metadata { key: KEY.to_owned(), why };
    let name = metadata.text(KEY)?.ok_or_else(|| wrong("is missing".to_owned()))?;
    let Some((architecture, config)) = ARCHITECTURES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<_> = ARCHITECTURES.iter().map(|(known, _)| *known).collect();
        return Err(wrong(format!(
            "is {}, which is not supported; known: {}",
            shown(name),
            known.join(", ")
        )));
    };
    config(&mut File { metadata, architecture, tensors }).map(Value::from)
}

/// The fields of a `config.json`.
type Fields = Map<String, Value>;

/// A file whose config is being read.
struct File<'a> {
    metadata: &'a Metadata,
    architecture: &'static str,
    tensors: &'a mut dyn Tensors,
}

impl File<'_> {
    /// Prefixes `key` with the architecture.
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn wrong(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Metadata { key: self.key(key), why: why.into() }
    }

    fn missing(&self, key: &str) -> Error {
        self.wrong(key, "is missing")
    }

    fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        self.metadata.unsigned(&self.key(key))
    }

    fn needed(&self, key: &str) -> Result<u64, Error> {
        self.unsigned(key)?.ok_or_else(|| self.missing(key))
    }

    /// Returns a finite number, because JSON has no others.
    fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.metadata.number(&self.key(key))? {
            Some(number) if !number.is_finite() => {
                Err(self.wrong(key, format!("is {number}, must be finite")))
            }
            number => Ok(number),
        }
    }

    fn layers(&self) -> Result<u64, Error> {
        match self.needed("block_count")? {
            layers @ 1..=MOST_LAYERS => Ok(layers),
            layers => {
                Err(self.wrong("block_count", format!("is {layers}, must be between 1 and {MOST_LAYERS}")))
            }
        }
    }

    /// Returns a number per block: files have one for all blocks, or a list.
    fn of_layers(&self, key: &str) -> Result<Option<Vec<u64>>, Error> {
        let layers = self.layers()? as usize;
        let is_list = self.metadata.get(&self.key(key)).is_some_and(|value| value.as_array().is_some());
        if !is_list {
            return Ok(self.unsigned(key)?.map(|number| vec![number; layers]));
        }
        let mut list = self.metadata.integers(&self.key(key))?.unwrap_or_default();
        if list.len() < layers {
            return Err(self.wrong(key, format!("has {} entries for {layers} blocks", list.len())));
        }
        list.truncate(layers);
        Ok(Some(list))
    }

    /// Returns a number that must be equal in all blocks.
    fn uniform(&self, key: &str) -> Result<Option<u64>, Error> {
        let Some(list) = self.of_layers(key)? else { return Ok(None) };
        match list.iter().all(|number| list.first() == Some(number)) {
            true => Ok(list.first().copied()),
            false => {
                Err(self.wrong(key, "differs between blocks, which is not supported for this architecture"))
            }
        }
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.shape(tensor).is_some()
    }

    /// Returns, for each block, whether it has the tensor `part`.
    fn blocks_with(&self, part: &str) -> Result<Vec<bool>, Error> {
        Ok((0..self.layers()?).map(|i| self.has(&format!("blk.{i}.{part}"))).collect())
    }

    /// Returns the fields that all models have. The vocabulary size is that of the embeddings, which may have
    /// more rows than there are tokens.
    fn model(&self, model_type: &str) -> Result<Fields, Error> {
        const EMBEDDINGS: &str = "token_embd.weight";
        match (self.is_causal()?, model_type) {
            (true, "bert") => {
                return Err(self.wrong("attention.causal", "is not false, and BERT is an encoder here"));
            }
            (false, "bert") | (true, _) => {}
            (false, _) => {
                let why = "is false, and models of this architecture see no later tokens here";
                return Err(self.wrong("attention.causal", why));
            }
        }
        let vocab = self.tensors.shape(EMBEDDINGS).and_then(|shape| shape.first().copied());
        let vocab = vocab.ok_or_else(|| Error::Damaged(format!("the tensor `{EMBEDDINGS}` is missing")))?;
        Ok(fields([
            ("model_type", model_type.into()),
            ("num_hidden_layers", self.layers()?.into()),
            ("hidden_size", self.needed("embedding_length")?.into()),
            ("vocab_size", vocab.into()),
            // An untied head is always a tensor.
            ("tie_word_embeddings", (!self.has("output.weight")).into()),
        ]))
    }

    /// Whether tokens see only those before them.
    fn is_causal(&self) -> Result<bool, Error> {
        Ok(self.metadata.boolean(&self.key("attention.causal"))?.unwrap_or(true))
    }

    fn eps(&self) -> Result<f64, Error> {
        const KEY: &str = "attention.layer_norm_rms_epsilon";
        self.number(KEY)?.ok_or_else(|| self.missing(KEY))
    }

    /// Returns the fields of models with attention and feed-forwards.
    fn decoder(&self, model_type: &str) -> Result<Fields, Error> {
        let mut config = self.any_decoder(model_type)?;
        config.insert("rms_norm_eps".to_owned(), self.eps()?.into());
        Ok(config)
    }

    /// Returns the fields of [`decoder`](Self::decoder) with LayerNorms. `eps` is the name of their epsilon.
    fn layer_normed(&self, model_type: &str, eps: &str) -> Result<Fields, Error> {
        const KEY: &str = "attention.layer_norm_epsilon";
        let mut config = self.any_decoder(model_type)?;
        config.insert(eps.to_owned(), self.number(KEY)?.ok_or_else(|| self.missing(KEY))?.into());
        Ok(config)
    }

    /// Returns the fields of [`decoder`](Self::decoder) without the epsilon of norms.
    fn any_decoder(&self, model_type: &str) -> Result<Fields, Error> {
        let heads =
            self.uniform("attention.head_count")?.ok_or_else(|| self.missing("attention.head_count"))?;
        let mut config = self.model(model_type)?;
        config.extend(fields([("num_attention_heads", heads.into()), ("head_dim", self.head_dim()?.into())]));
        let sizes = [
            ("num_key_value_heads", self.uniform("attention.head_count_kv")?.or(Some(heads))),
            ("intermediate_size", self.uniform("feed_forward_length")?),
            ("max_position_embeddings", self.unsigned("context_length")?),
        ];
        config.extend(sizes.into_iter().filter_map(|(name, size)| Some((name.to_owned(), size?.into()))));
        Ok(config)
    }

    fn head_dim(&self) -> Result<u64, Error> {
        let (keys, values) = ("attention.key_length", "attention.value_length");
        let default = || {
            let (hidden, heads) = (self.needed("embedding_length")?, self.uniform("attention.head_count")?);
            let size = heads.and_then(|heads| {
                hidden.checked_div(heads).filter(|size| size.checked_mul(heads) == Some(hidden))
            });
            size.ok_or_else(|| self.missing(keys))
        };
        let size = self.unsigned(keys)?.map_or_else(default, Ok)?;
        match self.unsigned(values)? {
            Some(other) if other != size => Err(self.wrong(
                values,
                format!(
                    "is {other}, and keys have {size}; heads whose values have another size are not supported"
                ),
            )),
            _ => Ok(size),
        }
    }

    /// Returns the window of blocks that have one; 0 in the file stands for none.
    fn window(&self) -> Result<Option<u64>, Error> {
        Ok(self.unsigned("attention.sliding_window")?.filter(|window| *window > 0))
    }
}

fn fields<const N: usize>(fields: [(&str, Value); N]) -> Fields {
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
