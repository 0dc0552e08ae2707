//! One memory per block.

use burn::tensor::{Device, TensorData};

use crate::{
    Error, Result,
    layer::{CacheLayer, CrossLayer, KvLayer, StateLayer},
    slot::checked_rows,
};

/// The memory of a whole model. Models index it by block; callers move it through time.
#[derive(Debug)]
pub struct ModelCache {
    layers: Vec<LayerCache>,
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
        Self { layers }
    }

    /// Rebuilds every layer, e.g. to wrap it.
    pub fn map(self, f: impl FnMut(LayerCache) -> LayerCache) -> Self {
        Self { layers: self.layers.into_iter().map(f).collect() }
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

    pub fn keep_history(&mut self, n: usize) {
        self.parts_mut().for_each(|part| part.keep_history(n));
    }

    /// New row `i` is old row `rows[i]`, in every layer or, if a row is not there, in none.
    pub fn select_rows(&mut self, rows: &[usize]) -> Result<()> {
        self.parts().try_for_each(|part| checked_rows(&part.slots(), rows))?;
        self.parts_mut().try_for_each(|part| part.select_rows(rows))
    }

    pub fn reset(&mut self) {
        self.parts_mut().for_each(|part| part.reset());
    }

    /// Moves everything to host memory, one entry a memory; only [`import`](Self::import) may follow.
    pub fn export(&mut self) -> Result<Vec<Vec<TensorData>>> {
        let host = self.parts_mut().map(|part| part.read()).collect::<Result<_>>()?;
        self.parts_mut().for_each(|part| part.release());
        Ok(host)
    }

    /// Puts back what [`export`](Self::export) returned.
    pub fn import(&mut self, host: Vec<Vec<TensorData>>, device: &Device) -> Result<()> {
        let parts = self.parts().count();
        if host.len() != parts {
            return Err(Error::Import { why: format!("{} layers stand where {parts} were", host.len()) });
        }
        self.parts().zip(&host).try_for_each(|(part, state)| part.check(state))?;
        self.parts_mut().zip(host).try_for_each(|(part, state)| part.import(state, device))
    }

    pub fn device_bytes(&self) -> usize {
        self.parts().map(CacheLayer::device_bytes).sum()
    }

    fn hint(&mut self, layer: usize) -> Result<()> {
        let next = (layer + 1) % self.layers.len().max(1);
        self.layers.get_mut(next).map_or(Ok(()), |next| next.parts_mut().try_for_each(|part| part.prefetch()))
    }

    fn parts(&self) -> impl Iterator<Item = &dyn CacheLayer> {
        self.layers.iter().flat_map(LayerCache::parts)
    }

    fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn CacheLayer> {
        self.layers.iter_mut().flat_map(LayerCache::parts_mut)
    }
}

impl LayerCache {
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
