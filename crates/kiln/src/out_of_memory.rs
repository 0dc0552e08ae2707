//! Memory limits: estimates before a generation, and remedies when memory runs out.

use std::{
    fmt,
    ops::Range,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

use kiln_cache::{CacheSpec, Plan, QuantizedSettings, offload_all, offload_one};
use kiln_core::{
    Error, Result,
    budget::{Budget, Claim, system_has},
    device_state::DeviceState,
    layer::{KvLayer, Positions, StepShape},
    model_cache::ModelCache,
    need::{AttentionNeed, LayerNeed},
    stages::Stages,
};
use kiln_generate::OomPolicy;
use kiln_kernels::{Kernels, Placement, device::DeviceInfo};

/// The remedy when a cache does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnOutOfMemory {
    /// The generation ends with the error.
    Fail,
    /// Layers of the cache move to host memory, as many as necessary, and the generation continues with the
    /// same tokens.
    #[default]
    Offload,
    /// Layers that keep all tokens are packed to 4 bits per number, and the generation continues with this
    /// loss of precision. If that is not enough, layers are offloaded.
    Quantize,
}

impl FromStr for OnOutOfMemory {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "fail" => Ok(Self::Fail),
            "offload" => Ok(Self::Offload),
            "quantize" => Ok(Self::Quantize),
            _ => Err(Error::Unknown {
                what: "answer to running out of memory",
                name: text.to_owned(),
                known: ["fail", "offload", "quantize"].map(str::to_owned).into(),
            }),
        }
    }
}

impl fmt::Display for OnOutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fail => "fail",
            Self::Offload => "offload",
            Self::Quantize => "quantize",
        })
    }
}

/// Default limit for the used memory of `device` in bytes: 90 % of its memory; `None` if that is unknown.
pub fn usable(device: &DeviceInfo) -> Option<u64> {
    device.memory.map(|memory| memory / 10 * 9)
}

/// Moves layers to host memory.
#[derive(Debug)]
pub(crate) struct OffloadLayers {
    placement: Placement,
    /// Whether the user was told.
    told: AtomicBool,
}

impl OffloadLayers {
    pub(crate) fn new(placement: Placement) -> Self {
        Self { placement, told: AtomicBool::new(false) }
    }

    /// Makes released memory available again.
    fn give_back(&self) {
        self.placement.iter().for_each(|kernels| DeviceState::of(kernels.device()).give_back());
    }
}

impl OomPolicy for OffloadLayers {
    fn shrink(&self, cache: &mut ModelCache, step: &StepShape, working: usize) -> Result<bool> {
        // A layer from host memory is as large as before while it is on the device.
        if cache.check_buffers(step).is_err() {
            return Ok(false);
        }
        let before = cache.bytes_for(step);
        let over_budget = cache.make_room(step, working).is_err();
        // If the host has no room either, nothing can be done. The system is asked if all layers move, or if
        // they are in host memory already.
        let short = cache.stage_without_room(step, working);
        let is_of_this_process = |budgets: Stages<Budget>| match &short {
            Some(blocks) => budgets.of(blocks.start).is_of_this_process(),
            None => budgets.iter().any(Budget::is_of_this_process),
        };
        let moves_all = !over_budget || cache.budgets().is_some_and(is_of_this_process);
        if moves_all && !system_has(before as u64) {
            return Ok(false);
        }
        match over_budget {
            // The budget knows how much is missing, so as few layers as necessary move.
            true => {
                while cache.make_room(step, working).is_err() {
                    let short = cache.stage_without_room(step, working).unwrap_or(0..cache.blocks());
                    if !offload_one(cache, &short)? {
                        break;
                    }
                }
            }
            // The device ran out of memory, and the missing amount is unknown.
            false => offload_all(cache)?,
        }
        self.give_back();
        let helped = cache.bytes_for(step) < before;
        if helped && !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "kiln::memory",
                "out of memory: layers of the cache move to host memory; the tokens stay the same, steps take longer"
            );
        }
        Ok(helped)
    }
}

/// Packs layers that keep all tokens, and offloads them if that is not enough. An empty layer is replaced by
/// a new one.
#[derive(Debug)]
pub(crate) struct QuantizeLayers {
    needs: Vec<LayerNeed>,
    then: OffloadLayers,
}

impl QuantizeLayers {
    pub(crate) fn new(needs: Vec<LayerNeed>, placement: Placement) -> Self {
        Self { needs, then: OffloadLayers::new(placement) }
    }

    /// Whether the contents of a block, for rows of all lengths, can be packed and would be smaller.
    fn helps(
        &self,
        layers: &[&dyn KvLayer],
        need: &AttentionNeed,
        spec: &CacheSpec,
        step: &StepShape,
    ) -> bool {
        let can_be_packed = |layer: &&dyn KvLayer| {
            let held = layer.span(0);
            let keeps_all = held.len > 0 || need.window.is_none() && !layer.limits().endless;
            let whole = held.start == 0 && held.len == layer.seq_len() && keeps_all;
            whole && layer.name() != spec.strategy.name
        };
        let takes = |layer: &&dyn KvLayer| {
            let (rows, tokens) = (layer.rows().unwrap_or(step.rows), layer.span(0).len + step.tokens);
            let step = StepShape { rows, ..*step };
            let packed = spec.factory.bytes(need, tokens, step.element).saturating_mul(rows);
            (packed, layer.footprint(&step).held)
        };
        let sum = |(a, b): (usize, usize), (c, d)| (a.saturating_add(c), b.saturating_add(d));
        let (packed, held) = layers.iter().map(takes).fold((0, 0), sum);
        layers.iter().all(can_be_packed) && packed < held && spec.factory.check(need).is_ok()
    }
}

/// The contents of `layer`, packed.
fn packed(
    layer: &dyn KvLayer,
    need: &AttentionNeed,
    spec: &CacheSpec,
    kernels: &Kernels,
) -> Result<Box<dyn KvLayer>> {
    let mut packed = spec.factory.build(need, kernels)?;
    packed.keep_history(1);
    if let Some((keys, values)) = layer.gather()? {
        let positions = Positions::all_at(0, keys.dims()[0], &keys.device());
        packed.update(keys, values, &positions)?;
    }
    Ok(packed)
}

impl OomPolicy for QuantizeLayers {
    fn shrink(&self, cache: &mut ModelCache, step: &StepShape, working: usize) -> Result<bool> {
        let before = cache.bytes_for(step);
        let spec = Plan::quantized(QuantizedSettings::default())?.global;
        for (block, need) in self.needs.iter().enumerate() {
            let Some(need) = need.attention.as_ref().filter(|_| !need.encoder) else { continue };
            let own = cache.layers_mut().filter(|(i, _)| *i == block);
            let layers: Vec<&mut Box<dyn KvLayer>> =
                own.filter_map(|(_, layer)| layer.keys.as_mut()).collect();
            let views: Vec<&dyn KvLayer> = layers.iter().map(|layer| &***layer).collect();
            if self.helps(&views, need, &spec, step) {
                for layer in layers {
                    *layer = packed(&**layer, need, &spec, self.then.placement.of(block))?;
                }
            }
        }
        self.then.give_back();
        if cache.bytes_for(step) >= before {
            return self.then.shrink(cache, step, working);
        }
        tracing::warn!(
            target: "kiln::memory",
            "out of memory: the cache is packed in 4 bits a number; the text goes on, with other tokens than it would have had"
        );
        Ok(true)
    }
}

/// Checks whether the device has buffers large enough for a sequence of `tokens` tokens, before the first
/// token is fed.
///
/// # Errors
/// [`Error::BufferTooLarge`], unless layers will be packed when they outgrow their buffers.
pub(crate) fn check_buffers(
    cache: &ModelCache,
    tokens: usize,
    step: &StepShape,
    on_oom: OnOutOfMemory,
) -> Result<()> {
    let step = StepShape { tokens: tokens.saturating_sub(cache.seq_len()), ..*step };
    if on_oom == OnOutOfMemory::Quantize { Ok(()) } else { cache.check_buffers(&step) }
}

/// Checks whether a sequence of `tokens` tokens will fit, before the first token is fed.
///
/// # Errors
/// [`Error::OutOfMemory`] with the longest sequence that fits, and the smallest change that helps.
pub(crate) fn check(
    cache: &ModelCache,
    tokens: usize,
    step: &StepShape,
    working: usize,
    on_oom: OnOutOfMemory,
) -> Result<()> {
    let Some(budgets) = cache.budgets() else { return Ok(()) };
    // Stages on one device share a budget.
    let missing = |budget: &Budget, tokens: usize, on_oom| {
        let needed: u64 = budgets
            .blocks(cache.blocks())
            .filter(|(_, of_stage)| *of_stage == budget)
            .map(|(blocks, _)| {
                let working = if budgets.is_first(blocks.start) { working } else { 0 };
                takes(cache, blocks, tokens, step, working, on_oom)
            })
            .fold(0, u64::saturating_add);
        let available = budget.available()?;
        (needed > available).then_some((needed, available))
    };
    let fits = |tokens, on_oom| budgets.iter().all(|budget| missing(budget, tokens, on_oom).is_none());
    let found = budgets.iter().find_map(|budget| Some((budget, missing(budget, tokens, on_oom)?)));
    let Some((budget, (needed, available))) = found else { return Ok(()) };
    // Searches for the first length that does not fit; more tokens never take less memory.
    let (mut fit, mut too_long) = (0, tokens);
    while fit + 1 < too_long {
        let middle = fit + (too_long - fit) / 2;
        if fits(middle, on_oom) { fit = middle } else { too_long = middle }
    }
    let offload = on_oom == OnOutOfMemory::Fail && fits(tokens, OnOutOfMemory::Offload);
    let ways = [
        offload.then(|| "keep the cache in host memory (`offload`)".to_owned()),
        budget.raise_by(needed - available),
        (fit > 0).then(|| format!("use at most {fit} tokens, the prompt included")),
    ];
    let ways: Vec<String> = ways.into_iter().flatten().collect();
    let advice = match ways.is_empty() {
        true => "use a smaller model or cache".to_owned(),
        false => ways.join(", or "),
    };
    let tokens = if tokens == 1 { "one token".to_owned() } else { format!("{tokens} tokens") };
    let what = match on_oom {
        OnOutOfMemory::Fail => format!("a cache of {tokens}"),
        OnOutOfMemory::Offload | OnOutOfMemory::Quantize => {
            format!("a cache of {tokens}, even with its layers in host memory")
        }
    };
    Err(Error::OutOfMemory { what, needed, available, advice })
}

/// Bytes that a sequence of `tokens` tokens takes in these blocks in addition to existing claims, with
/// `working` bytes for the model's activations.
pub(crate) fn takes(
    cache: &ModelCache,
    blocks: Range<usize>,
    tokens: usize,
    step: &StepShape,
    working: usize,
    on_oom: OnOutOfMemory,
) -> u64 {
    let step = StepShape { tokens: tokens.saturating_sub(cache.seq_len()), ..*step };
    let cache = cache.memory_of(blocks);
    // The current contents of the cache are part of the future contents. Buffers shared with others stay on
    // the device.
    let (bytes, held) = match on_oom {
        OnOutOfMemory::Fail => (cache.bytes_for(&step), cache.device_bytes()),
        OnOutOfMemory::Offload | OnOutOfMemory::Quantize => {
            (cache.bytes_offloaded(&step), cache.device_bytes() - cache.shared_bytes())
        }
    };
    let bytes = bytes.saturating_add(cache.bytes_growing(&step)).saturating_add(working);
    bytes.saturating_sub(held) as u64
}

/// Claims the memory of the weights of each stage, and checks that a sequence of `tokens` tokens fits next to
/// them. `cache` is an empty one.
///
/// # Errors
/// [`Error::OutOfMemory`] with the smallest change that helps.
pub(crate) fn claim_weights(
    weights: &Stages<(Budget, u64)>,
    cache: ModelCache,
    tokens: usize,
    working: usize,
    [element, half]: [usize; 2],
) -> Result<Stages<Claim>> {
    let step = StepShape { rows: 1, tokens: 0, element, last: false };
    let tokens = tokens.max(1);
    let claims = weights.try_map(|(budget, bytes)| {
        budget.claim("the model's weights", *bytes).map_err(|error| {
            // Stages on one device share a budget.
            let stages = weights.blocks(cache.blocks()).filter(|(_, (other, _))| other == budget);
            let needed = stages.enumerate().map(|(i, (blocks, (_, bytes)))| {
                let working = if i == 0 { working } else { 0 };
                bytes.saturating_add(takes(&cache, blocks, tokens, &step, working, OnOutOfMemory::Offload))
            });
            let needed: u64 = needed.fold(0, u64::saturating_add);
            let limit = budget.limit().unwrap_or(u64::MAX);
            let smaller = (half < element && needed / element as u64 * half as u64 <= limit)
                .then(|| "load them as f16 (`dtype`)".to_owned());
            let raise = budget.raise_by(needed.saturating_sub(limit)).map(|raise| match tokens {
                1 => format!("{raise} for one token"),
                _ => format!("{raise} for {tokens} tokens"),
            });
            let divide = cfg!(feature = "cpu") && weights.count() == 1 && !budget.is_of_this_process();
            let divide = divide.then(|| "compute some layers on the CPU (`layers`)".to_owned());
            let ways: Vec<String> = smaller.into_iter().chain(divide).chain(raise).collect();
            match ways.is_empty() {
                true => error.advised("use a smaller model"),
                false => error.advised(ways.join(", or ")),
            }
        })
    })?;
    let budgets = weights.map(|(budget, _)| budget.clone());
    check(&cache.within(&budgets)?, tokens, &step, working, OnOutOfMemory::Offload)?;
    Ok(claims)
}
