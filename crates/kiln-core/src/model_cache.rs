//! One memory per block.

use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{Device, Tensor, TensorData};

use crate::{
    Error, Result,
    budget::{Budget, Claim},
    layer::{CacheLayer, CrossLayer, Feed, Footprint, KvLayer, LayerState, Moved, Place, StateLayer},
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
        Self { layers, claim: None, lent: AtomicBool::new(false) }
    }

    /// The same cache, counted in `budget`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where it holds more than is left.
    pub fn within(mut self, budget: &Budget) -> Result<Self> {
        self.claim = Some(budget.claim("the cache", self.device_bytes() as u64)?);
        Ok(self)
    }

    /// Claims the memory that feeding `feed` takes at most, with `working` bytes of the model's own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where there is not as much; those of [`check_buffers`](Self::check_buffers). Then nothing was
    /// changed.
    pub fn make_room(&mut self, feed: &Feed, working: usize) -> Result<()> {
        self.check_buffers(feed)?;
        let bytes = self.bytes_for(feed).saturating_add(working);
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

    /// Bytes on the device while `feed` is stored, at most: what layers hold, of offloaded ones the largest two in a row,
    /// and what one of them takes besides.
    pub fn bytes_for(&self, feed: &Feed) -> usize {
        Self::at_most(self.parts().map(|part| (part.footprint(feed), part.is_offloaded())))
    }

    /// The same, if every layer were offloaded.
    pub fn bytes_offloaded(&self, feed: &Feed) -> usize {
        Self::at_most(self.parts().map(|part| (part.footprint(feed), true)))
    }

    fn at_most(layers: impl Iterator<Item = (Footprint, bool)>) -> usize {
        let layers: Vec<_> = layers.collect();
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

    /// Whether the device has buffers as large as layers need to store `feed`.
    ///
    /// # Errors
    /// [`Error::BufferTooLarge`]. What is too large does not fail as an allocation does: wgpu refuses to bind it.
    pub fn check_buffers(&self, feed: &Feed) -> Result<()> {
        let Some(largest) = self.budget().and_then(Budget::largest_buffer) else { return Ok(()) };
        // Of a layer's keys, or its values.
        let needed = self.parts().map(|part| part.footprint(feed).largest / 2).max().unwrap_or(0) as u64;
        if needed <= largest { Ok(()) } else { Err(Error::BufferTooLarge { needed, largest }) }
    }

    /// What the largest layer takes besides while its buffer doubles; 0 where buffers never grow.
    pub fn bytes_growing(&self, feed: &Feed) -> usize {
        let largest = self.parts().map(|part| part.footprint(feed).largest).max().unwrap_or(0);
        if self.is_static() { 0 } else { largest / 2 }
    }

    /// Takes back what a forward pass that failed in the middle did: layers that have seen more than `tokens` tokens
    /// forget what they have seen since.
    ///
    /// # Errors
    /// [`Error::CannotRollBack`] where a layer cannot; then nothing was changed, and the cache can only be reset.
    pub fn undo_to(&mut self, tokens: usize) -> Result<()> {
        let ahead = |part: &dyn CacheLayer| part.seq_len().saturating_sub(tokens);
        if let Some(stuck) = self.parts().find(|part| !part.can_roll_back(ahead(*part))) {
            return Err(Error::CannotRollBack { layer: stuck.name(), tokens: ahead(stuck) });
        }
        self.parts_mut().try_for_each(|part| {
            let ahead = part.seq_len().saturating_sub(tokens);
            if ahead > 0 { part.roll_back(ahead) } else { Ok(()) }
        })
    }

    /// The layers, to wrap or replace them: block by block, as the model indexes them.
    pub fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// Tokens seen so far. 0 for ever where nothing is remembered.
    pub fn seq_len(&self) -> usize {
        self.layers.iter().find_map(LayerCache::seq_len).unwrap_or(0)
    }

    /// The keys and values of block `layer`.
    pub fn attention(&mut self, layer: usize) -> Result<&mut dyn KvLayer> {
        self.hint(layer)?;
        match self.layers.get_mut(layer) {
            Some(LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. }) => Ok(&mut **kv),
            _ => Err(Error::WrongMemory { layer, wanted: "attention" }),
        }
    }

    /// The encoder's keys and values for block `layer`.
    pub fn encoder(&mut self, layer: usize) -> Result<&mut dyn CrossLayer> {
        match self.layers.get_mut(layer) {
            Some(LayerCache::EncoderDecoder { encoder, .. }) => Ok(&mut **encoder),
            _ => Err(Error::WrongMemory { layer, wanted: "encoder" }),
        }
    }

    /// The recurrent state of block `layer`.
    pub fn recurrent(&mut self, layer: usize) -> Result<&mut dyn StateLayer> {
        self.hint(layer)?;
        match self.layers.get_mut(layer) {
            Some(LayerCache::Recurrent(state)) => Ok(&mut **state),
            _ => Err(Error::WrongMemory { layer, wanted: "recurrent" }),
        }
    }

    /// Whether the latest `n` tokens can be forgotten exactly.
    pub fn can_roll_back(&self, n: usize) -> bool {
        self.parts().all(|part| part.can_roll_back(n))
    }

    /// Forgets the latest `n` tokens in every layer, or in none.
    pub fn roll_back(&mut self, n: usize) -> Result<()> {
        if let Some(stuck) = self.parts().find(|part| !part.can_roll_back(n)) {
            return Err(Error::CannotRollBack { layer: stuck.name(), tokens: n });
        }
        self.parts_mut().try_for_each(|part| part.roll_back(n))
    }

    /// Whether `n` more tokens of each row will be taken at once by every layer. `padded`: whether rows begin with padding.
    ///
    /// # Errors
    /// That of the first layer that refuses. Asked before a forward pass, so that no layer is a step ahead of another.
    pub fn admits(&self, n: usize, padded: bool) -> Result<()> {
        self.parts().try_for_each(|part| part.admits(n, padded))
    }

    /// The most tokens that the sequence can have; `None`: any number.
    pub fn capacity(&self) -> Option<usize> {
        self.keys().filter_map(KvLayer::capacity).min()
    }

    /// Hint: the sequence is going to reach `tokens` tokens.
    pub fn reserve(&mut self, tokens: usize) {
        self.parts_mut().for_each(|part| part.reserve(tokens));
    }

    /// The most tokens that a forward pass may feed now; `None`: any number.
    pub fn at_once(&self) -> Option<usize> {
        self.keys().filter_map(KvLayer::at_once).min()
    }

    /// Whether the sequence may go on for ever: rotary positions stay below a bound.
    pub fn is_endless(&self) -> bool {
        self.keys().next().is_some() && self.keys().all(KvLayer::is_endless)
    }

    /// Whether no buffer ever grows, so that a step is the same launches for ever.
    pub fn is_static(&self) -> bool {
        self.keys().next().is_some() && self.keys().all(KvLayer::is_static)
    }

    /// How many of the next steps, of one token each, a captured one can stand for. See [`KvLayer::repeats`].
    pub fn repeats(&self) -> usize {
        if self.lent.load(Ordering::Relaxed) {
            return 0;
        }
        let only_keys =
            self.layers.iter().all(|layer| matches!(layer, LayerCache::Attention(_) | LayerCache::Nothing));
        if only_keys { self.keys().map(KvLayer::repeats).min().unwrap_or(0) } else { 0 }
    }

    /// Counts a token that a captured step stored in every layer.
    pub fn repeated(&mut self) {
        for layer in &mut self.layers {
            if let LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } = layer {
                kv.repeated();
            }
        }
    }

    /// A forward pass has written behind whatever was handed out.
    pub(crate) fn written(&mut self) {
        *self.lent.get_mut() = false;
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
        Self { layers: self.layers.iter().map(copy).collect(), claim, lent: AtomicBool::new(true) }
    }

    pub fn keep_history(&mut self, n: usize) {
        self.parts_mut().for_each(|part| part.keep_history(n));
    }

    /// New row `i` is old row `rows[i]`, in every layer or, if a row is not there, in none.
    pub fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.parts().try_for_each(|part| part.check_rows(rows))?;
        self.parts_mut().try_for_each(|part| part.select_rows(rows))
    }

    pub fn reset(&mut self) {
        self.parts_mut().for_each(|part| part.reset());
        self.recount();
    }

    /// Moves everything to host memory, one entry a memory; only [`import`](Self::import) may follow.
    pub fn export(&mut self) -> Result<Vec<Vec<TensorData>>> {
        let host = self.parts_mut().map(|part| part.read()).collect::<Result<_>>()?;
        self.parts_mut().for_each(|part| part.release());
        self.recount();
        Ok(host)
    }

    /// Puts back what [`export`](Self::export) returned.
    pub fn import(&mut self, host: Vec<Vec<TensorData>>, device: &Device) -> Result<()> {
        let parts = self.parts().count();
        if host.len() != parts {
            return Err(Error::Import { why: format!("{} layers stand where {parts} were", host.len()) });
        }
        self.parts().zip(&host).try_for_each(|(part, state)| part.check(state))?;
        self.parts_mut().zip(host).try_for_each(|(part, state)| part.import(state, device))?;
        self.claim_given();
        Ok(())
    }

    /// The keys and values of every attention block, `[batch, kv_heads, tokens, head_dim]`, one token after the other:
    /// transformers' legacy format. Keys are rotated as they are held; where nothing is held, nothing is returned.
    pub fn to_legacy(&self) -> Result<Vec<(Tensor<4>, Tensor<4>)>> {
        self.lent.store(true, Ordering::Relaxed);
        self.keys().filter_map(|layer| layer.dense().transpose()).collect()
    }

    /// Takes over keys and values in transformers' legacy format, as if they had been fed. To be called on a new cache.
    ///
    /// They must stand at positions from 0 on: a sliding window that has left tokens behind cannot be taken over this
    /// way, but saved and restored.
    ///
    /// # Errors
    /// [`Error::Import`] for another number of blocks, or tensors that do not fit each other; after an error the cache can
    /// only be reset.
    pub fn from_legacy(&mut self, layers: Vec<(Tensor<4>, Tensor<4>)>) -> Result<()> {
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
            let place = Place::new(layer.span(tokens).query(tokens), &[], &keys.device());
            layer.update(keys, values, &place)?;
        }
        self.claim_given();
        Ok(())
    }

    /// Copies all that a new cache needs to go on in this one's place.
    pub fn save(&mut self) -> Result<Vec<LayerState>> {
        self.parts_mut().map(|part| part.save()).collect()
    }

    /// Becomes the cache that `states` were copied from. To be called on a new cache of the same plan; after an error it
    /// can only be reset.
    ///
    /// # Errors
    /// [`Error::Import`] where they are the state of another kind of cache, or of none.
    pub fn restore(&mut self, states: Vec<LayerState>, device: &Device) -> Result<()> {
        let parts = self.parts().count();
        if states.len() != parts {
            return Err(Error::Import { why: format!("{} layers stand where {parts} were", states.len()) });
        }
        self.parts_mut().zip(states).try_for_each(|(part, state)| part.restore(state, device))?;
        self.claim_given();
        // Layers are fed together, so they have seen as much.
        let lens: Vec<usize> = self.layers.iter().filter_map(LayerCache::seq_len).collect();
        match lens.windows(2).all(|pair| pair[0] == pair[1]) {
            true => Ok(()),
            false => {
                Err(Error::Import { why: "its layers have seen different numbers of tokens".to_owned() })
            }
        }
    }

    /// Whether what it holds is of that many rows.
    pub fn is_of_rows(&self, rows: usize) -> bool {
        self.parts().all(|part| match part.check_rows(&[rows]) {
            Err(Error::NoSuchRow { rows: have, .. }) => have == rows,
            // It has more rows, or holds nothing.
            Ok(()) => part.seq_len() == 0,
            Err(_) => false,
        })
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
        self.parts().map(CacheLayer::device_bytes).sum()
    }

    /// Of these, the bytes that snapshots hold too. The budget counts them once.
    pub fn shared_bytes(&self) -> usize {
        self.parts().map(CacheLayer::shared_bytes).sum()
    }

    /// Bytes held in host memory, in place of the device's.
    pub fn host_bytes(&self) -> usize {
        self.parts().map(CacheLayer::host_bytes).sum()
    }

    /// Bytes that went between the host and the device so far.
    pub fn moved(&self) -> Moved {
        self.parts().map(CacheLayer::moved).sum()
    }

    fn hint(&mut self, layer: usize) -> Result<()> {
        self.claim.as_ref().map_or(Ok(()), Claim::allocates)?;
        let next = (layer + 1) % self.layers.len().max(1);
        self.layers.get_mut(next).map_or(Ok(()), |next| next.parts_mut().try_for_each(|part| part.prefetch()))
    }

    fn keys(&self) -> impl Iterator<Item = &dyn KvLayer> {
        self.layers.iter().filter_map(|layer| match layer {
            LayerCache::Attention(kv) | LayerCache::EncoderDecoder { decoder: kv, .. } => Some(&**kv),
            LayerCache::Recurrent(_) | LayerCache::Nothing => None,
        })
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

    fn seq_len(&self) -> Option<usize> {
        match self {
            Self::Attention(kv) | Self::EncoderDecoder { decoder: kv, .. } => Some(kv.seq_len()),
            Self::Recurrent(state) => Some(state.seq_len()),
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
