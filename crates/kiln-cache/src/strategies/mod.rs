use std::fmt;

use kiln_core::{
    Error, Result,
    layer::{CrossLayer, KvLayer},
    need::AttentionNeed,
};
use kiln_kernels::Kernels;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    CacheSpec,
    memory::{Memory, WriteOnce},
};

mod dynamic;
mod none;
mod quantized;
pub(crate) mod settings;
mod sink;
mod sliding;
mod r#static;

pub(crate) use self::{dynamic::Dynamic, none::NoCache, sliding::Sliding};
pub use self::{
    quantized::{Flush, QuantizedSettings, Rotate},
    sink::SinkSettings,
    r#static::StaticSettings,
};

/// A strategy: its names, its help text, and the parser of its settings.
#[derive(Debug)]
pub struct KvStrategy {
    pub name: &'static str,
    /// Aliases, from transformers.
    pub aliases: &'static [&'static str],
    /// Aliases for the strategy with its layers in host memory, from transformers.
    pub offloaded_aliases: &'static [&'static str],
    /// One phrase of help text.
    pub summary: &'static str,
    /// Settings (`key=value`), each with its meaning.
    pub settings: &'static [(&'static str, &'static str)],
    /// Settings so small that the strategy evicts or packs within a few tokens. Tests iterate over them; each
    /// must hold at least two tokens.
    pub samples: &'static [&'static str],
    /// Default strategy for layers that have a window; `None`: this strategy.
    pub windowed: Option<fn() -> CacheSpec>,
    /// Parses `key=value,key=value`, and reports errors in it.
    pub read: fn(&str) -> Result<CacheSpec>,
}

impl KvStrategy {
    pub(crate) fn wrong(&self, why: String) -> Error {
        Error::Setting { name: "cache", why: format!("{}: {why}", self.name) }
    }
}

/// A strategy with its settings, which builds the memory of attention blocks.
pub trait KvFactory: fmt::Debug + Send + Sync {
    /// Whether the strategy stores keys and values. If not, it is fed the whole sequence at every step.
    fn remembers(&self) -> bool {
        true
    }

    /// Whether attention gets every key that the model may see.
    fn exact(&self) -> bool {
        true
    }

    /// Checks that the strategy can serve a block with this need.
    fn check(&self, _need: &AttentionNeed) -> Result<()> {
        Ok(())
    }

    /// Number of bytes for `tokens` tokens of one row in one block, with `element` bytes per element.
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize;

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>>;

    /// Checks that the strategy can hold the output of an encoder.
    ///
    /// # Errors
    /// [`Error::Setting`] if it cannot: every token sees all of the output.
    fn check_encoder(&self) -> Result<()> {
        let why = "keys of an encoder are kept by `dynamic`, or by `quantized`".to_owned();
        Err(Error::Setting { name: "cache", why })
    }

    /// Builds the memory for the output of an encoder.
    ///
    /// # Errors
    /// The errors of [`check_encoder`](Self::check_encoder).
    fn build_encoder(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn CrossLayer>> {
        self.check_encoder()?;
        Ok(Box::new(Memory::new(WriteOnce { need: need.clone() }, kernels.device())))
    }
}

/// Settings of a strategy: [`Plan::of`](crate::Plan::of) takes any.
pub trait CacheSettings: KvFactory + Default + Serialize + DeserializeOwned + 'static {
    const STRATEGY: &'static KvStrategy;

    /// Checks the settings, and reports a value that is impossible, alone or in combination. The defaults are
    /// valid.
    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A version of transformers whose rules differ from the current ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Compat {
    #[serde(rename = "4.47")]
    V4_47,
}

/// Every strategy. A new entry here makes a strategy selectable and runs the shared tests on it.
pub static STRATEGIES: &[&KvStrategy] = &[
    &dynamic::DYNAMIC, //
    &r#static::STATIC,
    &sliding::SLIDING,
    &sink::SINK,
    &quantized::QUANTIZED,
    &none::NONE,
];

/// Iterates over the text of every strategy, with its default settings and with each of its samples.
pub fn samples() -> impl Iterator<Item = String> {
    STRATEGIES.iter().flat_map(|strategy| {
        let sample = |settings: &&str| format!("{}:{settings}", strategy.name);
        std::iter::once(strategy.name.to_owned()).chain(strategy.samples.iter().map(sample))
    })
}
