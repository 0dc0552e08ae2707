//! From what a model needs to what it gets.

use std::{fmt, str::FromStr, sync::Arc};

use kiln_core::{
    Error, Result,
    model_cache::{LayerCache, ModelCache},
    need::{AttentionNeed, LayerNeed},
};
use kiln_kernels::Kernels;

use crate::{
    KvFactory, KvStrategy, Offload, STRATEGIES, Settings,
    memory::{Memory, Trail, WriteOnce},
};

/// A strategy and its settings, as the command line writes them: `NAME[:key=value,..]`.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    pub strategy: &'static KvStrategy,
    pub factory: Arc<dyn KvFactory>,
    /// How it was asked for.
    pub text: String,
    /// Whether it was asked for by a name that says so.
    pub offloaded: bool,
}

impl FromStr for CacheSpec {
    type Err = Error;

    /// # Errors
    /// [`Error::Unknown`] with the known names or settings; [`Error::Setting`] for values that are impossible.
    fn from_str(text: &str) -> Result<Self> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let offloaded = |strategy: &&&KvStrategy| strategy.offloaded_aliases.contains(&name);
        let named = |strategy: &&&KvStrategy| {
            strategy.name == name || strategy.aliases.contains(&name) || offloaded(strategy)
        };
        let strategy = *STRATEGIES.iter().find(named).ok_or_else(|| Error::Unknown {
            what: "cache strategy",
            name: name.to_owned(),
            known: STRATEGIES.iter().map(|s| s.name.to_owned()).collect(),
        })?;
        let factory = (strategy.configure)(Settings::parse(strategy, settings)?)?;
        let offloaded = offloaded(&&strategy);
        let text = match (offloaded, settings) {
            (false, _) => text.to_owned(),
            (true, "") => strategy.name.to_owned(),
            (true, settings) => format!("{}:{settings}", strategy.name),
        };
        Ok(Self { strategy, factory, text, offloaded })
    }
}

impl fmt::Display for CacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Which strategy serves which attention blocks. Two of them are what transformers calls a hybrid cache.
#[derive(Clone, Debug)]
pub struct Plan {
    /// For blocks that see the whole sequence.
    pub global: CacheSpec,
    /// For blocks that see a window of it.
    pub windowed: CacheSpec,
    /// What is kept in host memory; `None`: nothing.
    pub offload: Option<Offload>,
}

impl Plan {
    /// The plan that `--cache` and `--cache-windowed` ask for. Blocks with a window get a `sliding` cache beside
    /// `dynamic` and `static` ones, unless it is said otherwise.
    pub fn new(global: CacheSpec, windowed: Option<CacheSpec>) -> Result<Self> {
        let windowed = match (windowed, global.strategy.windowed) {
            (Some(windowed), _) => windowed,
            (None, Some(name)) => name.parse()?,
            (None, None) => global.clone(),
        };
        let offload = (global.offloaded || windowed.offloaded).then_some(Offload::All);
        Ok(Self { global, windowed, offload })
    }

    /// Keeps these layers in host memory.
    pub fn offloaded(self, offload: Offload) -> Self {
        Self { offload: Some(offload), ..self }
    }

    /// The plan that `--cache TEXT` asks for.
    ///
    /// # Errors
    /// [`Error::Unknown`] with the known names or settings; [`Error::Setting`] for values that are impossible.
    pub fn named(text: &str) -> Result<Self> {
        Self::new(text.parse()?, None)
    }

    /// What serves a block of this need.
    pub fn spec(&self, need: &AttentionNeed) -> &CacheSpec {
        if need.window.is_some() { &self.windowed } else { &self.global }
    }

    /// What a model of these needs gets, as the command line would ask for it. Where layers are kept changes nothing of
    /// what they hold, and is not said.
    pub fn describe(&self, needs: &[LayerNeed]) -> String {
        let mut specs: Vec<String> = Vec::new();
        for need in attention(needs) {
            let text = self.spec(need).to_string();
            if !specs.contains(&text) {
                specs.push(text);
            }
        }
        specs.join(" + ")
    }

    /// The plan that [`describe`](Self::describe) wrote about a model of these needs.
    ///
    /// # Errors
    /// Those of [`named`](Self::named).
    pub fn described(text: &str, needs: &[LayerNeed]) -> Result<Self> {
        let Some((first, second)) = text.split_once(" + ") else { return Self::named(text) };
        let windowed_first = attention(needs).next().is_some_and(|need| need.window.is_some());
        let (global, windowed) = if windowed_first { (second, first) } else { (first, second) };
        Self::new(global.parse()?, Some(windowed.parse()?))
    }

    /// The plan that `cache`, built by this one, follows now: layers may have been packed when memory ran out.
    ///
    /// # Errors
    /// None but those of [`named`](Self::named) for a layer that is of no registered strategy.
    pub fn of_cache(&self, needs: &[LayerNeed], cache: &ModelCache) -> Result<Self> {
        let mut plan = self.clone();
        for (need, name) in needs.iter().zip(cache.strategies()) {
            let LayerNeed::Attention(need) = need else { continue };
            if let Some(name) = name.filter(|&name| name != self.spec(need).strategy.name) {
                let spec = name.parse()?;
                if need.window.is_some() { plan.windowed = spec } else { plan.global = spec }
            }
        }
        Ok(plan)
    }

    /// The description for people, with where the layers are kept.
    pub fn label(&self, needs: &[LayerNeed]) -> String {
        match self.offload {
            None | Some(Offload::AsNeeded) => self.describe(needs),
            Some(Offload::All) => format!("{}, offloaded", self.describe(needs)),
            Some(Offload::AllBut(kept)) => {
                format!("{}, offloaded but the last {kept} layers", self.describe(needs))
            }
        }
    }

    /// Whether every block keeps what it is given.
    pub fn remembers(&self, needs: &[LayerNeed]) -> bool {
        attention(needs).all(|need| self.spec(need).factory.remembers())
    }

    /// Whether it can serve a model of these needs; asked before weights are read.
    pub fn check(&self, needs: &[LayerNeed]) -> Result<()> {
        attention(needs).try_for_each(|need| self.spec(need).factory.check(need))
    }

    /// Whether every block gets every key it may see.
    pub fn is_exact(&self, needs: &[LayerNeed]) -> bool {
        attention(needs).all(|need| self.spec(need).factory.exact())
    }

    /// Bytes that `tokens` tokens of one row take, in elements of `element` bytes.
    pub fn bytes(&self, needs: &[LayerNeed], tokens: usize, element: usize) -> usize {
        needs.iter().map(|need| self.layer_bytes(need, tokens, element)).fold(0, usize::saturating_add)
    }

    /// Bytes on the device for `tokens` tokens of one row if all layers are offloaded: those of the two largest neighbours.
    pub fn bytes_offloaded(&self, needs: &[LayerNeed], tokens: usize, element: usize) -> usize {
        let layer = |need: &LayerNeed| self.layer_bytes(need, tokens, element);
        let next = needs.iter().cycle().skip(1);
        let pair = |(one, two)| layer(one).saturating_add(if needs.len() > 1 { layer(two) } else { 0 });
        needs.iter().zip(next).map(pair).max().unwrap_or(0)
    }

    fn layer_bytes(&self, need: &LayerNeed, tokens: usize, element: usize) -> usize {
        match need {
            LayerNeed::Attention(need) | LayerNeed::EncoderDecoder(need) => {
                self.spec(need).factory.bytes(need, tokens, element)
            }
            LayerNeed::Recurrent(need) => need.channels * (need.conv_width + need.state_dim) * element,
            LayerNeed::Nothing => 0,
        }
    }

    /// One memory per need.
    pub fn build(&self, needs: &[LayerNeed], kernels: &Kernels) -> Result<ModelCache> {
        let attention = |need: &AttentionNeed| self.spec(need).factory.build(need, kernels);
        let layers: Result<Vec<LayerCache>> = needs
            .iter()
            .map(|need| {
                Ok(match need {
                    LayerNeed::Attention(need) => LayerCache::Attention(attention(need)?),
                    LayerNeed::EncoderDecoder(need) => LayerCache::EncoderDecoder {
                        decoder: attention(need)?,
                        encoder: Box::new(Memory::new(WriteOnce, kernels.device())),
                    },
                    LayerNeed::Recurrent(_) => {
                        LayerCache::Recurrent(Box::new(Memory::new(Trail, kernels.device())))
                    }
                    LayerNeed::Nothing => LayerCache::Nothing,
                })
            })
            .collect();
        let mut layers = layers?;
        let count = self.offload.map_or(0, |offload| offload.count(layers.len()));
        layers.iter_mut().take(count).try_for_each(LayerCache::offload)?;
        Ok(ModelCache::new(layers))
    }
}

fn attention(needs: &[LayerNeed]) -> impl Iterator<Item = &AttentionNeed> {
    needs.iter().filter_map(|need| match need {
        LayerNeed::Attention(need) | LayerNeed::EncoderDecoder(need) => Some(need),
        LayerNeed::Recurrent(_) | LayerNeed::Nothing => None,
    })
}
