use std::{fmt, sync::Arc};

use kiln_core::{Error, Result, layer::KvLayer, need::AttentionNeed};
use kiln_kernels::Kernels;

mod dynamic;
mod none;
mod quantized;
mod sink;
mod sliding;
mod r#static;

/// A strategy as the command line knows it.
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
    /// Settings with which it evicts or packs within a few tokens: tests go over them.
    pub samples: &'static [&'static str],
    /// What serves the layers that have a window, where the user does not say; `None`: this strategy.
    pub windowed: Option<&'static str>,
    /// Takes every setting, and says what is wrong with them.
    pub configure: fn(Settings) -> Result<Arc<dyn KvFactory>>,
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

/// Every strategy as the command line names it, with its default settings and with its samples.
pub fn samples() -> impl Iterator<Item = String> {
    STRATEGIES.iter().flat_map(|strategy| {
        let sample = |settings: &&str| format!("{}:{settings}", strategy.name);
        std::iter::once(strategy.name.to_owned()).chain(strategy.samples.iter().map(sample))
    })
}

/// The settings that the user gave a strategy: `NAME:key=value,key=value`.
#[derive(Clone, Debug)]
pub struct Settings {
    strategy: &'static KvStrategy,
    given: Vec<(String, String)>,
}

impl Settings {
    /// Reads the part behind the name.
    pub(crate) fn parse(strategy: &'static KvStrategy, text: &str) -> Result<Self> {
        let mut settings = Self { strategy, given: Vec::new() };
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(settings.wrong(format!("`{pair}` is not of the form key=value")));
            };
            let (key, value) = (key.trim().to_owned(), value.trim().to_owned());
            if strategy.settings.is_empty() {
                return Err(settings.wrong(format!("has no settings, so `{key}` does not apply")));
            }
            if !strategy.settings.iter().any(|(known, _)| *known == key) {
                return Err(Error::Unknown {
                    what: "cache setting",
                    name: format!("{}:{key}", strategy.name),
                    known: strategy.settings.iter().map(|(known, _)| (*known).to_owned()).collect(),
                });
            }
            if settings.given.iter().any(|(given, _)| *given == key) {
                return Err(settings.wrong(format!("`{key}` is given twice")));
            }
            settings.given.push((key, value));
        }
        Ok(settings)
    }

    /// The value of `key`, once.
    pub(crate) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.given.iter().position(|(given, _)| given == key)?;
        Some(self.given.remove(at).1)
    }

    /// The value of `key` as a number of tokens.
    pub(crate) fn number(&mut self, key: &str) -> Result<Option<usize>> {
        /// Far above any cache, far below overflow.
        const LARGEST: usize = 1 << 32;

        let Some(text) = self.take(key) else { return Ok(None) };
        match text.parse::<usize>() {
            Ok(number) if number <= LARGEST => Ok(Some(number)),
            _ => Err(self.wrong(format!("`{key}={text}` is not a number of tokens between 0 and {LARGEST}"))),
        }
    }

    /// The value of `key` as a positive number of tokens.
    pub(crate) fn positive(&mut self, key: &str) -> Result<Option<usize>> {
        match self.number(key)? {
            Some(0) => Err(self.wrong(format!("`{key}` is 0, must be at least 1"))),
            number => Ok(number),
        }
    }

    /// The value of `key`, or of its other name.
    pub(crate) fn either(&mut self, key: &str, other: &str) -> Result<Option<String>> {
        match (self.take(key), self.take(other)) {
            (Some(_), Some(_)) => {
                Err(self
                    .wrong(format!("`{key}` and `{other}` are two names of one setting; give one of them")))
            }
            (one, another) => Ok(one.or(another)),
        }
    }

    /// The value of `key`, or of its other name, as a positive number.
    pub(crate) fn positive_of(&mut self, key: &str, other: &str) -> Result<Option<usize>> {
        let (one, another) = (self.positive(key)?, self.positive(other)?);
        if one.is_some() && another.is_some() {
            return Err(
                self.wrong(format!("`{key}` and `{other}` are two names of one setting; give one of them"))
            );
        }
        Ok(one.or(another))
    }

    /// Which of `known` words the value of `key` is; the first where it is not given.
    pub(crate) fn one_of(&mut self, key: &str, known: &[&str]) -> Result<usize> {
        let Some(text) = self.take(key) else { return Ok(0) };
        let at = known.iter().position(|word| *word == text);
        at.ok_or_else(|| self.wrong(format!("`{key}={text}` is unknown; known: {}", known.join(", "))))
    }

    pub(crate) fn wrong(&self, why: String) -> Error {
        Error::Setting { name: "cache", why: format!("{}: {why}", self.strategy.name) }
    }

    /// All were taken.
    pub(crate) fn done(self) -> Result<()> {
        match self.given.first() {
            None => Ok(()),
            Some((key, _)) => Err(self.wrong(format!("`{key}` does not apply to this strategy"))),
        }
    }
}
