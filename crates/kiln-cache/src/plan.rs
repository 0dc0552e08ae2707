//! Plans: which strategy serves which block of a model.

use std::{fmt, sync::Arc};

use kiln_core::{
    Error, Result,
    layer::StateLayer,
    model_cache::{LayerCache, ModelCache},
    need::{AttentionNeed, LayerNeed, RecurrentNeed},
};
use kiln_kernels::{Kernels, Placement};

use crate::{
    CacheSettings, KvFactory, KvStrategy, Offload, QuantizedSettings, STRATEGIES, SinkSettings,
    StaticSettings,
    memory::{Forgetful, Memory, Policy, Recurrent},
    strategies::{Dynamic, NoCache, Sliding, settings},
};

/// A strategy and its settings. The text form is that of the command line: `NAME[:key=value,..]`.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    pub strategy: &'static KvStrategy,
    pub factory: Arc<dyn KvFactory>,
    /// Settings as the user wrote them.
    settings: String,
    /// The non-default settings; two specs are equal if these are.
    canonical: String,
}

impl CacheSpec {
    /// Creates a spec from the settings of a strategy.
    ///
    /// # Errors
    /// [`Error::Setting`] for impossible values.
    pub fn new<S: CacheSettings>(settings: S) -> Result<Self> {
        settings.validate().map_err(|why| S::STRATEGY.wrong(why))?;
        Ok(Self::of_possible(settings))
    }

    pub(crate) fn default_of<S: CacheSettings>() -> Self {
        Self::of_possible(S::default())
    }

    pub(crate) fn read<S: CacheSettings>(text: &str) -> Result<Self> {
        Ok(Self { settings: text.to_owned(), ..Self::new(settings::read::<S>(S::STRATEGY, text)?)? })
    }

    fn of_possible<S: CacheSettings>(settings: S) -> Self {
        let canonical = settings::write(S::STRATEGY, &settings);
        let factory = Arc::new(settings);
        Self { strategy: S::STRATEGY, factory, settings: canonical.clone(), canonical }
    }
}

impl PartialEq for CacheSpec {
    fn eq(&self, other: &Self) -> bool {
        (self.strategy.name, &self.canonical) == (other.strategy.name, &other.canonical)
    }
}

impl fmt::Display for CacheSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.settings {
            "" => f.write_str(self.strategy.name),
            settings => write!(f, "{}:{settings}", self.strategy.name),
        }
    }
}

/// Assigns strategies to attention blocks. A plan with two strategies is a hybrid cache in transformers.
///
/// ```
/// use kiln_cache::{Offload, Plan, QuantizedSettings};
///
/// let plan = Plan::sink(1024, 4)?.windowed(Plan::sliding()).offloaded(Offload::All);
/// assert_eq!(plan, Plan::named("sink + sliding + offload=all")?);
/// let plan = Plan::quantized(QuantizedSettings::default().nbits(2).group(32))?;
/// assert_eq!(plan.to_string(), "quantized:nbits=2,group=32");
/// let plan = Plan::dynamic().encoder(Plan::quantized(QuantizedSettings::default().nbits(8))?)?;
/// assert_eq!(plan.to_string(), "dynamic + encoder=quantized:nbits=8");
/// # Ok::<(), kiln_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Strategy for blocks that see the whole sequence.
    pub global: CacheSpec,
    /// Strategy for blocks that see a window of it.
    pub windowed: CacheSpec,
    /// Strategy for the output of an encoder, which every token sees: `dynamic` or `quantized`.
    pub encoder: CacheSpec,
    /// Layers that are kept in host memory; `None`: none.
    pub offload: Option<Offload>,
}

/// Blocks with a window get a `sliding` cache if the strategy is `dynamic` or `static`.
impl From<CacheSpec> for Plan {
    fn from(global: CacheSpec) -> Self {
        let windowed = global.strategy.windowed.map_or_else(|| global.clone(), |windowed| windowed());
        Self { global, windowed, encoder: CacheSpec::default_of::<Dynamic>(), offload: None }
    }
}

/// Writes the text that [`Plan::named`] reads.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.global)?;
        if self.windowed != Self::from(self.global.clone()).windowed {
            write!(f, " + {}", self.windowed)?;
        }
        if self.encoder != CacheSpec::default_of::<Dynamic>() {
            write!(f, "{ENCODER}{}", self.encoder)?;
        }
        self.offload.map_or(Ok(()), |offload| write!(f, "{OFFLOADED}{offload}"))
    }
}

/// Separator before the selection of layers in host memory.
const OFFLOADED: &str = " + offload=";

/// Separator before the strategy for the output of an encoder.
const ENCODER: &str = " + encoder=";

impl Plan {
    /// Keeps every key and value (transformers' `DynamicCache`).
    pub fn dynamic() -> Self {
        CacheSpec::default_of::<Dynamic>().into()
    }

    /// Keeps every key and value in a buffer for `len` tokens that is allocated once (transformers'
    /// `StaticCache`). `None`: for as many tokens as the generation is going to reach.
    ///
    /// # Errors
    /// [`Error::Setting`] for 0 tokens, and for more than 2^32.
    pub fn static_cache(len: Option<usize>) -> Result<Self> {
        Self::of(StaticSettings { len })
    }

    /// Keeps the window that the model's queries may see (transformers' `SlidingWindowCache`). It serves only
    /// models whose layers all have a window.
    pub fn sliding() -> Self {
        CacheSpec::default_of::<Sliding>().into()
    }

    /// Keeps the first `sinks` tokens and the latest ones, `window` tokens in total (transformers'
    /// `SinkCache(window_length=window, num_sink_tokens=sinks)`).
    ///
    /// # Errors
    /// [`Error::Setting`] if the sinks leave no room in the window, or the window is above 2^32.
    pub fn sink(window: usize, sinks: usize) -> Result<Self> {
        Self::of(SinkSettings::default().window(window).sinks(sinks))
    }

    /// Keeps the history in codes of a few bits (transformers' `QuantizedCache`).
    ///
    /// # Errors
    /// [`Error::Setting`] for values that are impossible, alone or in combination.
    pub fn quantized(settings: QuantizedSettings) -> Result<Self> {
        Self::of(settings)
    }

    /// Remembers nothing, and recomputes the whole sequence at every step (transformers' `use_cache=False`).
    pub fn none() -> Self {
        CacheSpec::default_of::<NoCache>().into()
    }

    /// Creates the plan of a strategy with these settings.
    ///
    /// # Errors
    /// [`Error::Setting`] for values that are impossible, alone or in combination.
    pub fn of(settings: impl CacheSettings) -> Result<Self> {
        CacheSpec::new(settings).map(Self::from)
    }

    /// Parses a plan: `NAME[:key=value,..]`, or two strategies, `GLOBAL + WINDOWED`. A following
    /// ` + encoder=NAME[:key=value,..]` selects the strategy for the output of an encoder, and
    /// ` + offload=all` at the end keeps layers in host memory.
    ///
    /// # Errors
    /// [`Error::Unknown`] with the known names or settings; [`Error::Setting`] for impossible values.
    pub fn named(text: &str) -> Result<Self> {
        if let Some((text, offload)) = text.split_once(OFFLOADED) {
            return Ok(Self::named(text)?.offloaded(offload.parse()?));
        }
        if let Some((text, encoder)) = text.split_once(ENCODER) {
            return Self::named(text)?.encoder(Self::one(encoder)?);
        }
        match text.split_once(" + ") {
            Some((global, windowed)) => Ok(Self::one(global)?.windowed(Self::one(windowed)?)),
            None => Self::one(text),
        }
    }

    fn one(text: &str) -> Result<Self> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let named = |strategy: &KvStrategy| {
            strategy.name == name
                || strategy.aliases.contains(&name)
                || strategy.offloaded_aliases.contains(&name)
        };
        let strategy = STRATEGIES.iter().find(|strategy| named(strategy)).ok_or_else(|| Error::Unknown {
            what: "cache strategy",
            name: name.to_owned(),
            known: STRATEGIES.iter().map(|s| s.name.to_owned()).collect(),
        })?;
        let offload = strategy.offloaded_aliases.contains(&name).then_some(Offload::All);
        Ok(Self { offload, ..(strategy.read)(settings)?.into() })
    }

    /// Serves blocks with a window by the global strategy of `plan`.
    pub fn windowed(self, plan: Self) -> Self {
        Self { windowed: plan.global, offload: self.offload.or(plan.offload), ..self }
    }

    /// Keeps the output of an encoder by the global strategy of `plan`.
    ///
    /// # Errors
    /// [`Error::Setting`] for a strategy that does not keep everything, or that packs everything again with
    /// each token.
    pub fn encoder(self, plan: Self) -> Result<Self> {
        plan.global.factory.check_encoder()?;
        Ok(Self { encoder: plan.global, offload: self.offload.or(plan.offload), ..self })
    }

    /// Keeps the selected layers in host memory.
    pub fn offloaded(self, offload: Offload) -> Self {
        Self { offload: Some(offload), ..self }
    }

    /// Returns the spec that serves a block with this need.
    pub fn spec(&self, need: &AttentionNeed) -> &CacheSpec {
        if need.window.is_some() { &self.windowed } else { &self.global }
    }

    /// Returns the strategies that a model with these needs gets: one, or two that differ.
    pub fn used(&self, needs: &[LayerNeed]) -> Vec<&CacheSpec> {
        let used = |windowed| attention(needs).any(|need| need.window.is_some() == windowed);
        let forgets = !self.remembers(needs);
        let both = [(&self.global, used(false) || forgets), (&self.windowed, used(true))];
        let mut specs: Vec<&CacheSpec> =
            both.into_iter().filter_map(|(spec, used)| used.then_some(spec)).collect();
        specs.dedup();
        specs
    }

    /// Text of the strategies that a model with these needs gets; `recurrent` if it has no attention. The
    /// location of layers is left out, because it does not change their contents.
    pub fn describe(&self, needs: &[LayerNeed]) -> String {
        if attention(needs).next().is_none() && self.remembers(needs) {
            return Recurrent::NAME.to_owned();
        }
        self.used(needs).iter().map(|spec| spec.to_string()).collect::<Vec<_>>().join(" + ")
    }

    /// Returns the plan that `cache`, built by this plan, follows now: layers may have been packed when
    /// memory ran out.
    ///
    /// # Errors
    /// Only those of [`named`](Self::named), for a layer of an unregistered strategy.
    pub fn of_cache(&self, needs: &[LayerNeed], cache: &ModelCache) -> Result<Self> {
        let mut plan = self.clone();
        for (need, name) in needs.iter().zip(cache.strategies()) {
            let Some(need) = &need.attention else { continue };
            if let Some(name) = name.filter(|&name| name != self.spec(need).strategy.name) {
                let spec = Self::named(name)?.global;
                if need.window.is_some() { plan.windowed = spec } else { plan.global = spec }
            }
        }
        Ok(plan)
    }

    /// Description for people, including where layers are kept.
    pub fn label(&self, needs: &[LayerNeed]) -> String {
        match self.offload {
            None | Some(Offload::AsNeeded) => self.describe(needs),
            Some(Offload::All) => format!("{}, offloaded", self.describe(needs)),
            Some(Offload::Full) => format!("{}, offloaded without windows", self.describe(needs)),
            Some(Offload::AllBut(kept)) => {
                format!("{}, offloaded but the last {kept} layers", self.describe(needs))
            }
        }
    }

    /// Whether every block keeps its keys, values or states.
    pub fn remembers(&self, needs: &[LayerNeed]) -> bool {
        let recurrent = needs.iter().any(|need| need.recurrent.is_some());
        attention(needs).all(|need| self.spec(need).factory.remembers())
            && (!recurrent || self.global.factory.remembers())
    }

    /// Checks that the plan can serve a model with these needs, before weights are read.
    ///
    /// # Errors
    /// [`Error::Setting`] for a strategy that blocks of the model cannot have. A strategy that keeps only a
    /// part of the keys and values is refused for a model without attention, where it has nothing to work on.
    pub fn check(&self, needs: &[LayerNeed]) -> Result<()> {
        if attention(needs).next().is_none() && !self.global.factory.exact() {
            let why = format!(
                "`{}` is a way to keep keys and values, and this model has none: it has states of constant size; use `dynamic`",
                self.global.strategy.name
            );
            return Err(Error::Setting { name: "cache", why });
        }
        attention(needs).try_for_each(|need| self.spec(need).factory.check(need))
    }

    /// Whether every block gets every key that it may see.
    pub fn is_exact(&self, needs: &[LayerNeed]) -> bool {
        attention(needs).all(|need| self.spec(need).factory.exact())
    }

    /// Number of bytes for `tokens` tokens of one row, with `element` bytes per element.
    pub fn bytes(&self, needs: &[LayerNeed], tokens: usize, element: usize) -> usize {
        needs.iter().map(|need| self.layer_bytes(need, tokens, element)).fold(0, usize::saturating_add)
    }

    /// Number of bytes on the device for `tokens` tokens of one row if all layers are offloaded: those of the
    /// largest two adjacent layers.
    pub fn bytes_offloaded(&self, needs: &[LayerNeed], tokens: usize, element: usize) -> usize {
        let layer = |need: &LayerNeed| self.layer_bytes(need, tokens, element);
        let next = needs.iter().cycle().skip(1);
        let pair = |(one, two)| layer(one).saturating_add(if needs.len() > 1 { layer(two) } else { 0 });
        needs.iter().zip(next).map(pair).max().unwrap_or(0)
    }

    fn layer_bytes(&self, need: &LayerNeed, tokens: usize, element: usize) -> usize {
        let attention = |need| self.spec(need).factory.bytes(need, tokens, element);
        let recurrent = need.recurrent.as_ref().filter(|_| self.global.factory.remembers());
        // Sized so that one token can be truncated.
        let recurrent = recurrent.map_or(0, |need| need.bytes(1, element));
        need.attention.as_ref().map_or(0, attention).saturating_add(recurrent)
    }

    /// Creates the memory of a recurrent block, equal for all strategies except the one that remembers
    /// nothing.
    fn state(&self, need: &RecurrentNeed, kernels: &Kernels) -> Box<dyn StateLayer> {
        let need = need.clone();
        match self.global.factory.remembers() {
            true => Box::new(Memory::new(Recurrent { need }, kernels.device())),
            false => Box::new(Memory::new(Forgetful { need }, kernels.device())),
        }
    }

    /// Builds one memory per need, on the device of its block.
    pub fn build(&self, needs: &[LayerNeed], placement: &Placement) -> Result<ModelCache> {
        let layers: Result<Vec<LayerCache>> = needs
            .iter()
            .enumerate()
            .map(|(block, need)| {
                let kernels = placement.of(block);
                let LayerNeed { attention, encoder, recurrent } = need;
                let keys = attention.as_ref().map(|need| self.spec(need).factory.build(need, kernels));
                let of_encoder = attention.as_ref().filter(|_| *encoder);
                let encoder = of_encoder.map(|need| self.encoder.factory.build_encoder(need, kernels));
                Ok(LayerCache {
                    keys: keys.transpose()?,
                    encoder: encoder.transpose()?,
                    state: recurrent.as_ref().map(|need| self.state(need, kernels)),
                })
            })
            .collect();
        let mut layers = layers?;
        let moves = |block: usize| self.offload.is_some_and(|offload| offload.selects(block, needs));
        let moved = layers.iter_mut().enumerate().filter(|(block, _)| moves(*block));
        moved.map(|(_, layer)| layer).try_for_each(LayerCache::offload)?;
        Ok(ModelCache::new(layers))
    }
}

fn attention(needs: &[LayerNeed]) -> impl Iterator<Item = &AttentionNeed> {
    needs.iter().filter_map(|need| need.attention.as_ref())
}
