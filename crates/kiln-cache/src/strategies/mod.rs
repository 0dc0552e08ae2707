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

/// A strategy: its names, its help, and how its settings are read.
#[derive(Debug)]
pub struct KvStrategy {
    pub name: &'static str,
    /// Other names for it: those of transformers.
    pub aliases: &'static [&'static str],
    /// Names for it with its layers kept in host memory: those of transformers.
    pub offloaded_aliases: &'static [&'static str],
    /// What it does, in a phrase.
    pub summary: &'static str,
    /// Its settings (`key=value`), with what each means.
    pub settings: &'static [(&'static str, &'static str)],
    /// Settings so small that it evicts or packs within a few tokens. Tests go over them; each must hold at least two tokens.
    pub samples: &'static [&'static str],
    /// What serves the layers that have a window, where the user does not say; `None`: this strategy.
    pub windowed: Option<fn() -> CacheSpec>,
    /// Reads `key=value,key=value`, and says what is wrong with it.
    pub read: fn(&str) -> Result<CacheSpec>,
}

impl KvStrategy {
    pub(crate) fn wrong(&self, why: String) -> Error {
        Error::Setting { name: "cache", why: format!("{}: {why}", self.name) }
    }
}

/// A strategy with its settings: builds the memory of attention blocks.
pub trait KvFactory: fmt::Debug + Send + Sync {
    /// Whether it keeps what it is given. One that does not is fed the whole sequence at every step.
    fn remembers(&self) -> bool {
        true
    }

    /// Whether attention gets every key the model may see.
    fn exact(&self) -> bool {
        true
    }

    /// Whether it can serve a block of this need.
    fn check(&self, _need: &AttentionNeed) -> Result<()> {
        Ok(())
    }

    /// Bytes that `tokens` tokens of one row take in one block, with elements of `element` bytes.
    fn bytes(&self, need: &AttentionNeed, tokens: usize, element: usize) -> usize;

    fn build(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn KvLayer>>;

    /// Whether it can keep what an encoder wrote.
    ///
    /// # Errors
    /// [`Error::Setting`] where it cannot: all of it is seen by every token.
    fn check_encoder(&self) -> Result<()> {
        let why = "keys of an encoder are kept by `dynamic`, or by `quantized`".to_owned();
        Err(Error::Setting { name: "cache", why })
    }

    /// The memory of what an encoder wrote.
    ///
    /// # Errors
    /// Those of [`check_encoder`](Self::check_encoder).
    fn build_encoder(&self, need: &AttentionNeed, kernels: &Kernels) -> Result<Box<dyn CrossLayer>> {
        self.check_encoder()?;
        Ok(Box::new(Memory::new(WriteOnce { need: need.clone() }, kernels.device())))
    }
}

/// The settings of a strategy: [`Plan::of`](crate::Plan::of) takes any.
pub trait CacheSettings: KvFactory + Default + Serialize + DeserializeOwned + 'static {
    const STRATEGY: &'static KvStrategy;

    /// Says which value is impossible, alone or with the others. The defaults are possible.
    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

/// A version of transformers whose rules differ from those of today.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Compat {
    #[serde(rename = "4.47")]
    V4_47,
}

/// Every strategy. A line here makes it selectable and puts it through the laws.
pub static STRATEGIES: &[&KvStrategy] = &[
    &dynamic::DYNAMIC, //
    &r#static::STATIC,
    &sliding::SLIDING,
    &sink::SINK,
    &quantized::QUANTIZED,
    &none::NONE,
];

/// Text of every strategy, with its default settings and with each of its samples.
pub fn samples() -> impl Iterator<Item = String> {
    STRATEGIES.iter().flat_map(|strategy| {
        let sample = |settings: &&str| format!("{}:{settings}", strategy.name);
        std::iter::once(strategy.name.to_owned()).chain(strategy.samples.iter().map(sample))
    })
}
