//! One memory per block.

mod pass;

use std::sync::atomic::{AtomicBool, Ordering};

pub use pass::Pass;

use crate::{
    Error, Result,
    budget::{Budget, Claim},
    layer::{
        CacheLayer, CrossLayer, Footprint, Kv, KvLayer, LayerState, Limits, Moved, Positions, StateLayer,
        StepShape,
    },
};

/// The memory of a whole model. Models index it by block; callers move it through time.
#[derive(Debug)]
pub struct ModelCache {
    layers: Vec<LayerCache>,
    /// To what the layers hold on the device; `None` where nobody counts.
    claim: Option<Claim>,
    /// Whether tensors were handed out since the last pass, which others may hold still: a captured step writes where it was
    /// recorded, also what they see.
    lent: AtomicBool,
    /// Whether a pass failed in the middle and could not be taken back.
    poisoned: bool,
}

/// The kind of memory is the model's business, hence an enum; the strategy is not, hence boxes.
#[derive(Debug)]
pub enum LayerCache {
    Attention(Box<dyn KvLayer>),
    EncoderDecoder { decoder: Box<dyn KvLayer>, encoder: Box<dyn CrossLayer> },
    Recurrent(Box<dyn StateLayer>),
    Nothing,
}

impl ModelCache {
    pub fn new(layers: Vec<LayerCache>) -> Self {
        Self { layers, claim: None, lent: AtomicBool::new(false), poisoned: false }
    }

    /// The same cache, counted in `budget`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where it holds more than is left.
    pub fn within(mut self, budget: &Budget) -> Result<Self> {
        self.claim = Some(budget.claim("the cache", self.device_bytes() as u64)?);
        Ok(self)
    }

    /// Claims the memory that feeding `step` takes at most, with `working` bytes of the model's own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where there is not as much; those of [`check_buffers`](Self::check_buffers). Then nothing was
    /// changed.
    pub fn make_room(&mut self, step: &StepShape, working: usize) -> Result<()> {
        let layers = self.footprints(step);
        self.check_largest(&layers)?;
        let bytes = Self::at_most(&layers).saturating_add(working);
        let bytes = bytes.saturating_sub(self.claimed_apart()) as u64;
        self.claim.as_mut().map_or(Ok(()), |claim| claim.resize(bytes))
    }

    /// Bytes of what snapshots hold, too, which have claims of their own.
    fn claimed_apart(&mut self) -> usize {
        let Some(claim) = &self.claim else { return 0 };
        self.layers.iter_mut().flat_map(LayerCache::parts_mut).map(|part| part.claimed_apart(claim)).sum()
    }

    /// Claims what layers were given, as far as there is room: what is missing is claimed when they are fed.
    fn claim_given(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = &mut self.claim {
            _ = claim.resize(bytes);
        }
    }

    /// The budget that it is counted in.
    pub fn budget(&self) -> Option<&Budget> {
        self.claim.as_ref().map(Claim::budget)
    }

    /// Claims what is held now: to be called when layers hold less than they did.
    pub fn recount(&mut self) {
        let bytes = self.device_bytes().saturating_sub(self.claimed_apart()) as u64;
        if let Some(claim) = self.claim.as_mut().filter(|claim| claim.bytes() > bytes) {
            // Less is never refused.
            _ = claim.resize(bytes);
        }
    }

    /// Bytes on the device while `step` is stored, at most: what layers hold, of offloaded ones the largest two in a row,
    /// and what one of them takes besides.
    pub fn bytes_for(&self, step: &StepShape) -> usize {
        Self::at_most(&self.footprints(step))
    }

    /// [`bytes_for`](Self::bytes_for) if every layer were offloaded.
    pub fn bytes_offloaded(&self, step: &StepShape) -> usize {
        let mut layers = self.footprints(step);
        layers.iter_mut().for_each(|(_, offloaded)| *offloaded = true);
        Self::at_most(&layers)
    }

    /// What each layer takes while `step` is stored, and whether it is offloaded.
    fn footprints(&self, step: &StepShape) -> Vec<(Footprint, bool)> {
        self.parts().map(|part| (part.footprint(step), part.is_offloaded())).collect()
    }

    fn at_most(layers: &[(Footprint, bool)]) -> usize {
        let here = |&(layer, away): &(Footprint, bool)| if away { 0 } else { layer.held };
        let in_use = |&(layer, away): &(Footprint, bool)| if away { layer.held } else { 0 };
        let pair = |(i, layer): (usize, &(Footprint, bool))| match layers.get((i + 1) % layers.len()) {
            Some(next) if layers.len() > 1 => {
                in_use(layer).saturating_add(in_use(next)).saturating_add(layer.0.passing)
            }
            _ => in_use(layer).saturating_add(layer.0.passing),
        };
        // Users ask for any number of tokens.
        let stay = layers.iter().map(here).fold(0, usize::saturating_add);
        stay.saturating_add(layers.iter().enumerate().map(pair).max().unwrap_or(0))
    }

    /// Whether the device has buffers as large as layers need to store `step`.
    ///
    /// # Errors
    /// [`Error::BufferTooLarge`]. What is too large does not fail as an allocation does: wgpu refuses to bind it.
    pub fn check_buffers(&self, step: &StepShape) -> Result<()> {
        self.check_largest(&self.footprints(step))
    }

    fn check_largest(&self, layers: &[(Footprint, bool)]) -> Result<()> {
        let Some(largest) = self.budget().and_then(Budget::largest_buffer) else { return Ok(()) };
        // Of a layer's keys, or its values.
        let needed = layers.iter().map(|(layer, _)| layer.largest / 2).max().unwrap_or(0) as u64;
        if needed <= largest { Ok(()) } else { Err(Error::BufferTooLarge { needed, largest }) }
    }

    /// What the largest layer takes besides while its buffer doubles; 0 where buffers never grow.
    pub fn bytes_growing(&self, step: &StepShape) -> usize {
        let largest = self.parts().map(|part| part.footprint(step).largest).max().unwrap_or(0);
        if self.is_static() { 0 } else { largest / 2 }
    }

    /// Forgets all tokens behind the first `len`, in every layer or in none. Layers that have seen no more stay as they are:
    /// so this also takes back a forward pass that failed in the middle.
    ///
    /// # Errors
    /// [`Error::CannotTruncate`] where a layer cannot return to `len`: see [`rewind_point`](Self::rewind_point).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.check_usable()?;
        let stuck = |layer: &&dyn CacheLayer| layer.seq_len() > len && layer.rewind_point(len) != len;
        if let Some(stuck) = self.timed().find(stuck) {
            return Err(Error::CannotTruncate { layer: stuck.name(), len });
        }
        self.layers.iter_mut().filter_map(LayerCache::timed_mut).try_for_each(|layer| layer.truncate(len))
    }

    /// The largest length, `at_most` or less, that every layer can return to exactly. 0 is always possible.
    pub fn rewind_point(&self, at_most: usize) -> usize {
        let mut len = at_most.min(self.seq_len());
        loop {
            let shorter = self.timed().map(|layer| layer.rewind_point(len)).min().unwrap_or(len);
            if shorter == len {
                return len;
            }
            len = shorter;
        }
    }

    /// The layers, to wrap or replace them: block by block, as the model indexes them.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// Tokens seen so far. Always 0 for a stateless cache, and for one that can only be reset.
    pub fn seq_len(&self) -> usize {
        if self.poisoned {
            return 0;
        }
        self.timed().next().map_or(0, CacheLayer::seq_len)
    }

    /// Begins a forward pass that stores `step`, with `working` bytes of the model's own. `padded`: whether rows begin with
    /// padding.
    ///
    /// # Errors
    /// Those of [`admits`](Self::admits) and [`make_room`](Self::make_room); [`Error::Poisoned`]. Then nothing was changed.
    pub fn begin(&mut self, step: &StepShape, padded: bool, working: usize) -> Result<Pass<'_>> {
        self.check_usable()?;
        self.admits(step.tokens, padded)?;
        self.make_room(step, working)?;
        Ok(Pass { before: self.seq_len(), committed: false, cache: self })
    }

    /// Says that what is held cannot be trusted: nothing but [`reset`](Self::reset) can follow.
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    fn check_usable(&self) -> Result<()> {
        if self.poisoned { Err(Error::Poisoned) } else { Ok(()) }
    }

    /// Whether every layer can store `tokens` more tokens of each row at once. `padded`: whether rows begin with padding.
    ///
    /// # Errors
    /// That of the first layer that cannot. Asked before a forward pass, so that no layer is a step ahead of another.
    pub fn admits(&self, tokens: usize, padded: bool) -> Result<()> {
        self.timed().try_for_each(|layer| layer.admits(tokens, padded))
    }

    /// The most tokens that the sequence can have; `None`: any number.
    pub fn capacity(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.capacity).min()
    }

    /// Hint: the sequence is going to reach `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize) {
        self.parts_mut().for_each(|part| part.reserve(tokens));
    }

    /// The most tokens that a forward pass may feed now; `None`: any number.
    pub fn at_once(&self) -> Option<usize> {
        self.limits().filter_map(|limits| limits.at_once).min()
    }

    /// Whether the sequence may go on for ever: rotary positions stay below a bound.
    pub fn is_endless(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.endless)
    }

    /// Whether no buffer ever grows, so that a step is the same launches for ever.
    pub fn is_static(&self) -> bool {
        self.limits().next().is_some() && self.limits().all(|limits| limits.fixed_buffers)
    }

    /// How many of the next one-token steps one captured step can be replayed for. See [`KvLayer::replayable`].
    pub fn replayable(&self) -> usize {
        if self.lent.load(Ordering::Relaxed) {
            return 0;
        }
        let only_keys =
            self.layers.iter().all(|layer| matches!(layer, LayerCache::Attention(_) | LayerCache::Nothing));
        if only_keys { self.keys().map(KvLayer::replayable).min().unwrap_or(0) } else { 0 }
    }

    /// Counts a token that a replayed step stored in every layer.
    pub fn replayed(&mut self) {
        for layer in &mut self.layers {
            if let LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } = layer {
                kv.replayed();
            }
        }
    }

    /// The same memory once more, at no cost: tensors are shared until one of the two writes to them.
    ///
    /// One prompt serves many continuations this way.
    pub fn snapshot(&self) -> Self {
        self.lent.store(true, Ordering::Relaxed);
        if let Some(claim) = &self.claim {
            self.parts().for_each(|part| part.claim_shared(claim));
        }
        let copy = |layer: &LayerCache| match layer {
            LayerCache::Attention(kv) => LayerCache::Attention(kv.snapshot()),
            LayerCache::EncoderDecoder { decoder, encoder } => {
                LayerCache::EncoderDecoder { decoder: decoder.snapshot(), encoder: encoder.snapshot() }
            }
            LayerCache::Recurrent(state) => LayerCache::Recurrent(state.snapshot()),
            LayerCache::Nothing => LayerCache::Nothing,
        };
        // What it holds besides is claimed when it is fed.
        let claim = self.claim.as_ref().and_then(|claim| claim.budget().claim("the cache", 0).ok());
        let layers = self.layers.iter().map(copy).collect();
        Self { layers, claim, lent: AtomicBool::new(true), poisoned: self.poisoned }
    }

    pub fn keep_history(&mut self, n: usize) {
        self.parts_mut().for_each(|part| part.keep_history(n));
    }

    /// Rebuilds the batch, in every layer or in none: new row `i` is old row `rows[i]`. Rows may be repeated and left out.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`].
    pub fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        for have in self.parts().filter_map(CacheLayer::rows) {
            if let Some(&row) = rows.iter().find(|&&row| row >= have) {
                return Err(Error::NoSuchRow { row, rows: have });
            }
        }
        self.parts_mut().try_for_each(|part| part.reorder(rows))
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        self.poisoned = false;
        self.parts_mut().for_each(|part| part.reset());
        self.recount();
    }

    /// The keys and values of every attention block, `[batch, kv_heads, tokens, head_dim]`, one token after the other:
    /// transformers' legacy format. Keys are rotated as they are held; where nothing is held, nothing is returned.
    pub fn to_legacy(&self) -> Result<Vec<Kv>> {
        self.lent.store(true, Ordering::Relaxed);
        self.keys().filter_map(|layer| layer.gather().transpose()).collect()
    }

    /// Takes over keys and values in transformers' legacy format, as if they had been fed. To be called on a new cache.
    ///
    /// They must stand at positions from 0 on: a sliding window that has left tokens behind cannot be taken over this
    /// way, but saved and restored.
    ///
    /// # Errors
    /// [`Error::Import`] for another number of blocks, or tensors that do not fit each other; after an error the cache can
    /// only be reset.
    pub fn from_legacy(&mut self, layers: Vec<Kv>) -> Result<()> {
        let wrong = |why: String| Err(Error::Import { why });
        let blocks = self.keys().count();
        if self.seq_len() > 0 {
            return wrong("the cache is not empty; reset it".to_owned());
        }
        if layers.len() != blocks {
            return wrong(format!("{} layers are given for {blocks} attention blocks", layers.len()));
        }
        let [rows, _, tokens, _] = layers.first().map_or([0; 4], |(keys, _)| keys.dims());
        for (keys, values) in &layers {
            let ([r, heads, t, _], [vr, vheads, vt, _]) = (keys.dims(), values.dims());
            if (r, t) != (rows, tokens) || (vr, vheads, vt) != (rows, heads, tokens) {
                return wrong(format!("keys {:?} and values {:?} do not fit", keys.dims(), values.dims()));
            }
        }
        self.admits(tokens, false)?;
        let kv = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } => Some(kv),
            LayerCache::Recurrent(_) | LayerCache::Nothing => None,
        });
        for (layer, (keys, values)) in kv.zip(layers) {
            let first = layer.span(tokens).query(tokens);
            let positions = Positions::all_at(first, rows, &keys.device());
            layer.update(keys, values, &positions)?;
        }
        self.claim_given();
        Ok(())
    }

    /// Copies all that a new cache needs to go on in this one's place.
    pub fn save(&self) -> Result<Vec<LayerState>> {
        self.check_usable()?;
        self.parts().map(|part| part.save()).collect()
    }

    /// Becomes the cache that `states` were copied from. To be called on a new cache of the same plan; after an error it
    /// can only be reset.
    ///
    /// # Errors
    /// [`Error::Import`] where they are the state of another kind of cache, or of none.
    pub fn restore(&mut self, states: Vec<LayerState>) -> Result<()> {
        let parts = self.parts().count();
        if states.len() != parts {
            return Err(Error::Import { why: format!("{} layers stand where {parts} were", states.len()) });
        }
        self.parts_mut().zip(states).try_for_each(|(part, state)| part.restore(state))?;
        self.claim_given();
        // Layers are fed together, so they have seen as much.
        let lens: Vec<usize> = self.timed().map(CacheLayer::seq_len).collect();
        match lens.windows(2).all(|pair| pair[0] == pair[1]) {
            true => Ok(()),
            false => {
                Err(Error::Import { why: "its layers have seen different numbers of tokens".to_owned() })
            }
        }
    }

    /// Whether what it holds is of that many rows.
    pub fn is_of_rows(&self, rows: usize) -> bool {
        self.parts().all(|part| part.rows().map_or(part.seq_len() == 0, |have| have == rows))
    }

    /// The name of the strategy that serves each block's own keys and values; `None` for blocks without any.
    pub fn strategies(&self) -> impl Iterator<Item = Option<&'static str>> {
        self.layers.iter().map(|layer| match layer {
            LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } => Some(kv.name()),
            LayerCache::Recurrent(_) | LayerCache::Nothing => None,
        })
    }

    /// Bytes held on the device, room allocated ahead of need included.
    pub fn device_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().device).sum()
    }

    /// Of these, the bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().shared).sum()
    }

    /// Bytes held in host memory, in place of the device's.
    pub fn host_bytes(&self) -> usize {
        self.parts().map(|part| part.usage().host).sum()
    }

    /// Bytes that went between the host and the device so far.
    pub fn moved(&self) -> Moved {
        self.parts().map(|part| part.usage().moved).sum()
    }

    fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } => Some(&**kv),
            LayerCache::Recurrent(_) | LayerCache::Nothing => None,
        })
    }

    fn limits(&self) -> impl Iterator<Item = Limits> {
        self.keys().map(KvLayer::limits)
    }

    /// The layers that count the sequence's tokens. An encoder's keys do not: decoding leaves no trace there.
    fn timed(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().filter_map(LayerCache::timed)
    }

    fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().flat_map(LayerCache::parts)
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        self.layers.iter_mut().flat_map(LayerCache::parts_mut)
    }
}

impl LayerCache {
    /// Whether it is on the device only while it is used.
    pub fn is_offloaded(&self) -> bool {
        self.parts().any(CacheLayer::is_offloaded)
    }

    /// Moves it to host memory. From then on it is on the device only while it is used.
    pub fn offload(&mut self) -> Result<()> {
        self.parts_mut().try_for_each(|part| part.offload())
    }

    fn timed(&self) -> Option<&dyn CacheLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&**kv),
            Self::Recurrent(state) => Some(&**state),
            Self::Nothing => None,
        }
    }

    fn timed_mut(&mut self) -> Option<&mut dyn CacheLayer> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(&mut **kv),
            Self::Recurrent(state) => Some(&mut **state),
            Self::Nothing => None,
        }
    }

    fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        let parts: [Option<&dyn CacheLayer>; 2] = match self {
            Self::Attention(kv) => [Some(&**kv), None],
            Self::EncoderDecoder { decoder, encoder } => [Some(&**decoder), Some(&**encoder)],
            Self::Recurrent(state) => [Some(&**state), None],
            Self::Nothing => [None, None],
        };
        parts.into_iter().flatten()
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        let parts: [Option<&mut dyn CacheLayer>; 2] = match self {
            Self::Attention(kv) => [Some(&mut **kv), None],
            Self::EncoderDecoder { decoder, encoder } => [Some(&mut **decoder), Some(&mut **encoder)],
            Self::Recurrent(state) => [Some(&mut **state), None],
            Self::Nothing => [None, None],
        };
        parts.into_iter().flatten()
    }
}
